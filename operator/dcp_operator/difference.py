"""Whether a live object says what a manifest asks for, given what an API server adds, drops and rewrites.

The live object may say more: defaults, other owners' fields, elements of lists that are told apart by a key; but not in
a selector, which is one value. Quantities are compared by value, and a field that is empty in the manifest may be
absent, as the API server stores neither.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from dcp_operator.api.quantities import QuantityError, parse_quantity
from dcp_operator.build.merge import LIST_KEYS

#: Fields whose values are quantities, or maps of them.
_QUANTITIES: Final = frozenset({"limits", "requests", "sizeLimit", "capacity"})
#: Booleans that the API server doesn't store when they are false.
_FALSE_IS_ABSENT: Final = frozenset({"hostIPC", "hostNetwork", "hostPID", "readOnly", "stdin", "stdinOnce", "tty"})
#: Maps that the API server takes as one value: a key that another writer added changes what the whole map means.
_ATOMIC_MAPS: Final = frozenset({"matchLabels", "nodeSelector", "selector"})
#: Lists of more than one kind of object, by the keys that tell elements apart; the first that is present counts.
_PORT_KEYS: Final = ("containerPort", "port")


def first_difference(desired: Any, live: Any, path: str = "") -> str | None:
    """Return the path of the first thing in `desired` that `live` does not say, or None if it says everything."""
    if _is_empty(desired) and live is None:
        return None
    if isinstance(desired, dict) and isinstance(live, dict):
        return _in_mapping(cast("Mapping[str, Any]", desired), cast("Mapping[str, Any]", live), path)
    if isinstance(desired, list) and isinstance(live, list):
        return _in_list(cast("Sequence[Any]", desired), cast("Sequence[Any]", live), path)
    return None if _is_same_value(cast("object", desired), cast("object", live), path) else path


def _in_mapping(desired: Mapping[str, Any], live: Mapping[str, Any], path: str) -> str | None:
    if path.rpartition(".")[2] in _ATOMIC_MAPS and not live.keys() <= desired.keys():
        return path
    for key, value in desired.items():
        here = f"{path}.{key}" if path else key
        if value is False and key in _FALSE_IS_ABSENT and key not in live:
            continue
        found = first_difference(value, live.get(key), here)
        if found is not None:
            return found
    return None


def _in_list(desired: Sequence[Any], live: Sequence[Any], path: str) -> str | None:
    key = _list_key(path, desired)
    if key is None:
        if len(desired) != len(live):
            return path
        pairs = zip(desired, live, strict=True)
        return _first(first_difference(a, b, f"{path}[{index}]") for index, (a, b) in enumerate(pairs))
    by_key = {element.get(key): element for element in _mappings(live)}
    return _first(first_difference(a, by_key.get(a[key]), f"{path}[{a[key]}]") for a in desired)


def _list_key(path: str, desired: Sequence[Any]) -> str | None:
    """Return the key that tells the elements of a list apart, None for a list that is one value."""
    name = path.rpartition(".")[2]
    candidates = _PORT_KEYS if name == "ports" else (LIST_KEYS.get(name),)
    for key in candidates:
        if key is not None and desired and all(isinstance(element, dict) and key in element for element in desired):
            return key
    return None


def _mappings(values: Iterable[Any]) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, dict)]


def _first(paths: Iterable[str | None]) -> str | None:
    return next((path for path in paths if path is not None), None)


def _is_quantity(path: str) -> bool:
    parts = path.split(".")
    return parts[-1] in _QUANTITIES or any(part in _QUANTITIES for part in parts[:-1])


def _is_same_value(desired: object, live: object, path: str) -> bool:
    if desired == live:
        return isinstance(desired, bool) == isinstance(live, bool)
    return _is_quantity(path) and _same_quantity(desired, live)


def _same_quantity(one: object, other: object) -> bool:
    try:
        return parse_quantity(one) == parse_quantity(other)
    except QuantityError:
        return False


def _is_empty(value: object) -> bool:
    return value is None or value == "" or value == [] or value == {}
