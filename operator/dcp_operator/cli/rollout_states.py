"""The states of an object's history, as `dcpctl rollout` shows them and goes back to them: pure."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from pydantic import ValidationError

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.build.history import OUTSIDE, OUTSIDE_OF, template_state
from dcp_operator.observed import Body, Child, entries, section

#: Longest value that is shown beside its field, as JSON.
_SHOWN: Final = 40
_ROLES: Final = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class State:
    """One state: its number, the pair revision of its pods, when the number was given, and the stored spec."""

    name: str
    number: int
    revision: str
    when: str
    spec: Mapping[str, Any] = field(repr=False)


def read_states(listed: Iterable[Body], uid: str) -> list[State]:
    """Return the states among ControllerRevisions that belong to the object with this uid, the newest last."""
    found = [
        State(
            body["metadata"]["name"],
            body["revision"],
            Child(body).labels.get(names.LABEL_REVISION, ""),
            _when_numbered(body),
            section(body, "data", "spec"),
        )
        for body in listed
        if Child(body).belongs_to(uid)
    ]
    return sorted(found, key=lambda state: state.number)


def present_state(name: str, stored_spec: Body) -> str | None:
    """Return the name of the state that a spec asks for, None for a spec that can't be read."""
    try:
        return names.history(name, template_state(Spec.model_validate(stored_spec)))
    except ValidationError:
        return None


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return in one line what another state changes: fields by role, with their values where these are short."""
    old, new = _flat(_complete(before)), _flat(_complete(after))
    parts: dict[str, list[str]] = {}
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            part, _, rest = path.partition(".")
            known = part in (*_ROLES, "router")
            parts.setdefault(part if known else "both", []).append(
                _change(rest if known and rest else path, old.get(path), new.get(path))
            )
    alike = [said for said in parts.get("prefill", []) if said in parts.get("decode", [])]
    if alike:
        parts.setdefault("both", []).extend(alike)
        for role in _ROLES:
            parts[role] = [said for said in parts[role] if said not in alike]
    order = ("both", *_ROLES, "router")
    return "; ".join(f"{part}: {', '.join(parts[part])}" for part in order if parts.get(part))


def restored(live_spec: Mapping[str, Any], state: Mapping[str, Any]) -> Body:
    """Return a spec that makes a state's pods and keeps what is no part of a state: numbers, scaling, strategy, pause.

    Raises pydantic.ValidationError for a state that this version's API doesn't take.
    """
    spec: Body = {key: value for key, value in live_spec.items() if key in OUTSIDE}
    spec |= {key: value for key, value in state.items() if key not in OUTSIDE}
    for part, outside in OUTSIDE_OF.items():
        kept = {key: value for key, value in section(cast("Body", live_spec), part).items() if key in outside}
        if kept or part in spec:
            spec[part] = {**spec.get(part, {}), **kept}
    return _dump(Spec.model_validate(spec))


def merge_patch(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> Body:
    """Return the JSON merge patch (RFC 7386) that makes `live` what `wanted` is."""
    patch: Body = {}
    for key in (*live, *(key for key in wanted if key not in live)):
        if key not in wanted:
            patch[key] = None
        elif key not in live:
            patch[key] = wanted[key]
        elif isinstance(live[key], dict) and isinstance(wanted[key], dict):
            inner = merge_patch(live[key], wanted[key])
            if inner:
                patch[key] = inner
        elif live[key] != wanted[key]:
            patch[key] = wanted[key]
    return patch


def table(states: Sequence[State], present: str | None) -> str:
    """Return the history as a table, the newest state last; the one that the spec asks for is marked."""
    rows = [("NUMBER", "REVISION", "SINCE", "CHANGED")]
    for index, state in enumerate(states):
        said = changes(states[index - 1].spec, state.spec) if index else "the first that is kept"
        mark = " (now)" if state.name == present else ""
        rows.append((f"{state.number}{mark}", state.revision, state.when, said))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip() + "\n"
        for row in rows
    )


def _when_numbered(body: Body) -> str:
    """Return when the number was given: by whoever of the object's writers owns it, else when the object was made."""
    times = [
        str(entry.get("time", ""))
        for entry in entries(body, "metadata", "managedFields")
        if "f:revision" in section(entry, "fieldsV1")
    ]
    return max(times, default="") or str(body["metadata"].get("creationTimestamp", ""))


def _complete(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state with its defaults, so that a change from one shows what it was."""
    try:
        return _dump(Spec.model_validate(dict(state)))
    except ValidationError:
        return state


def _dump(spec: Spec) -> Body:
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def _flat(value: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    return dict(_leaves(value, path))


def _leaves(value: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        here = f"{path}.{key}" if path else key
        if isinstance(inner, dict) and inner and not here.endswith(".template"):
            yield from _leaves(cast("Mapping[str, Any]", inner), here)
        elif inner not in ({}, []):
            yield here, inner


def _change(path: str, before: Any, after: Any) -> str:
    shown = [_value(value) for value in (before, after)]
    return f"{path} {shown[0]} -> {shown[1]}" if None not in shown else path


def _value(value: Any) -> str | None:
    """Return a value as it is shown, None for one that would hide the rest of the line."""
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else None
