"""One checkpoint out of the files and the metadata of many ranks: who gives which file, and what cannot be. Pure."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from paceline.errors import CheckpointError
from paceline.workers.stacks import rank_names

Listing = Mapping[str, str]
"""The files of a rank, by their names with "/" between folders, each with a digest of its content."""


def owners_of(listings: Sequence[Listing]) -> dict[str, int]:
    """The rank that gives each file: the lowest of those that have it. CheckpointError if they have it with different
    content, or if it is a folder on another rank."""
    owners: dict[str, int] = {}
    for rank, listing in enumerate(listings):
        for name, digest in listing.items():
            owner = owners.setdefault(name, rank)
            if listings[owner][name] != digest:
                differing = [other for other, files in enumerate(listings) if name in files]
                raise CheckpointError(
                    f"The file {name!r} of {rank_names(differing)} differs from one to another, and a checkpoint has "
                    "it once. Put the rank into its name, or give it on one rank alone."
                )
    for name, rank in owners.items():
        for folder in map(str, PurePosixPath(name).parents):
            if folder in owners:
                raise CheckpointError(
                    f"{folder!r} is a file on rank {owners[folder]} and a folder on rank {rank}, which has {name!r}: "
                    "give one of them another name."
                )
    return owners


def merge_metadata(given: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """What all ranks say, put together level by level. CheckpointError where two say different things."""
    merged: dict[str, Any] = {}
    for rank, metadata in enumerate(given):
        _merge_into(merged, metadata or {}, rank, ())
    return merged


def _merge_into(merged: dict[str, Any], metadata: Mapping[str, Any], rank: int, above: tuple[str, ...]) -> None:
    for key, value in metadata.items():
        if key not in merged:
            merged[key] = _copied(value)
        elif isinstance(merged[key], dict) and isinstance(value, Mapping):
            _merge_into(merged[key], value, rank, (*above, str(key)))
        elif not _is_same(merged[key], value):
            name = ".".join((*above, str(key)))
            raise CheckpointError(
                f"metadata {name!r} is {value!r} on rank {rank} and {merged[key]!r} on a rank before it: give the same "
                "value on all ranks, or different keys."
            )


def _is_same(one: Any, other: Any) -> bool:
    """NaN is no other value than NaN here; and arrays do not say whether they are equal, but for each element."""
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other) or pickle.dumps(one) == pickle.dumps(other)
    except (TypeError, ValueError, RuntimeError):
        return pickle.dumps(one) == pickle.dumps(other)


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
