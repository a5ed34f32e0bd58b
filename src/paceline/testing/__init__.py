"""For tests of code that uses or extends Paceline: worker groups that fail on command, and a model with known losses."""

from paceline.testing.known_model import KnownModel
from paceline.testing.scripted import ScriptedEngine, dies, raises, reports, returns

__all__ = ["KnownModel", "ScriptedEngine", "dies", "raises", "reports", "returns"]
