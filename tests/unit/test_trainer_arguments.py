"""What a Trainer says to arguments that cannot work. No worker is started."""

import os
from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import paceline
from paceline import BackendConfig, CheckpointStrategy, SGDCallback, TorchConfig, Trainer, registry
from paceline.arguments import config_of
from paceline.backends import resolve_backend
from paceline.backends.torchrun import TorchrunConfig
from paceline.control.crew import Crew
from paceline.errors import MissingDependencyError, ResourcesError
from paceline.launch.data_job import Alone
from paceline.testing import ScriptedEngine, reports, returns
from paceline.workers import ray_is_in_use, resolve_engine
from paceline.workers.base import Place, Preload, Resources, Size
from paceline.workers.devices import gpu_ids, num_threads, own_gpus, share_gpus
from paceline.workers.local import LocalEngine, LocalGroup, worker_environ


def trainer(**kwargs):
    """A Trainer whose workers, were they started, would fail the test."""
    return Trainer(**{"backend": BackendConfig(), "engine": ScriptedEngine([]), "logdir": "unused", **kwargs})


@pytest.mark.parametrize("backend", [None, 3, TorchConfig, object()])
def test_backend_is_neither_name_nor_config(backend):
    with pytest.raises(TypeError, match=r"backend is .* expected a name"):
        trainer(backend=backend)


def test_backend_name_is_unknown():
    with pytest.raises(ValueError, match=r"'pytorch' is not supported; the backends are .*'torch'"):
        trainer(backend="pytorch")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_backend_is_one_of_torchs_own(backend):
    with pytest.raises(ValueError, match=rf"backend=TorchConfig\(backend='{backend}'\)"):
        trainer(backend=backend)


def test_backend_of_ray_train_1_is_refused():
    class Old(BackendConfig):
        @property
        def backend_cls(self):
            return object

    with pytest.raises(TypeError, match=r"Old has a backend_cls, as in Ray Train 1.x.* join\(self, call"):
        trainer(backend=Old())


def test_backend_package_is_missing():
    class Absent(BackendConfig):
        name, package = "absent", "no_such_package_at_all"

    with pytest.raises(ImportError, match=r"pip install 'paceline\[absent\]'"):
        trainer(backend=Absent(), num_workers=1).start()
    assert issubclass(MissingDependencyError, ImportError)


@pytest.mark.parametrize("init_method", ["file", "", None])
def test_torch_init_method_is_unknown(init_method):
    with pytest.raises(ValueError, match="'env' or 'tcp'"):
        TorchConfig(init_method=init_method)


def test_torch_timeout_is_not_positive():
    with pytest.raises(ValueError, match="timeout_s"):
        TorchConfig(timeout_s=0)


@pytest.mark.parametrize(
    ("num_workers", "error"),
    [
        (-1, ValueError),
        (10**12, ValueError),
        ((10**12, float("inf")), ValueError),
        (1.5, TypeError),
        ("2", TypeError),
        (True, TypeError),
    ],
)
def test_number_of_workers_is_impossible(num_workers, error):
    with pytest.raises(error, match="num_workers"):
        trainer(num_workers=num_workers)


def test_inline_engine_is_one_worker():
    with pytest.raises(ValueError, match="this process alone, but num_workers=2"):
        trainer(engine="inline", num_workers=2)


def test_engine_is_unknown():
    with pytest.raises(ValueError, match="engine='slurm' is not known"):
        trainer(engine="slurm")
    with pytest.raises(TypeError, match="engine is 5"):
        trainer(engine=5)


@pytest.mark.parametrize(
    "contradiction",
    [
        {"use_gpu": True, "resources_per_worker": {"GPU": 0}},
        {"use_gpu": False, "resources_per_worker": {"GPU": 1}},
        {"use_gpu": True, "gpus_per_worker": 0},
        {"cpus_per_worker": 2, "resources_per_worker": {"CPU": 3}},
        {"cpus_per_worker": -1},
        {"resources_per_worker": {"CPU": "many"}},
    ],
)
def test_resources_contradict_each_other(contradiction):
    with pytest.raises(ValueError, match=r"GPU|CPU|contradicts"):
        trainer(**contradiction)


