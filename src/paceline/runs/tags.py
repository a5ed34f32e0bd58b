"""Tags of a run: words that somebody has given it, in `tags.json` in its folder, so that they travel with it."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import ArgumentError, RunDamagedError
from paceline.json_text import encode_document
from paceline.runs.driver_lock import alone_in
from paceline.runs.durable import read_json, write_atomic

TAGS_FILE = "tags.json"
_TAG = re.compile(r"[\w.:+-]{1,64}")
_RUN = re.compile(r"\d+|-\d+|run_\d+|latest")
_MOST_TAGS = 100


def read_tags(run_dir: str | os.PathLike[str]) -> frozenset[str]:
    """None of a file that cannot be read, or has something else in it."""
    try:
        found = read_json(os.path.join(run_dir, TAGS_FILE)) or {}
    except RunDamagedError:
        return frozenset()
    tags = found.get("tags")
    some = tags[:_MOST_TAGS] if isinstance(tags, list) else []
    return frozenset(tag for tag in some if isinstance(tag, str) and _TAG.fullmatch(tag))


def change_tags(run_dir: Path, add: Iterable[str] = (), remove: Iterable[str] = ()) -> frozenset[str]:
    """The tags that it has then. ArgumentError for what is none."""
    for tag in add:
        if not _TAG.fullmatch(tag):
            raise ArgumentError(f"{tag!r} is no tag: expected up to 64 letters, digits and . : + - _, without spaces.")
        if _RUN.fullmatch(tag):  # `xp tag digits 3 paper`, as other verbs take NAME RUN, would tag another run
            raise ArgumentError(f"{tag!r} is no tag, but a run. The run to tag is one word: NAME/{tag}.")
    with alone_in(run_dir):  # of two who tag it at once, one would undo what the other has done
        tags = (read_tags(run_dir) | {*add}) - {*remove}
        if len(tags) > _MOST_TAGS:
            raise ArgumentError(f"{run_dir} would have {len(tags)} tags; expected at most {_MOST_TAGS}.")
        path = run_dir / TAGS_FILE
        if tags:
            write_atomic(path, encode_document({"tags": sorted(tags)}))
        else:
            path.unlink(missing_ok=True)
    return tags
