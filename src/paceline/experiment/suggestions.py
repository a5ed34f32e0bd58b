"""Did you mean …?"""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence, or nothing."""
    known = [*known]
    close = get_close_matches(word, known, n=1, cutoff=0.6) or [one for one in known if one.lower() == word.lower()]
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" There is {', '.join(known)}." if 0 < len(known) <= 12 else ""
