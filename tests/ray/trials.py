"""What the trials of test_tune.py train. Their workers import this module, and so it imports little."""

import os
import signal

import paceline


def training_func(config):
    for _ in range(config["num_epochs"]):
        paceline.report(output=config["input"], worker_pid=os.getpid())


def climb(config):
    """Counts steps, and keeps what every step was made with."""
    state = paceline.load_checkpoint() or {"made_with": []}
    made_with = list(state["made_with"])
    while len(made_with) < config.get("num_steps", 6):
        made_with.append(config["speed"])
        paceline.save_checkpoint(made_with=made_with)
        paceline.report(score=sum(made_with), made_with=list(made_with))


def stumble(config):
    """Raises in its third step, at the first try."""
    state = paceline.load_checkpoint() or {"num_steps": 0, "num_tries": 0}
    num_tries = state["num_tries"] + 1
    for num_steps in range(state["num_steps"] + 1, 5):
        if num_steps == 3 and num_tries == 1:
            raise LookupError("no third step")
        paceline.report(num_steps=num_steps, num_tries=num_tries)
        paceline.save_checkpoint(num_steps=num_steps, num_tries=num_tries)


def lose_a_worker(config):
    state = paceline.load_checkpoint() or {"num_steps": 0}
    for num_steps in range(state["num_steps"] + 1, 4):
        if num_steps == 2 and paceline.world_rank() == 1 and not state["num_steps"]:
            os.kill(os.getpid(), signal.SIGKILL)
        paceline.report(rank=paceline.world_rank(), cwd=os.getcwd())
        paceline.save_checkpoint(num_steps=num_steps)
        if not state["num_steps"]:
            paceline.load_checkpoint()  # waits until it is committed
