"""The parts of DistributedSGD that need no worker: packing, reduction, results, what is printed, who recovers."""

import math
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ArgumentError, ArgumentTypeError, WorkersLostError
from paceline.sgd import DistributedSGD, NumpyModel, StepResult
from paceline.sgd.memory import SharedBuffers
from paceline.sgd.options import BUCKET_BYTES, options_of
from paceline.sgd.packing import Layout, Slot
from paceline.sgd.recovery import Recovery, check_budget, choose
from paceline.sgd.reduction import combined, gradients_in, mean_into, sum_into, union, used_of
from paceline.sgd.result import timing_lines
from paceline.sgd.side import num_parameters
from paceline.sgd.team import agreed
from paceline.sgd.tensorflow_replica import names_of
from paceline.workers.proc_files import address_of

ODD = Layout(
    (
        Slot("a", (3, 5)),
        Slot("b", (), "float64"),
        Slot("c", (7,)),
        Slot("none", (0, 4)),
        Slot("d", (2, 1), "float64"),
        Slot("e", (1,)),
    )
)

slots = st.builds(
    Slot,
    name=st.just("w"),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "float64", "complex64"]),
)


def filled(layout, seed=0):
    """A buffer, and what is in it by slot."""
    rng = np.random.default_rng(seed)
    buffer = np.zeros(layout.num_bytes, np.uint8)
    for view in layout.views(buffer):
        view[...] = rng.normal(size=view.shape)
    return buffer, [view.copy() for view in layout.views(buffer)]


@given(st.lists(slots, max_size=8))
def test_every_gradient_has_memory_of_its_own(slots):
    layout = Layout(tuple(slots))
    buffer = np.zeros(layout.num_bytes, np.uint8)
    for number, view in enumerate(layout.views(buffer)):
        assert view.base is not None
        assert view.shape == slots[number].shape
        view[...] = number
    for number, view in enumerate(layout.views(buffer)):
        assert (view == number).all()
    assert sum(piece.size for piece in layout.pieces(buffer)) == sum(slot.num_elements for slot in slots)


@given(st.lists(slots, max_size=8), st.integers(1, 5))
def test_shards_are_all_of_it_and_even(slots, num_shards):
    layout = Layout(tuple(slots))
    shards = layout.shards(num_shards)
    seen = np.zeros(layout.num_bytes, int)
    for segment in (segment for shard in shards for segment in shard):
        seen[segment.start : segment.stop] += 1
    assert all((seen[one.start : one.stop] == 1).all() for one in layout.segments)
    sizes = [sum(segment.num_elements for segment in shard) for shard in shards]
    assert max(sizes) - min(sizes) <= len(layout.segments)


@given(st.lists(slots, max_size=8), st.integers(1, 200))
def test_buckets_are_all_of_it_from_the_last_weight_on(slots, limit_bytes):
    layout = Layout(tuple(slots))
    seen = np.zeros(layout.num_bytes, int)
    buckets = layout.buckets(limit_bytes)
    for bucket in buckets:
        seen[bucket.start : bucket.stop] += 1
    assert all((seen[one.start : one.stop] == 1).all() for one in layout.segments)
    largest = max((slot.num_elements * np.dtype(slot.dtype).itemsize for slot in slots), default=0)
    assert all(bucket.stop - bucket.start <= max(limit_bytes, largest) for bucket in buckets)
    for dtype in {bucket.dtype for bucket in buckets}:
        starts = [bucket.start for bucket in buckets if bucket.dtype == dtype]
        assert starts == sorted(starts, reverse=True)


def test_mean_of_odd_sizes_and_mixed_dtypes():
    parts = [filled(ODD, seed) for seed in range(3)]
    mean = np.zeros(ODD.num_bytes, np.uint8)
    mean_into(mean, [buffer for buffer, _ in parts], ODD.segments, 3)
    for index, view in enumerate(ODD.views(mean)):
        one, two, three = (arrays[index] for _, arrays in parts)
        np.testing.assert_array_equal(view, (one + two + three) / view.dtype.type(3))


def test_mean_by_shards_has_the_same_bits():
    sources = [filled(ODD, seed)[0] for seed in range(3)]
    whole, sharded = (np.zeros(ODD.num_bytes, np.uint8) for _ in range(2))
    mean_into(whole, sources, ODD.segments, 3)
    for shard in ODD.shards(2):
        mean_into(sharded, sources, shard, 3)
    assert whole.tobytes() == sharded.tobytes()