def test_resources_given_in_either_way_and_the_dict_is_left_alone():
    given = {"CPU": 2, "GPU": 0.5}
    assert trainer(use_gpu=True, resources_per_worker=given).resources == Resources(2, 0.5, {})
    assert given == {"CPU": 2, "GPU": 0.5}
    assert trainer(cpus_per_worker=3, gpus_per_worker=2).resources == Resources(3, 2, {})
    assert trainer(use_gpu=True).resources == Resources(None, 1.0, {})


def test_gpus_that_are_not_there():
    with pytest.raises(RuntimeError, match=r"need 2 GPUs; this machine offers 0 \(none\)"):
        share_gpus(2, 1, [])


def test_custom_resources_on_the_local_engine():
    with pytest.raises(RuntimeError, match="TPU"):
        Trainer(backend=BackendConfig(), resources_per_worker={"TPU": 1}, logdir="unused").start()


def test_each_worker_gets_its_gpus_and_sees_all_that_are_used():
    shares = share_gpus(2, 2, ["4", "5", "6", "7", "8"])
    assert [share.ids for share in shares] == [("4", "5"), ("6", "7")]
    assert {share.visible for share in shares} == {("4", "5", "6", "7")}
    assert [share.index for share in shares] == [0, 2]


def test_fractions_of_a_gpu_are_shared_by_neighbours():
    assert [share.ids for share in share_gpus(4, 0.5, ["0", "1"])] == [("0",), ("0",), ("1",), ("1",)]
    with pytest.raises(RuntimeError, match="whole numbers"):
        share_gpus(2, 1.5, ["0", "1", "2", "3"])


@pytest.mark.parametrize(
    ("local_world_size", "index", "num_visible", "expected"),
    [(1, 0, 1, [0]), (2, 1, 2, [1]), (2, 2, 4, [2, 3]), (4, 1, 2, [1]), (2, None, 4, [])],
    ids=["alone", "one each", "two each", "half of one each", "none"],
)
def test_which_of_the_gpus_that_it_sees_are_a_workers_own(local_world_size, index, num_visible, expected):
    place = Place(local_world_size=local_world_size, device_index=index)
    assert list(own_gpus(place, num_visible)) == expected


