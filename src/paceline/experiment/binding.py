"""conf.yaml from code: written anew, or brought up to date with the user's edits and comments kept."""

from __future__ import annotations

import difflib
import io
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.experiment.config import TrainConfig
from paceline.experiment.document import parse, refusal
from paceline.experiment.schema import MISSING, Node, Schema, as_plain

if TYPE_CHECKING:
    from ruamel.yaml import YAML

_NOT_TEXT_ELSEWHERE = re.compile(r"(?i:y|n|yes|no|on|off)|[-+]?\d[\d_]*:[\d:.]+|\d{4}-\d\d?-\d\d?.*|=|<<")
"""Text that other readers of YAML, Hydra's among them, take for something else."""


@dataclass(frozen=True)
class Bound:
    """A file brought up to date."""

    text: str
    added: tuple[str, ...] = ()
    """Paths that the file did not have."""
    removed: tuple[str, ...] = ()
    """Paths that the code no longer has, with the values that they had: "models.dnn.depth: 3"."""
    edited: tuple[str, ...] = ()
    """Paths whose values are the user's: "optimizers.adam.lr: 0.01 (code: 0.001)"."""
    unknown: tuple[str, ...] = ()
    """Paths of arguments that could not be recovered from the code."""
    renamed: str | None = None
    """What runs are called from now on, if the name that they had is lost."""

    @property
    def is_current(self) -> bool:
        return not self.added and not self.removed


def fresh(schema: Schema) -> str:
    """The configuration as the code has it."""
    return dump({section.key: as_plain(section.node) for section in schema.sections})


def reset(schema: Schema, text: str | None, project_name: str | None = None) -> Bound:
    """As `bind` without an old text, but runs keep the name that the file gives them: else later ones would be among
    those of another experiment. Of a file that cannot be read nobody knows it, nor of one whose section is that of
    another class: then it is the project's, as `train new` has it, unless the code itself has one; `renamed` tells."""
    bound = bind(schema)
    key = next((section.key for section in schema.sections if section.role == "cfg"), None)
    document = _yaml().load(bound.text)
    if "name" not in (document.get(key) or {}):
        return bound
    name = of_code = document[key]["name"]
    renamed = None
    try:
        known = parse(text or "").bare()
    except ConfigError:
        known = None
    if known is None or (known and key not in known):
        name = renamed = project_name if project_name and of_code == TrainConfig.name else of_code
    elif isinstance(cfg := known.get(key), dict) and isinstance(cfg.get("name"), str):
        name = cfg["name"]
    document[key]["name"] = name
    return replace(bound, text=_dumped(_yaml(), document), renamed=renamed)


def bind(schema: Schema, text: str | None = None) -> Bound:
    """The file to write. Of an old text, values and comments stay; what the code has besides is added, what it no
    longer has is taken away and named. ConfigError if the old text cannot be read."""
    unknown = tuple(schema.unknown())
    if text is None or not text.strip():
        added = tuple(section.role for section in schema.sections)
        return Bound(fresh(schema), added=added, unknown=unknown)
    parse(text)  # with its own words for what is wrong, before anything is merged
    yaml = _yaml()
    try:
        document = yaml.load(text)
    except Exception as error:
        raise refusal("conf.yaml", [f"it cannot be read ({type(error).__name__}: {error})"]) from None
    if not document:  # remarks alone, `null` or {}: there is nothing to merge into, and remarks hang on nothing
        remarks = "".join(f"{line}\n" for line in text.splitlines() if line.lstrip().startswith("#"))
        return replace(bind(schema), text=remarks + fresh(schema))
    merge = _Merge()
    merge.document(document, schema)
    changed = bool(merge.added or merge.removed)
    return Bound(
        _dumped(yaml, document) if changed else text,
        tuple(merge.added),
        tuple(merge.removed),
        tuple(merge.edited),
        unknown,
    )


