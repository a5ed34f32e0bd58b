"""Notes that the ranks of an attempt leave for each other with whoever listens to all of them. Pure."""

from dataclasses import dataclass, field
from typing import Any

from paceline.workers.base import Asked

TOPICS = ("put", "get")


@dataclass
class Notes:
    """By which ranks find each other, before they have another way."""

    left: dict[str, Any] = field(default_factory=dict)
    readers: list[Asked] = field(default_factory=list)

    def take(self, question: Asked) -> list[tuple[Asked, Any]]:
        """A rank puts a note, a pair of name and text, or wants to get one. Returns what can be answered now: who asks
        for a note that is not there yet, waits for it."""
        if question.topic == "get":
            self.readers.append(question)
            answers = []
        else:
            name, text = question.value
            self.left[name] = text
            answers = [(question, None)]
        found = [(reader, self.left[reader.value]) for reader in self.readers if reader.value in self.left]
        self.readers = [reader for reader in self.readers if reader.value not in self.left]
        return [*answers, *found]
