"""A configuration that was checked: which classes will be called with what, and nothing else."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.experiment.code_files import imported_files
from paceline.experiment.recovery import Kept
from paceline.experiment.signatures import path_of
from paceline.experiment.values import plain


@dataclass(frozen=True)
class Build:
    """A call to come. Arguments are values, builds, and containers of both."""

    target: type
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    path: str = ""
    """In the configuration: "models.dnn.block"."""
    late: tuple[str, ...] = ()
    """Arguments that are given when it is built: the parameters of an optimizer."""


@dataclass(frozen=True)
class Plan:
    """An experiment to come: its sections by role."""

    experiment: type
    sections: Mapping[str, Build]

    def resolved(self) -> dict[str, Any]:
        """All of it in plain values, defaults among them, by the role of the section."""
        return {role: resolved(build) for role, build in self.sections.items()}

    def as_document(self) -> dict[str, Any]:
        """The same under the names that sections have in a file."""
        return {path_of(build.target): resolved(build) for build in self.sections.values()}

    @property
    def config_hash(self) -> str:
        """Of the full configuration: the same for the same values, wherever they were written."""
        return hash_of(self.resolved())

    @property
    def code_hash(self) -> str:
        """Of the files that the experiment and the classes of the configuration come from, and of those that they
        import, but for installed packages: with the same of both, a run has nothing new to tell."""
        classes = {self.experiment, *(cls for build in self.sections.values() for cls in targets(build))}
        own = _source_file(self.experiment)
        named = {path for path in map(_source_file, classes) if path is not None}
        root = None if own is None else own.parents[self.experiment.__module__.count(".")]
        content = hashlib.blake2b(digest_size=5)
        for path in sorted(named if root is None else imported_files(named, root)):
            content.update(path.name.encode() + path.read_bytes())
        return content.hexdigest()


def targets(value: Any) -> Iterator[type]:
    """Every class that a build will call."""
    if isinstance(value, Build):
        yield value.target
        value = [*value.args, *value.kwargs.values()]
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from targets(item)


def _source_file(cls: type) -> Path | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    path = None if file is None else Path(file)
    return path.resolve() if path is not None and path.is_file() and "site-packages" not in path.parts else None


def resolved(value: Any) -> Any:
    if isinstance(value, Build):
        args = {"_args_": [resolved(one) for one in value.args]} if value.args else {}
        late = dict.fromkeys(value.late, "???")
        given = {name: resolved(one) for name, one in value.kwargs.items() if not isinstance(one, Kept)}
        return {"_target_": path_of(value.target), **args, **late, **given}
    if isinstance(value, list | tuple):
        return [resolved(item) for item in value]
    if isinstance(value, dict):
        return {key: resolved(item) for key, item in value.items()}
    return plain(value)


def hash_of(config: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits. The order of keys does not count, nor whether a number is 1 or 1.0."""
    text = json.dumps(_even(config), sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()


def _even(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _even(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_even(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
