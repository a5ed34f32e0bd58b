"""Trainers of other libraries on a Ray cluster: in a thread of an actor, and with files that travel to the driver."""

import numpy as np
import pytest
from integration_ranks import fit_lightning, train_transformer, train_with_fabric

import paceline

pytestmark = pytest.mark.parametrize("warm", ["ray"], indirect=True)


def losses(run):
    return run.metrics.dropna(subset="loss").set_index(["global_step", "rank"])["loss"].to_dict()


@pytest.mark.parametrize(
    "function", [train_transformer, fit_lightning, train_with_fabric], ids=["transformers", "lightning", "fabric"]
)
def test_goes_on_from_a_checkpoint_as_if_it_had_never_ended(warm, tmp_path, function):
    whole = warm.run(function, {"output_dir": str(tmp_path / "whole")})
    run = paceline.load_run(warm.latest_run_dir)
    config = {"output_dir": str(tmp_path / "rest")}
    rest = warm.run(function, config, checkpoint=run.checkpoints[1].path)
    for ours, theirs in zip((*whole[0], *whole[1]), (*rest[0], *rest[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    later, all_of_them = losses(paceline.load_run(warm.latest_run_dir)), losses(run)
    assert 0 < len(later) < len(all_of_them)
    assert later.items() <= all_of_them.items(), "on both ranks"
