"""A user's pod template, read defensively: the CRD lets any JSON through, and rules must never stumble over it.

`read_template` checks the shape of everything that the operator merges or reads, and hands out what rules need: the
pod's spec and its containers, always as maps and lists. What has the wrong shape is reported and left out.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

from dcp_operator.api.findings import Severity, kind_of, show
from dcp_operator.api.quantities import QuantityError, parse_quantity
from dcp_operator.names import CONTAINER_MAIN
from dcp_operator.rules import pod_fields

#: A template of garbage would otherwise give a list that nobody reads, and take its time.
_MOST_PROBLEMS = 100
#: Comparing texts takes time with the product of their lengths; nothing longer resembles a field.
_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class ShapeProblem:
    """A part of a template that is not what Kubernetes expects there."""

    path: str
    message: str
    severity: Severity = Severity.ERROR


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a template, with the path under which the user wrote it."""

    path: str
    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The container's name; empty where there is none."""
        name = self.content.get("name")
        return name if isinstance(name, str) else ""

    def resources(self, section: str) -> Mapping[str, Any]:
        """Return `limits` or `requests`; empty where they are absent or malformed."""
        return as_map(as_map(self.content.get("resources")).get(section))


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A template whose parts are safe to read."""

    path: str
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    problems: tuple[ShapeProblem, ...] = ()

    @property
    def main(self) -> Container:
        """The engine's container; an empty one where the template has none."""
        default = Container(f"{self.path}.spec.containers[{CONTAINER_MAIN}]", {})
        return next((each for each in self.containers if each.name == CONTAINER_MAIN), default)

    @property
    def sidecars(self) -> tuple[Container, ...]:
        """All other containers, init containers included."""
        return tuple(each for each in (*self.containers, *self.init_containers) if each.name != CONTAINER_MAIN)


def as_map(value: object) -> Mapping[str, Any]:
    """Return a map as it is and anything else as an empty one."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return a list as it is and anything else as an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def read_template(template: Mapping[str, Any], path: str) -> PodTemplate:
    """Read a template found at `path`. Never fails; `problems` lists what is malformed, in the order of the fields."""
    shape = PodTemplate(
        path=path,
        metadata=as_map(template.get("metadata")),
        spec=(spec := as_map(template.get("spec"))),
        containers=tuple(_containers(spec, "containers", path)),
        init_containers=tuple(_containers(spec, "initContainers", path)),
    )
    return replace(shape, problems=tuple(islice(_problems(template, shape), _MOST_PROBLEMS)))


def _problems(template: Mapping[str, Any], shape: PodTemplate) -> Iterator[ShapeProblem]:
    yield from _fields(template, shape.path, pod_fields.TEMPLATE)
    yield from _fields(shape.metadata, f"{shape.path}.metadata", pod_fields.METADATA)
    yield from _fields(shape.spec, f"{shape.path}.spec", pod_fields.POD)
    seen: set[str] = set()
    for container in (*shape.containers, *shape.init_containers):
        yield from _container_problems(container)
        if container.name in seen and container.name:
            yield ShapeProblem(container.path, f"has the name {container.name}, which another one has too")
        seen.add(container.name)


def _containers(spec: Mapping[str, Any], key: str, path: str) -> Iterator[Container]:
    for index, item in enumerate(as_list(spec.get(key))):
        if isinstance(item, dict):
            yield Container(f"{path}.spec.{key}[{index}]", cast("Mapping[str, Any]", item))


def _container_problems(container: Container) -> Iterator[ShapeProblem]:
    yield from _fields(container.content, container.path, pod_fields.CONTAINER)
    for name, known in pod_fields.MERGED_MAPS.items():
        outer = as_map(container.content.get(name))
        yield from _fields(outer, f"{container.path}.{name}", known, closed=name == "resources")
        for inner in known:
            yield from _fields(as_map(outer.get(inner)), f"{container.path}.{name}.{inner}", {}, closed=False)
    for section in ("limits", "requests"):
        for name, amount in container.resources(section).items():
            yield from _quantity(amount, f"{container.path}.resources.{section}[{name}]")


def _quantity(amount: object, path: str) -> Iterator[ShapeProblem]:
    try:
        value = parse_quantity(amount)
    except QuantityError as error:
        yield ShapeProblem(path, f"found {show(amount)}, which {error}")
    else:
        if value < 0:
            yield ShapeProblem(path, f"found {show(amount)}, must not be negative")


def _fields(
    content: Mapping[str, Any], path: str, known: Mapping[str, pod_fields.Kind], *, closed: bool = True
) -> Iterator[ShapeProblem]:
    """Check the fields of one map against what is known of them; `closed`: an unknown field is worth a warning.

    A list of containers, volumes and the like in the wrong place is an error: it would be merged as one.
    """
    for name, value in content.items():
        if name in known:
            yield from _field(value, f"{path}.{name}", known[name])
        elif name in pod_fields.KEYED_LISTS:
            yield ShapeProblem(f"{path}.{name}", "is no field that Kubernetes has here; check the indentation")
        elif closed:
            near = difflib.get_close_matches(name[:_LONGEST_NAME], known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield ShapeProblem(f"{path}.{name}", f"is no field that Kubernetes has here{hint}", Severity.WARNING)


def _field(value: object, path: str, kind: pod_fields.Kind) -> Iterator[ShapeProblem]:
    if value is None:
        return
    if not kind.accepts(value):
        yield ShapeProblem(path, f"found {kind_of(value)} ({show(value)}), must be {kind.words}")
    elif kind.element_key is not None:
        for index, item in enumerate(as_list(value)):
            yield from _element(item, f"{path}[{index}]", kind.element_key)


def _element(item: object, path: str, key: str) -> Iterator[ShapeProblem]:
    """Check an element of a list that is merged by a key."""
    if not isinstance(item, dict):
        yield ShapeProblem(path, f"found {kind_of(item)} ({show(item)}), must be a map")
        return
    content = as_map(cast("object", item))
    if key != "name":
        yield from _fields(content, path, {}, closed=False)
    value = content.get(key)
    wanted = int if key == "containerPort" else str
    if value is None:
        yield ShapeProblem(path, f"has no {key}, by which it is told apart from the others")
    elif not isinstance(value, wanted) or isinstance(value, bool) or value == "":
        yield ShapeProblem(
            f"{path}.{key}", f"found {show(value)}, must be {'a whole number' if wanted is int else 'a string'}"
        )
