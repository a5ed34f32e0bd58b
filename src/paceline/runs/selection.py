"""Which run somebody means: a few words, and the names of all runs. Pure.

NAME             the newest run of that name; a prefix is enough, if there is only one that begins so
NAME RUN         run_003, or 3, or a prefix, or latest, or -1
NAME/RUN         the same
latest, -1, -2   the newest of all, the one before
@TAG             the newest with that tag
GLOB             *, ? and [..] in NAME or NAME/RUN
"""

import difflib
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from paceline.errors import ArgumentError, RunNotFoundError

_NUM_TOLD = 8
_BACK = re.compile(r"-\d+")
_DATE = re.compile(r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?$")
_LATEST = "latest"

Tagged = Callable[[str], frozenset[str]]
"""The tags of a run, by its name."""


def select_one(words: Sequence[str], names: Sequence[str], tags_of: Tagged) -> str:
    """`names` are paths below the root (`exp/run_001`), newest first. RunNotFoundError if none is meant; ArgumentError,
    with the candidates, if it is not clear which. Without words, it is the newest."""
    found = select(words, names, tags_of)
    if len(found) > 1 and not (words and words[0].startswith("@")):
        raise ArgumentError(f"{_quoted(words)} means {len(found)} runs, and one is expected: {_some(found)}.")
    return found[0]


def select(words: Sequence[str], names: Sequence[str], tags_of: Tagged) -> list[str]:
    """All that are meant, newest first, and at least one. A glob or a tag may mean several; others mean one."""
    for word in words:
        if word.startswith("-") and not _BACK.fullmatch(word) and not _is_said(word, names):
            raise ArgumentError(
                f"{word!r} is neither an option nor a run. `-1` is the newest run, `-2` the one before."
            )
    if len(words) > 2:
        raise ArgumentError(f"{_quoted(words)}: expected NAME, NAME RUN or NAME/RUN, not {len(words)} words.")
    if not names:
        raise RunNotFoundError("There are no runs yet.")
    if len(words) == 2:
        return _of_name(words[0], words[1], names)
    word = words[0] if words else _LATEST
    if _is_relative(word):
        return [_back(word, names, "runs")]
    if word in names:  # before all that its characters could mean
        return [word]
    if word in map(_parent, names):
        return [_newest_of(word, names)]
    if word.startswith("@"):
        return _tagged(word[1:], names, tags_of)
    if _is_glob(word):
        return _globbed(word, names)
    name, _, run = word.rpartition("/")
    if name and _names_like(name, names) and (_is_relative(run) or _runs_like(run, names)):
        return _of_name(name, run, names)
    return [_newest_of(_one_name(word, names), names)]


def _of_name(name: str, run: str, names: Sequence[str]) -> list[str]:
    if (_is_glob(name) and name not in map(_parent, names)) or _is_glob(run):
        return _globbed(f"{name}/{run}", names)
    meant = _one_name(name, names)
    runs = [one for one in names if _parent(one) == meant]
    if _is_relative(run):
        return [_back(run, runs, f"runs of {_parent(runs[0])}")]
    found = _runs_like(run, runs)
    if not found:
        raise RunNotFoundError(f"{_parent(runs[0])} has no run {run!r}. It has {_some([_base(one) for one in runs])}.")
    if len(found) > 1:
        raise ArgumentError(f"{run!r} is the beginning of {len(found)} runs: {_some(found)}. Say more of it.")
    return found


def _runs_like(run: str, names: Sequence[str]) -> list[str]:
    """Exactly so, or by number, or else by their beginning."""
    exact = [one for one in names if _base(one) == run]
    if exact:
        return exact
    if run.isdecimal():
        return [one for one in names if re.fullmatch(rf"run_0*{int(run)}", _base(one))]
    return [one for one in names if run and _base(one).startswith(run)]


def _one_name(word: str, names: Sequence[str]) -> str:
    found = _names_like(word, names)
    if not found:
        raise RunNotFoundError(f"No run has a name that begins with {word!r}.{_meant(word, names)}")
    if len({_DATE.sub("", name) for name in found}) > 1:
        raise ArgumentError(f"{word!r} is the beginning of {len(found)} names: {_some(found)}. Say more of it.")
    return found[0]  # of names that differ by their dates alone, as `paceline run` gives them, the newest


def _names_like(word: str, names: Sequence[str]) -> list[str]:
    """Exactly so; else as the last part of a path; else by the beginning of either."""
    every = list(dict.fromkeys(map(_parent, names)))
    word = word.rstrip("/")
    tries: list[Callable[[str], bool]] = [
        lambda name: name == word,
        lambda name: name.endswith(f"/{word}"),
        lambda name: name.startswith(word) or _base(name).startswith(word),
    ]
    return next((found for is_so in tries if (found := [name for name in every if is_so(name)])), []) if word else []


def _newest_of(name: str, names: Sequence[str]) -> str:
    return next(one for one in names if _parent(one) == name)


def _tagged(tag: str, names: Sequence[str], tags_of: Tagged) -> list[str]:
    found = [name for name in names if tag in tags_of(name)]
    if not found:
        raise RunNotFoundError(f"No run has the tag {tag!r}. `paceline xp tag RUN {tag or 'TAG'}` gives it one.")
    return found


def _globbed(pattern: str, names: Sequence[str]) -> list[str]:
    found = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(_parent(name), pattern)]
    if not found:
        raise RunNotFoundError(f"No run matches {pattern!r}.{_meant(pattern.strip('*'), names)}")
    return found


def _back(word: str, names: Sequence[str], of: str) -> str:
    place = 0 if word == _LATEST else int(word[1:]) - 1
    if not 0 <= place < len(names):
        raise RunNotFoundError(f"{word!r}: there are {len(names)} {of}, and -1 is the newest of them.")
    return names[place]


def _meant(word: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, dict.fromkeys(map(_parent, names)), n=3)
    return (
        f" Did you mean {' or '.join(close)}?" if close else f" The newest is {names[0]}; `paceline xp ls` lists them."
    )


def _is_said(word: str, names: Sequence[str]) -> bool:
    """Whether it is a whole name, with a run of it or without."""
    return word in names or not {word, _parent(word)}.isdisjoint(map(_parent, names))


def _is_relative(word: str) -> bool:
    return word == _LATEST or bool(_BACK.fullmatch(word))


def _is_glob(word: str) -> bool:
    return any(mark in word for mark in "*?[")


def _parent(name: str) -> str:
    return name.rpartition("/")[0] or name


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _quoted(words: Sequence[str]) -> str:
    return repr(" ".join(words))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_TOLD]) + (" …" if len(names) > _NUM_TOLD else "")
