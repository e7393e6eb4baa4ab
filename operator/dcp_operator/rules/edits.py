"""Changes of an object: one field set or left out, on the typed spec and on the document that a user wrote.

Paths are those of findings: `spec.decode.parallelism.tensor`, `spec.decode.extraArgs[2]`, and
`...resources.limits[nvidia.com/gpu]` for keys that hold dots.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, cast

from pydantic import BaseModel

from dcp_operator.api.spec import Spec

_STEP: Final = re.compile(r"([^.\[\]]+)|\[([^\]]+)\]")
_WORD: Final = re.compile(r"(?<!^)(?=[A-Z])")


class Absent(Enum):
    """The value of a field that is left out."""

    REMOVED = auto()


REMOVED: Final = Absent.REMOVED


@dataclass(frozen=True, slots=True)
class Fix:
    """One change that would satisfy a rule: a field's new value, or `REMOVED`. A list of strings is a tuple here."""

    path: str
    value: int | str | bool | tuple[str, ...] | Absent


def steps(path: str) -> list[str | int]:
    """Return the steps of a path: names of fields, keys of maps, positions in lists."""
    return [
        int(key) if key and key.isdigit() else (name or key)
        for name, key in (match.groups() for match in _STEP.finditer(path))
    ]


def is_typed(path: str) -> bool:
    """Whether a path names a typed field of the spec: no list, and nothing inside a free-form map."""
    return path.startswith("spec.") and "[" not in path and ".template." not in path and ".extraConfig." not in path


def value_at(spec: Spec, path: str) -> object:
    """Return a typed field's value; None where it is not stated."""
    current: object = spec
    for step in steps(path)[1:]:
        if not isinstance(current, BaseModel):
            return None
        current = getattr(current, _attribute(str(step)))
    return current


def changed_spec(spec: Spec, fix: Fix) -> Spec:
    """Return the spec with a typed field changed. The value is not checked against the field's bounds."""
    value = None if isinstance(fix.value, Absent) else fix.value
    return cast("Spec", _with(spec, [_attribute(str(step)) for step in steps(fix.path)[1:]], value))


def changed_body(body: Mapping[str, Any], fix: Fix) -> dict[str, Any]:
    """Return a copy of the document with the change. Maps on the way are made where they are absent.

    Raises LookupError or TypeError for a path that the document has no place for.
    """
    result = copy.deepcopy(dict(body))
    *way, last = steps(fix.path)
    holder: Any = result
    for step in way:
        if isinstance(holder, dict):
            fields = cast("dict[str | int, Any]", holder)
            if fields.get(step) is None:
                fields[step] = {}
            holder = fields[step]
        else:
            holder = holder[step]
    if isinstance(fix.value, Absent):
        if isinstance(holder, dict):
            cast("dict[str | int, Any]", holder).pop(last, None)
        else:
            del holder[last]
    else:
        holder[last] = list(fix.value) if isinstance(fix.value, tuple) else fix.value
    return result


def _with(model: BaseModel, way: list[str], value: object) -> BaseModel:
    name, *rest = way
    inner = getattr(model, name)
    new = _with(inner, rest, value) if rest and isinstance(inner, BaseModel) else value
    return model.model_copy(update={name: new})


def _attribute(field: str) -> str:
    return _WORD.sub("_", field).lower()
