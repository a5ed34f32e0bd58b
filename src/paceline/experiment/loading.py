"""From a configuration to a plan: all is checked, all that is wrong is told at once, nothing is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError
from paceline.experiment.allowed import Allowed, allowed_by
from paceline.experiment.coercion import Mismatch, coerce, implied
from paceline.experiment.document import Entry, entry_of, parse, refusal
from paceline.experiment.overrides import apply
from paceline.experiment.plan import Build, Plan
from paceline.experiment.recovery import Kept
from paceline.experiment.schema import MISSING, Field, Node, Schema, as_plain, node_of
from paceline.experiment.signatures import EMPTY
from paceline.experiment.suggestions import did_you_mean


def load(
    schema: Schema,
    text: str = "",
    overrides: Sequence[str] = (),
    allow: Sequence[str] = (),
    name: str = "conf.yaml",
) -> Plan:
    """Check a configuration against the experiment that it is of. What it leaves out is as in the code. ConfigError
    names every problem, with its line, or the override that it comes from."""
    return load_each(schema, text, [overrides], allow, name)[0]


def load_each(
    schema: Schema, text: str, combinations: Iterable[Sequence[str]], allow: Sequence[str] = (), name: str = "conf.yaml"
) -> list[Plan]:
    """The same with several sets of overrides, of which a sweep may have thousands."""
    document, allowed = completed(schema, parse(text, name)), allowed_by(schema, allow)
    return [_checked(schema, document, overrides, allowed, name) for overrides in combinations]


def _checked(schema: Schema, document: Entry, overrides: Sequence[str], allowed: Allowed, name: str) -> Plan:
    errors: list[ConfigError] = []
    reader = _Reader(allowed)
    sections = reader.sections(schema, apply(schema, document, overrides, errors))
    if len(errors) == 1 and not reader.problems:
        raise errors[0]
    problems = [*(f"override {error}" for error in errors), *reader.problems]
    if problems:
        raise refusal(name, problems)
    return Plan(schema.experiment, sections)


def completed(schema: Schema, document: Entry) -> Entry:
    """With what the code says about everything that the file does not."""
    given = dict(document.value)
    for section in schema.sections:
        given[section.key] = _completed(section.node, given.get(section.key))
    return Entry(given, document.where)


def _completed(node: Node, entry: Entry | None) -> Entry:
    if entry is None:
        return entry_of(as_plain(node))
    if not entry.is_map or entry.value.get("_target_", Entry(None)).value != as_plain(node)["_target_"]:
        return entry  # it is of another class, with arguments of its own
    given = dict(entry.value)
    for one in node.fields:
        if isinstance(one.value, Node) and one.name in given:
            given[one.name] = _completed(one.value, given[one.name])
        elif one.name not in given and not isinstance(one.value, Kept):
            given[one.name] = entry_of(as_plain(one.value))
    if node.args and "_args_" not in given:
        given["_args_"] = entry_of(as_plain(list(node.args)))
    return Entry(given, entry.where)


@dataclass
class _Reader:
    allowed: Allowed
    problems: list[str] = field(default_factory=list)

    def sections(self, schema: Schema, document: Entry) -> dict[str, Build]:
        known = {section.key: section for section in schema.sections}
        for key, entry in document.value.items():
            if key not in known:
                self._say(entry, f"there is no section {key!r}.{did_you_mean(key, known)}")
        built = {}
        for section in schema.sections:
            given = document.value.get(section.key) or entry_of(as_plain(section.node))
            made = self._build(section.node, given, section.node.target, section.role)
            if made is not None:
                built[section.role] = made
        return built

    def _say(self, entry: Entry, problem: str) -> None:
        self.problems.append(f"{entry.where or 'the code'}: {problem}")

    def _build(self, node: Node | None, entry: Entry, annotation: Any, path: str) -> Build | None:
        """A mapping with `_target_` as a call to come. `node` is what the code has in this place, if that is known."""
        if not entry.is_map:
            self._say(entry, f"{path} is {_shown(entry)}; expected a mapping with _target_")
            return None
        target = entry.value.get("_target_")
        if target is None or not isinstance(target.value, str):
            self._say(entry, f"{path} has no _target_ that names a class")
            return None
        found = self.allowed.find(target.value)
        if isinstance(found, str):
            self._say(target, f"{path}: {found}")
            return None
        if node is None or found is not node.target:
            try:
                node = node_of(found)
            except ConfigError as error:
                self._say(target, f"{path}: {error}")
                return None
            if not self._suits(Build(found), annotation, target, path):
                return None
        return self._call(node, entry, path)

    def _call(self, node: Node, entry: Entry, path: str) -> Build:
        refused = self._unknown_keys(node, entry, path)
        kwargs: dict[str, Any] = {}
        for one in node.fields:
            here = f"{path}.{one.name}"
            if one.is_late:
                continue
            if isinstance(one.value, Kept):
                kwargs[one.name] = one.value
                if one.name in entry.value:
                    self._say(entry.value[one.name], f"{here} stays in the code, since it is no plain value")
                continue
            given = entry.value.get(one.name, entry_of(as_plain(one.value)))
            kwargs[one.name] = self._value(one, given, here)
        for name, given in entry.value.items():  # of **kwargs
            if name not in ("_target_", "_args_", *refused) and node.field(name) is None:
                kwargs[name] = self._any(None, given, EMPTY, f"{path}.{name}")
        listed = Entry([]) if "_args_" in refused else entry.value.get("_args_", Entry([]))
        args = [self._any(None, one, EMPTY, f"{path}._args_.{number}") for number, one in enumerate(_items(listed))]
        late = tuple(one.name for one in node.fields if one.is_late)
        return Build(node.target, kwargs, tuple(args), path, late)

    def _unknown_keys(self, node: Node, entry: Entry, path: str) -> set[str]:
        """Those that the class does not take. A class with **kwargs takes others, but for what looks mistyped."""
        known, refused = [one.name for one in node.fields], set()
        for name, given in entry.value.items():
            if name == "_target_" or name in known or (name == "_args_" and node.takes_args):
                continue
            suggestion = did_you_mean(name, known)
            if not (node.takes_kwargs and not name.startswith("_") and "mean" not in suggestion):
                refused.add(name)
                if given.where is not None:  # else it is of the class that stood here before an override
                    self._say(given, f"{path} has no {name!r}.{suggestion}")
        return refused

    def _value(self, one: Field, entry: Entry, path: str) -> Any:
        if entry.value == MISSING:
            self._say(entry, f"{path} is ???: give it a value")
            return None
        annotation = implied(one.value) if one.annotation is EMPTY else one.annotation
        node = one.value if isinstance(one.value, Node) else None
        if node is not None and annotation is EMPTY:
            annotation = node.target | None
        return self._any(node if node is not None else one.value, entry, annotation, path)

    def _any(self, default: Any, entry: Entry, annotation: Any, path: str) -> Any:
        """`default` is what the code has here: a Node helps to read the entry, in a list those of its items."""
        if entry.is_map and "_target_" in entry.value:
            node = default if isinstance(default, Node) else None
            made = self._build(node, entry, annotation, path)
            is_own = made is not None and node is not None and made.target is node.target
            return made if is_own else self._suited(made, annotation, entry, path)
        return self._suited(self._plain(default, entry, path), annotation, entry, path)

    def _plain(self, default: Any, entry: Entry, path: str) -> Any:
        """Lists and mappings may have calls in them."""
        if isinstance(entry.value, list):
            defaults = default if isinstance(default, list | tuple) else ()
            return [
                self._any(defaults[number] if number < len(defaults) else None, one, EMPTY, f"{path}.{number}")
                for number, one in enumerate(entry.value)
            ]
        if isinstance(entry.value, dict):
            named = default if isinstance(default, dict) else {}
            return {key: self._any(named.get(key), one, EMPTY, f"{path}.{key}") for key, one in entry.value.items()}
        if entry.value == MISSING:
            self._say(entry, f"{path} is ???: give it a value")
            return None
        return entry.value

    def _suited(self, value: Any, annotation: Any, entry: Entry, path: str) -> Any:
        if value is None and entry.value is not None:
            return None  # told already
        try:
            return coerce(value, annotation)
        except Mismatch as expected:
            self._say(entry, f"{path} is {_shown(entry)}; expected {expected}")
            return None

    def _suits(self, made: Build, annotation: Any, entry: Entry, path: str) -> bool:
        before = len(self.problems)
        self._suited(made, annotation, entry, path)
        return len(self.problems) == before


def _items(entry: Entry) -> list[Entry]:
    return entry.value if isinstance(entry.value, list) else [entry]


def _shown(entry: Entry) -> str:
    text = repr(entry.bare())
    return "null" if entry.value is None else text if len(text) <= 60 else text[:57] + "..."
