"""Whether a live object says what a manifest asks for, given what an API server adds, drops and rewrites.

The live object may say more: defaults, other owners' fields, elements of lists that are told apart by a key; but not in
a selector, which is one value. Quantities are compared by value, and a field that is empty in the manifest may be
absent, as the API server stores neither.
"""

from collections.abc import Iterable, Mapping
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
    parts = path.split(".")
    found = _difference(desired, live, parts[-1], is_quantity=not _QUANTITIES.isdisjoint(parts))
    return None if found is None else _below(path, found)


def _difference(desired: Any, live: Any, name: str, *, is_quantity: bool) -> str | None:
    """Return the same as a path from here ("" for here itself); `name` is the field that holds the two.

    Every look at an object compares all that was made for it, so this is asked a thousand times for each look, nearly
    always in vain: paths are put together on the way back from a difference.
    """
    if type(desired) is str:
        return None if desired == live or (not desired and live is None) or _is_same(desired, live, is_quantity) else ""
    if isinstance(desired, dict) and isinstance(live, dict):
        return _in_mapping(cast("dict[str, Any]", desired), cast("dict[str, Any]", live), name, is_quantity)
    if isinstance(desired, list) and isinstance(live, list):
        return _in_list(cast("list[Any]", desired), cast("list[Any]", live), name, is_quantity)
    if live is None and _is_empty(cast("object", desired)):
        return None
    return None if _is_same(cast("object", desired), cast("object", live), is_quantity) else ""


def _in_mapping(desired: dict[str, Any], live: dict[str, Any], name: str, is_quantity: bool) -> str | None:
    if name in _ATOMIC_MAPS and not live.keys() <= desired.keys():
        return ""
    for key, value in desired.items():
        if value is False and key in _FALSE_IS_ABSENT and key not in live:
            continue
        found = _difference(value, live.get(key), key, is_quantity=is_quantity or key in _QUANTITIES)
        if found is not None:
            return _below(key, found)
    return None


def _in_list(desired: list[Any], live: list[Any], name: str, is_quantity: bool) -> str | None:
    key = _list_key(name, desired)
    if key is None:
        if len(desired) != len(live):
            return ""
        pairs = enumerate(zip(desired, live, strict=True))
    else:
        by_key = {element.get(key): element for element in _mappings(live)}
        pairs = ((element[key], (element, by_key.get(element[key]))) for element in desired)
    for place, (element, other) in pairs:
        found = _difference(element, other, "", is_quantity=is_quantity)
        if found is not None:
            return _below(f"[{place}]", found)
    return None


def _below(path: str, found: str) -> str:
    """Return the path of something that was found below another path."""
    return f"{path}.{found}" if path and found and not found.startswith("[") else f"{path}{found}"


def _list_key(name: str, desired: list[Any]) -> str | None:
    """Return the key that tells the elements of a list apart, None for a list that is one value."""
    candidates = _PORT_KEYS if name == "ports" else (LIST_KEYS.get(name),)
    for key in candidates:
        if key is not None and desired and all(isinstance(element, dict) and key in element for element in desired):
            return key
    return None


def _mappings(values: Iterable[Any]) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, dict)]


def _is_same(desired: object, live: object, is_quantity: bool) -> bool:
    if desired == live:
        return isinstance(desired, bool) == isinstance(live, bool)
    return is_quantity and _same_quantity(desired, live)


def _same_quantity(one: object, other: object) -> bool:
    try:
        return parse_quantity(one) == parse_quantity(other)
    except QuantityError:
        return False


def _is_empty(value: object) -> bool:
    return value is None or value == "" or value == [] or value == {}
