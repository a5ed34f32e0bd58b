"""The process that scripts share."""

import pytest
from reader import Reader


@pytest.fixture(scope="session")
def reader(lasts, tmp_path_factory):
    one = Reader(tmp_path_factory.mktemp("reader"))
    with lasts(one):
        yield one
        one.close()
