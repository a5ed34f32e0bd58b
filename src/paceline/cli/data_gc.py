"""`paceline data gc`: what goes from the cache of prepared batches."""

import re
import time
from typing import Annotated, Any

import typer

from paceline.cli.asking import Json, Root, Yes, confirm, give, give_json, say

HELP = """Clean the cache of batches that `train run --prepare-batches` has prepared.

\b
  paceline data gc --dry-run                    what would go
  paceline data gc --older-than 7d --max-size 10G
  paceline data gc --max-size 0 --yes           all that nobody uses

First goes what was not used for so long, then what was used least recently, until the rest is small enough. What a
live run uses stays. The cache is .prepared in --root or PACELINE_STORAGE, else ~/.cache/paceline/prepared. With the
values that are the defaults here it is also cleaned whenever something was prepared.
"""


def gc(
    older_than: Annotated[str, typer.Option(metavar="30d", help="Not used for so long.")] = "30d",
    max_size: Annotated[str, typer.Option(metavar="10G", help="How much may stay: 500M, 10G, 1T.")] = "50G",
    root: Root = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would go.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    from paceline.cli.drawing import size_of
    from paceline.data.prepared_cache import prepared_dir
    from paceline.data.prepared_cleaning import Policy, clean, entries, to_remove
    from paceline.runs.conditions import seconds

    policy, place, now = Policy(seconds(older_than), num_bytes(max_size)), prepared_dir(root), time.time()
    found = entries(place)
    chosen = to_remove(found, policy, now)
    total = size_of(sum(one.num_bytes for one, _ in chosen))
    if not dry_run and chosen and not confirm(f"Remove {len(chosen)} of {len(found)} datasets ({total})?", yes):
        raise typer.Exit(2)
    gone = chosen if dry_run else clean(place, policy, now)
    if json:
        kept = [one for one in found if one.key not in {other.key for other, _ in gone}]
        told = {"folder": str(place), "is_dry_run": dry_run, "removed": [_told(*one) for one in gone]}
        give_json({**told, "kept": [_told(one, "in use" if one.is_in_use else None) for one in kept]})
        return
    give([_line(one, why, now) for one, why in gone])
    total = size_of(sum(one.num_bytes for one, _ in gone))
    say(f"{len(gone)} of {len(found)} datasets ({total}) {'would go' if dry_run else 'are removed'} from {place}.")


def num_bytes(text: str) -> float:
    """`0`, `500M`, `10G`, `1.5TB`. ArgumentError for anything else."""
    from paceline.errors import ArgumentError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(B?)", text.strip().upper())
    if match is None or (float(match[1]) and not match[2] + match[3]):  # nobody who writes 10 means 10 bytes
        raise ArgumentError(f"{text!r} is no size: expected a number and a unit, as in 500M, 10G or 1T.")
    return float(match[1]) * 1000.0 ** " KMGT".index(match[2] or " ")


def _told(one: Any, why: str | None) -> dict[str, Any]:
    return {
        "key": one.key,
        "source": one.source,
        "num_rows": one.num_rows,
        "num_bytes": one.num_bytes,
        "used": one.used,
        "why": why,
    }


def _line(one: Any, why: str, now: float) -> str:
    from paceline.cli.drawing import clean, size_of, span

    used = f"used {span(max(0.0, now - one.used))} ago"
    return f"{size_of(one.num_bytes):>8}  {one.key[:12]}  {used:<14}  {why:<7}  {clean(one.source)}"