def test_worker_that_has_no_gpu_sees_none_unless_its_script_chooses(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")

    def seen(share, backend):
        crew = Crew(LocalEngine(), backend, Size(1, 1), Resources())
        return worker_environ(Place(), share, 1, crew.resources.sees_all_gpus)["CUDA_VISIBLE_DEVICES"]

    for backend in (BackendConfig(), *(resolve_backend(name) for name in registry.names("backend"))):
        assert seen(None, backend) == "", backend.name
    assert seen(None, TorchrunConfig()) == seen(None, Alone()) == "4,5,6"
    [_, share] = share_gpus(2, 1, gpu_ids())
    assert seen(share, TorchrunConfig()) == seen(share, BackendConfig()) == "4,5"


def test_gpus_are_counted_without_touching_them(tmp_path):
    for number in range(3):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert gpu_ids({}, tmp_path) == ["0", "1", "2"]
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": "2,1"}, tmp_path) == ["2", "1"]
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert gpu_ids({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []


def test_threads_follow_the_users_wish_or_the_cores():
    assert num_threads(10**6, None) == 1
    assert num_threads(1, None) == len(os.sched_getaffinity(0))
    assert num_threads(4, 3) == 3
    assert num_threads(4, 0.5) == 1


@pytest.mark.parametrize(
    "train_func", [lambda config, model: None, lambda a, b, *, c: None, lambda config, *, needed: None]
)
def test_function_wants_too_much(train_func, results_dir):
    one = trainer(logdir="too_much")
    with pytest.raises(ValueError, match=r"none, or one: the config.*functools\.partial"):
        one.run(train_func)
    assert one.latest_run_dir is None
    assert not list(one.logdir.glob("run_*")), "nothing was begun"


def test_function_is_none():
    with pytest.raises(TypeError, match="train_func is None"):
        trainer().run(None)


def test_config_is_no_dict():
    with pytest.raises(TypeError, match=r"config is \[1\] of type list"):
        trainer().run(lambda config: None, config=[1])


def test_callbacks_are_no_list_of_callbacks():
    with pytest.raises(TypeError, match="list"):
        trainer().run(lambda: None, callbacks=SGDCallback())
    with pytest.raises(TypeError, match=r"callbacks\[0\] is the class"):
        trainer().run(lambda: None, callbacks=[SGDCallback])
    with pytest.raises(TypeError, match=r"callbacks\[1\] is of type int"):
        trainer().run(lambda: None, callbacks=[SGDCallback(), 3])


def test_checkpoint_path_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        trainer().run(lambda: None, checkpoint=tmp_path / "nowhere")
    with pytest.raises(TypeError, match="checkpoint is a int"):
        trainer().run(lambda: None, checkpoint=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_to_keep": -1},
        {"checkpoint_score_order": "best"},
        {"num_to_keep": 1.5},
        {"checkpoint_score_attribute": 3},
    ],
)
def test_checkpoint_strategy_is_impossible(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        CheckpointStrategy(**wrong)
    with pytest.raises(TypeError, match="checkpoint_strategy"):
        trainer().run(lambda: None, checkpoint_strategy=wrong)


def test_hang_timeout_and_retries_are_numbers():
    with pytest.raises(ValueError, match="hang_timeout_s"):
        trainer(hang_timeout_s=0)
    with pytest.raises(TypeError, match="max_retries"):
        trainer(max_retries="3")


def test_rank_is_out_of_range():
    with pytest.raises(ValueError, match="rank=2: there are 2 workers"):
        trainer(num_workers=2).execute_single(lambda: None, rank=2)


def test_shutdown_before_start_and_twice():
    one = trainer()
    one.shutdown()
    one.shutdown()
    assert one.latest_run_dir is None


def test_logdir_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file"):
        trainer(logdir=tmp_path / "file")


def test_session_functions_outside_a_worker_do_the_single_process_thing(caplog):
    from paceline import session

    session._noticed = False
    assert paceline.report(loss=1) is None
    assert paceline.save_checkpoint(epoch=1) is None
    assert paceline.load_checkpoint() is None
    assert (paceline.world_rank(), paceline.local_rank(), paceline.node_rank(), paceline.world_size()) == (
        0,
        0,
        0,
        1,
    )
    assert not paceline.in_worker()
    assert not paceline.should_stop()
    assert len(caplog.records) == 1, "one notice, not one a call"
    assert "outside a Paceline run" in caplog.text


def test_scripted_engine_drives_a_run():
    engine = ScriptedEngine([[[*reports(2, loss=1.0), returns("a")], [*reports(2, loss=2.0), returns("b")]]])
    one = trainer(engine=engine, num_workers=2, logdir="scripted")
    assert one.run(lambda: None) == ["a", "b"]
    assert paceline.load_run(one.latest_run_dir).metrics["loss"].tolist() == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ((2, 1), r"1 <= min <= max"),
        ((0, 2), r"1 <= min <= max"),
        ((1, 2, 3), r"a pair \(min, max\)"),
        ((1.5, 2), "minimum of num_workers"),
        ((1, 2.5), "maximum of num_workers"),
        (("1", 2), "minimum of num_workers"),
    ],
)
def test_elastic_size_is_impossible(wrong, match):
    with pytest.raises((ValueError, TypeError), match=match):
        trainer(num_workers=wrong)


def test_elastic_size_may_be_endless():
    assert trainer(num_workers=(4, float("inf")))._crew.size.max == float("inf")


@pytest.mark.parametrize("name", ["replacement_timeout_s", "preemption_grace_s"])
@pytest.mark.parametrize("value", [-1, "3", None, float("nan")])
def test_durations_are_not_negative(name, value):
    with pytest.raises(ValueError, match=name):
        trainer(**{name: value})


@pytest.mark.parametrize(
    ("environ", "modules", "expected"),
    [
        ({}, {}, False),
        ({"RAY_ADDRESS": "auto"}, {}, True),
        ({"RAY_ADDRESS": "http://head:8265"}, {}, False),
        ({}, {"ray": SimpleNamespace(is_initialized=lambda: True)}, True),
        ({}, {"ray": SimpleNamespace(is_initialized=lambda: False)}, False),
    ],
)
def test_ray_is_in_use_when_connected_or_named(environ, modules, expected):
    assert ray_is_in_use(environ, modules) is expected


def test_engine_is_ray_where_that_is_in_use(monkeypatch):
    assert resolve_engine(None, max_workers=2).name == "local"
    monkeypatch.setattr("paceline.workers.ray_is_in_use", lambda: True)
    assert resolve_engine(None, max_workers=2).name == "ray"
    assert resolve_engine(None, max_workers=0).name == "inline", "no workers need no cluster"
    assert resolve_engine("local", max_workers=2).name == "local"


def test_namespace_is_a_config_and_the_function_gets_one():
    def train(args):
        args.lr *= 2
        return type(args), args.lr, vars(args)

    given = Namespace(lr=0.5, layers=[1, 2])
    with Trainer(backend=BackendConfig(), num_workers=0) as trainer:
        assert trainer.run(train, given) == [(Namespace, 1.0, {"lr": 1.0, "layers": [1, 2]})]
        assert paceline.load_run(trainer.latest_run_dir).config == {"lr": 0.5, "layers": [1, 2]}
        assert trainer.run(lambda config: config, {"lr": 1}) == [{"lr": 1}]
    assert given.lr == 0.5


def test_omegaconfs_config_is_resolved_into_a_dict():
    resolved = config_of(OmegaConf.create({"lr": 1, "layers": [{"size": "${lr}"}]}))
    assert (type(resolved), resolved) == (dict, {"lr": 1, "layers": [{"size": 1}]})
    assert type(resolved["layers"]) is list
    with pytest.raises(ValueError, match=r"cannot be resolved \(MissingMandatoryValue: .*lr"):
        config_of(OmegaConf.create({"lr": "???"}))
    with pytest.raises(TypeError, match="expected a dict"):
        config_of(OmegaConf.create([1, 2]))


def test_dataclass_is_no_config_and_the_error_says_what_to_do():
    @dataclass
    class Config:
        lr: float = 0.1

    with pytest.raises(TypeError, match=r"expected a dict, .* Give dataclasses.asdict\(config\)"):
        config_of(Config())


def test_a_trainer_shows_as_a_table_in_a_notebook():
    html = trainer(num_workers=2)._repr_html_()
    assert html.startswith(
        "<table><caption>2 workers · backend none · engine scripted (scripts) · not started</caption>"
    )
    assert html.count("<tr>") == 3


@pytest.mark.parametrize(
    ("config", "value"), [(None, "default"), ({"lr": 1}, {"lr": 1}), ({}, {})], ids=["none", "some", "empty"]
)
def test_parameter_with_a_default_keeps_it_without_a_config(config, value):
    with Trainer(backend=BackendConfig(), num_workers=0) as trainer:
        assert trainer.run(lambda argv="default": argv, config) == [value]


def test_what_is_to_be_imported_twice_needs_no_nursery_of_its_own():
    once = LocalEngine()._all_of(Preload(to_train=("json",)))
    assert LocalEngine(preload=["json"])._all_of(Preload(to_train=("json",))) == once


def test_more_workers_than_any_machine_has_are_refused(monkeypatch):
    monkeypatch.setattr("paceline.workers.local.shared_nursery", lambda preload: pytest.fail("none is started"))
    group = LocalGroup(Size(100_000, 100_000), Resources(), (), lambda: 1)
    with pytest.raises(ResourcesError, match="100000 workers on this machine: expected at most 1024"):
        group.start()
