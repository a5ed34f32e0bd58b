"""Fixtures of the unit tests."""

import threading

import pytest

from paceline.checkpoints.saver import Saver
from paceline.checkpoints.storage.base import open_storage
from paceline.recording.ledger import Ledger
from paceline.recording.saved import Saved
from paceline.runs import RunRequest


class Driver:
    """Commits in this process what the savers of its ranks send, as a run's driver does; what a rank says it has
    reported, it has. `heard` is what they have sent, as (rank, kind)."""

    def __init__(self, root, world_size=1, **request):
        self.request, self.world_size = RunRequest(train_func=print, **request), world_size
        self.saved = Saved(self.request, str(root))
        self.heard, self.infos = [], []
        self._turn = threading.Lock()
        self.begin()

    def begin(self):
        """A new attempt."""
        self.start, self.landmarks = self.saved.begin(self.world_size)
        self.num_reports = [0] * self.world_size
        self.ledger = Ledger(self.world_size, self.start.first_id, self.start.iteration)

    def saver(self, rank=0, opener=open_storage):
        ears = Ears(self, rank)
        return Saver(self.start, self.request.checkpoint_strategy, rank, self.world_size, ears, opener)

    def take(self, rank, kind, value):
        with self._turn:
            self.heard.append((rank, kind))
            ledger = self.ledger
            if kind == "saving":
                ledger.begin(rank, value)
            elif kind == "save_failed":
                ledger.fail(rank, *value)
            elif kind == "part":  # not "writing", which tells of one that takes long
                ledger.add(value)
                self.num_reports[rank] = max(self.num_reports[rank], value.iteration - self.start.iteration)
                cuts = ledger.take_complete(self.num_reports, [0] * self.world_size)
                results = [self.saved.commit(cut) for cut in cuts]
                if results:
                    self.saved.prune()
                self.infos += results
                pairs = zip(cuts, results, strict=True)
                ledger.failed |= {cut.id: str(one) for cut, one in pairs if isinstance(one, Exception)}
                self.saved.discard(ledger.take_lost())

    def end(self, *ranks):
        """They have returned."""
        for rank in ranks:
            self.ledger.end(rank)

    def find(self, rank, id):
        with self._turn:
            return self.saved.find(id, rank, self.ledger)


class Ears:
    """A rank's end of the connection. What is not there yet never comes: nobody else is running."""

    def __init__(self, driver, rank):
        self._driver, self._rank = driver, rank

    def send(self, kind, value):
        self._driver.take(self._rank, kind, value)

    def ask(self, topic, value, timeout_s=None):
        found = self._driver.find(self._rank, value)
        if found is None:
            raise TimeoutError
        if isinstance(found, BaseException):
            raise found
        return found

    def flush(self):
        pass


@pytest.fixture
def driver(tmp_path):
    """Makes one with checkpoints in `tmp_path / "checkpoints"`, for a number of ranks and the fields of a request."""

    def driver(world_size=1, **request):
        return Driver(tmp_path / "checkpoints", world_size, **request)

    return driver
