"""How Ray behaves in all tests, by its environment variables."""

SETTINGS = {
    "RAY_prestart_worker_first_driver": "0",  # one for each CPU, of which most would go unused
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine takes longer than Ray would wait
    "RAY_worker_niceness": "0",  # beside the tests of another process, Ray's workers would starve
}