def check(schema: Schema, text: str | None) -> list[str]:
    """What is not up to date, a line each; for CI."""
    if text is None:
        return ["there is no conf.yaml: run `paceline train bind`"]
    bound = bind(schema, text)
    return [*(f"missing: {path}" for path in bound.added), *(f"not in the code: {path}" for path in bound.removed)]


def diff(schema: Schema, text: str | None, name: str = "conf.yaml") -> str:
    """What `bind` would change, as a unified diff; empty if nothing."""
    before, after = (text or "").splitlines(keepends=True), bind(schema, text).text.splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, name, f"{name} (bound)"))


def dump(document: dict[str, Any]) -> str:
    """Plain values as YAML, in the form of conf.yaml."""
    return _dumped(_yaml(), document)


class _Merge:
    def __init__(self) -> None:
        self.added: list[str] = []
        self.removed: list[str] = []
        self.edited: list[str] = []

    def document(self, document: Any, schema: Schema) -> None:
        wanted = {section.key: section for section in schema.sections}
        for key in [key for key in document if key not in wanted]:
            self.removed.append(_told(key, document.pop(key)))
        for place, section in enumerate(schema.sections):
            if section.key not in document:
                _insert(document, place, section.key, as_plain(section.node))
                self.added.append(section.role)
            else:
                document[section.key] = self._value(document[section.key], section.node, section.role)

    def _value(self, old: Any, value: Any, path: str) -> Any:
        """What the file has there now: the same object where it stays, with all comments that hang on it."""
        new = as_plain(value)
        if old == MISSING and new != MISSING:
            self.added.append(path)
            return new
        if isinstance(value, Node) and isinstance(old, dict) and old.get("_target_") == new["_target_"]:
            self._node(old, value, path)
        elif old != new or isinstance(old, bool) != isinstance(new, bool):  # true is 1 to Python
            self.edited.append(f"{_told(path, old)} (code: {_short(new)})")
        return old

    def _node(self, old: Any, node: Node, path: str) -> None:
        wanted = as_plain(node)
        gone = [key for key in old if key not in wanted and not (node.takes_kwargs and node.field(key) is None)]
        for key in gone:
            self.removed.append(_told(f"{path}.{key}", old.pop(key)))
        for place, key in enumerate(wanted):
            field = node.field(key)
            if key not in old:
                _insert(old, min(place, len(old)), key, wanted[key])
                self.added.append(f"{path}.{key}")
            elif field is not None:
                old[key] = self._value(old[key], field.value, f"{path}.{key}")


def _insert(mapping: Any, place: int, key: str, value: Any) -> None:
    mapping.insert(place, key, value)


def _told(path: str, value: Any) -> str:
    return f"{path}: {_short(value)}"


def _short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _yaml() -> YAML:
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import RoundTripRepresenter
    from ruamel.yaml.scalarstring import SingleQuotedScalarString

    class Representer(RoundTripRepresenter):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def number(representer: Any, value: float) -> Any:
        text = repr(value)
        if "e" in text and "." not in text:  # without the point, YAML 1.1 takes it for text
            text = text.replace("e", ".0e")
        special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
        return representer.represent_scalar("tag:yaml.org,2002:float", special.get(text, text))

    def text(representer: Any, value: str) -> Any:
        if _NOT_TEXT_ELSEWHERE.fullmatch(value):
            return representer.represent_single_quoted_scalarstring(SingleQuotedScalarString(value))
        return representer.represent_scalar("tag:yaml.org,2002:str", value)

    def nothing(representer: Any, value: None) -> Any:
        return representer.represent_scalar("tag:yaml.org,2002:null", "null")

    Representer.add_representer(float, number)
    Representer.add_representer(str, text)
    Representer.add_representer(type(None), nothing)
    yaml = YAML(typ="rt")
    yaml.Representer = Representer
    yaml.preserve_quotes = True
    yaml.width = 4096
    return yaml


def _dumped(yaml: YAML, document: Any) -> str:
    stream = io.StringIO()
    try:
        yaml.dump(document, stream)
    except Exception as error:
        raise ConfigError(f"conf.yaml cannot be written ({type(error).__name__}: {error}).") from error
    return stream.getvalue()