def test_no_gradient_counts_as_zeros_and_stays_none_if_nobody_has_one():
    layout = Layout((Slot("a", (2,)), Slot("b", (2,)), Slot("c", (2,))))
    one = [np.array([1, 2], np.float32), None, None]
    two = [np.array([3, 4], np.float32), np.array([5, 6], np.float32), None]
    buffer = np.full(layout.num_bytes, 255, np.uint8)
    sum_into(layout.views(buffer), [one, two])
    used = used_of([one, two])
    assert used == [True, True, False]
    first, second, third = gradients_in(layout, buffer, used)
    assert first.tolist() == [4, 6]
    assert second.tolist() == [5, 6]
    assert third is None


def test_union_over_workers():
    assert union([[True, False], [False, False]]) == [True, False]
    assert union([None, [False, False]]) is None


def test_metrics_are_means_of_numbers_that_are_numbers():
    found = combined([{"a": 1, "b": math.nan, "name": "x"}, {"a": 2.0, "b": 3.0, "name": "y", "late": 5}])
    assert found == {"a": 1.5, "b": 3.0, "name": "x", "late": 5}
    assert math.isnan(combined([{"b": math.nan}])["b"])
    assert combined([{"a": np.float32(1), "b": np.int64(2)}, {"a": np.float32(2), "b": 3}]) == {"a": 1.5, "b": 2.5}
    assert combined([{"a": True}, {"a": False}]) == {"a": True}


def test_layouts_that_differ_are_told():
    one, two = Layout((Slot("w", (2,)),)), Layout((Slot("w", (3,)),))
    assert agreed([[one, one], [one, one]]) is one
    with pytest.raises(ArgumentError, match=r"model_creator\(1, 0\) differ: weight 0 is w \[2\] float32 and w \[3\]"):
        agreed([[one], [two]])
    with pytest.raises(ArgumentError, match="1 weights and 2"):
        agreed([[one], [Layout((*one.slots, *two.slots))]])


def test_memory_is_shared_and_has_no_name():
    buffers, fd = SharedBuffers.create(2, 10)
    address = address_of(fd)
    other = SharedBuffers.open(address, 2, 10)
    buffers.of(1)[...] = 7
    other.mean[...] = 9
    assert other.of(1).tolist() == [7] * 10
    assert buffers.mean.tolist() == [9] * 10
    assert other.of(0).tolist() == [0] * 10
    os.close(fd)
    assert SharedBuffers.open(address, 2, 10) is None
    with open(os.devnull) as somebody_elses:
        assert SharedBuffers.open((f"/proc/self/fd/{somebody_elses.fileno()}", address[1]), 2, 10) is None


TIMINGS = {
    "compute_grads_by_worker": [1.5, 2.5],
    "compute_grads": 3.5,
    "grad_reduce": 0.25,
    "apply_grads_by_worker": [0.5, 0.75],
    "apply_grads": 1.0,
    "step": 4.75,
}


def test_a_result_is_a_number_with_more_to_tell():
    result = StepResult([1.0, 3.0], {"accuracy": 0.5}, TIMINGS, 7)
    assert isinstance(result, float)
    assert result == 2.0
    assert f"{result} {result:.2f}" == "2.0 2.00"
    assert (result["loss"], result["accuracy"], result.losses, result.step) == (2.0, 0.5, [1.0, 3.0], 7)
    assert "loss" in result
    assert "other" not in result
    assert dict(result) == {"loss": 2.0, "accuracy": 0.5}
    assert result.timings["step"] == 4.75
    with pytest.raises(KeyError):
        result["other"]


def test_a_result_travels():
    result = StepResult([1.0, 3.0], {"accuracy": 0.5}, TIMINGS, 7)
    copy = pickle.loads(pickle.dumps(result))
    assert (float(copy), vars(copy)) == (2.0, vars(result))


def test_lines_of_a_step():
    assert timing_lines(TIMINGS) == [
        "compute grad interior time 1.5",
        "compute grad interior time 2.5",
        "compute all grads time 3.5",
        "grad reduce time 0.25",
        "apply grad interior time 0.5",
        "apply grad interior time 0.75",
        "apply all grads time 1.0",
    ]
    alone = {name: value for name, value in TIMINGS.items() if name != "grad_reduce"}
    assert "grad reduce" not in "\n".join(timing_lines(alone))


