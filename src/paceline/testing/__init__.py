"""For tests of code that uses or extends Paceline: a session without a driver, worker groups that fail on command,
and a model with known losses."""

from paceline.testing.known_model import KnownModel
from paceline.testing.scripted import ScriptedEngine, asks, dies, preempts, raises, reports, returns, saves, unheard
from paceline.testing.worker import RecordingWire, as_worker, make_session

__all__ = [
    "KnownModel",
    "RecordingWire",
    "ScriptedEngine",
    "as_worker",
    "asks",
    "dies",
    "make_session",
    "preempts",
    "raises",
    "reports",
    "returns",
    "saves",
    "unheard",
]
