"""The processes that scripts share, one for each framework."""

import contextlib

import pytest
from reader import Reader


@pytest.fixture(scope="session")
def readers(lasts, tmp_path_factory):
    """By the name of the framework."""
    with contextlib.ExitStack() as stack:
        made = {name: Reader(name, tmp_path_factory.mktemp("reader")) for name in ("jax", "tensorflow", "torch")}
        for one in made.values():
            stack.enter_context(lasts(one))
            stack.callback(one.end)
        yield made
