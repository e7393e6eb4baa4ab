"""Merging of pod templates, in the manner of Kubernetes' strategic merge: lists of named things merge by name.

`merge(base, over)` returns a new value; where both say something `over` wins. Lists whose elements have a
key (containers by name, mounts by path, ...) merge element by element; every other list is replaced as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

Manifest = dict[str, Any]

#: Field name of a list -> the key that tells its elements apart.
LIST_KEYS: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "claims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "ownerReferences": "uid",
}

#: Elements that are unions: one source or handler each, so merging two of them field by field would give both.
_REPLACED_ELEMENTS = frozenset({"env", "volumes"})
_PROBE_HANDLERS = frozenset({"exec", "grpc", "httpGet", "tcpSocket"})


class TemplateError(ValueError):
    """A pod template that can't be merged; the message begins with the path of the field."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any], path: str = "template") -> Manifest:
    """Return `base` with `over` laid over it; neither is changed.

    Raises TemplateError where a list or mapping is needed and something else was given.
    """
    result: Manifest = dict(base)
    if _PROBE_HANDLERS & over.keys():
        result = {key: value for key, value in result.items() if key not in _PROBE_HANDLERS or key in over}
    for key, value in over.items():
        here = f"{path}.{key}"
        if key in LIST_KEYS:
            before = named_list(result, key, path)
            result[key] = _merge_lists(before, named_list(over, key, path), key, here)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merge(_mapping(result[key]), _mapping(cast("object", value)), here)
        elif isinstance(result.get(key), Mapping) and value is not None:
            raise TemplateError(f"{here}: expected a mapping, found {value!r}")
        elif value is not None:
            result[key] = value
    return result


def named_list(holder: Mapping[str, Any], key: str, path: str) -> list[Manifest]:
    """Return the list of mappings at `key`, empty where it is absent. Raises TemplateError for anything else."""
    value = holder.get(key)
    if value is None:
        return []
    here = f"{path}.{key}"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TemplateError(f"{here}: expected a list, found {value!r}")
    name = LIST_KEYS[key]
    elements = cast("Sequence[Any]", value)
    for index, element in enumerate(elements):
        # Asking for dict first is several times faster than asking the abstract class, and lists can be long.
        if not (type(element) is dict or isinstance(element, Mapping)) or name not in element:
            raise TemplateError(f"{here}[{index}]: expected a mapping with the key {name}, found {element!r}")
    return [dict(element) for element in cast("Sequence[Manifest]", elements)]


def part(holder: Mapping[str, Any], key: str, path: str) -> Manifest:
    """Return the mapping at `key`, empty where it is absent. Raises TemplateError for anything else."""
    value = holder.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TemplateError(f"{path}.{key}: expected a mapping, found {value!r}")
    return dict(_mapping(cast("object", value)))


#: The order in which people read a container; what is not named here follows as it comes.
_READING_ORDER: Final = ("name", "image", "imagePullPolicy", "command", "args", "env", "ports", "resources")


def readable(container: Manifest) -> Manifest:
    """Return a container with its fields in the order in which people read it."""
    first = {key: container[key] for key in _READING_ORDER if key in container}
    return {**first, **{key: value for key, value in container.items() if key not in first}}


def _merge_lists(base: list[Manifest], over: list[Manifest], key: str, path: str) -> list[Manifest]:
    name = LIST_KEYS[key]
    result = list(base)
    positions = {element[name]: index for index, element in enumerate(base)}
    for element in over:
        index = positions.get(element[name])
        if index is None:
            result.append(element)
        elif key in _REPLACED_ELEMENTS:
            result[index] = element
        else:
            result[index] = merge(result[index], element, f"{path}[{element[name]}]")
    return result


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value)