def test_who_has_made_the_step_is_gone_on_from():
    assert choose({1: 4, 2: 4}, before=4) == Recovery(keeper=1, step=4, stands=False)
    assert choose({1: 4, 2: 5}, before=4) == Recovery(keeper=2, step=5, stands=True)


def test_budget_of_losses():
    check_budget("why", 0, 1)
    check_budget("why", 100, -1)
    with pytest.raises(WorkersLostError, match=r"not replaced \(max_retries=0\): rank 1 was killed"):
        check_budget("rank 1 was killed", 0, 0)
    with pytest.raises(WorkersLostError, match=r"replaced 2 time"):
        check_budget("why", 2, 2)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (
            ["net/dense_7/kernel", "net/dense_8/kernel", "net_2/out/bias:0"],
            ["net/dense/kernel", "net/dense/kernel_1", "net/out/bias"],
        ),
        (["w", "w", "w_1_3", "w_1_4", "w"], ["w", "w_1", "w_1_1", "w_1_2", "w_2"]),
        (["w_1_2", "w"], ["w_1", "w_2"]),
    ],
)
def test_variables_of_tensorflow_have_a_name_each(paths, names):
    assert names_of([SimpleNamespace(name=name) for name in paths]) == names


def test_model_creators_take_what_they_like():
    assert num_parameters(lambda: 0) == 0
    assert num_parameters(lambda worker: 0) == 1
    assert num_parameters(lambda worker, device, more=1: 0) == 2
    assert num_parameters(lambda *all: 0) == 2
    with pytest.raises(ArgumentError, match="needs more besides"):
        num_parameters(lambda worker, device, more: 0)


def options(creator=lambda: 0, **given):
    defaults = {
        "num_workers": 2,
        "devices_per_worker": 1,
        "use_cpus": True,
        "gpu": None,
        "strategy": "allreduce",
        "device_reduce": "mean",
        "bucket_bytes": BUCKET_BYTES,
        "max_retries": 3,
        "hang_timeout_s": None,
        "grad_shard_bytes": None,
        "all_reduce_alg": None,
        "use_plasma_op": None,
    }
    return options_of(creator, **{**defaults, **given})


def test_the_mean_is_over_all_replicas_unless_devices_are_summed():
    assert options(devices_per_worker=3).divisor == 6
    assert options(devices_per_worker=3, device_reduce="sum").divisor == 2
    assert options(num_workers=0, devices_per_worker=2).divisor == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_cpus": True, "gpu": True}, "use_cpus=True contradicts gpu=True"),
        ({"use_cpus": False, "gpu": False}, "contradicts"),
        ({"strategy": "gossip"}, "the strategies are allreduce, ps, simple"),
        ({"device_reduce": "max"}, "expected 'mean', or 'sum'"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"devices_per_worker": 0}, "devices_per_worker=0"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"hang_timeout_s": 0}, "hang_timeout_s=0"),
        ({"all_reduce_alg": "fastest"}, "fastest is not known; the names were better, nccl"),
        ({"all_reduce_alg": "trivial"}, "no way without a reduction"),
    ],
)
def test_arguments_that_cannot_be_used(given, message):
    with pytest.raises(ArgumentError, match=message):
        options(**given)


def test_types_that_cannot_be_used():
    with pytest.raises(ArgumentTypeError, match="model_creator is 3 of type int"):
        options(3)
    with pytest.raises(ArgumentTypeError, match="use_cpus is 1 of type int"):
        options(use_cpus=1)
    with pytest.raises(ArgumentTypeError, match="num_workers"):
        options(num_workers=(1, 2))


def test_names_of_2018_still_work():
    with pytest.warns(DeprecationWarning, match="write strategy='ps' instead"):
        assert options(use_plasma_op=True).strategy == "ps"
    with pytest.warns(DeprecationWarning, match="bucket_bytes"):
        assert options(grad_shard_bytes=10_000_000).bucket_bytes == 10_000_000
    with pytest.warns(DeprecationWarning, match="device_reduce"):
        options(all_reduce_alg="nccl:32k:xring#2")


class Still(NumpyModel):
    learning_rate = 0.0

    def __init__(self):
        self.weights = {"w": np.zeros(1)}

    def loss_and_grad(self):
        return 2.0, {"w": np.ones(1)}


def test_step_of_2018_fetches_its_stats():
    with DistributedSGD(Still, num_workers=0, use_cpus=True, verbose=False) as sgd:
        assert sgd.step(fetch_stats=True)["loss"] == 2
