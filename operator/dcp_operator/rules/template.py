"""Rules on the pod templates: their shape, what the operator owns in them, and what the engine needs of the pod."""

import math
import posixpath
from collections.abc import Iterator

from dcp_connector.config import SECRET_FILE_ENV
from dcp_operator.api.findings import show
from dcp_operator.api.quantities import QuantityError, parse_count, parse_quantity
from dcp_operator.api.spec import CPU
from dcp_operator.connectors import Profile, lease_of
from dcp_operator.names import (
    CONTAINER_CONNECTOR,
    CONTAINER_MAIN,
    LABEL_NAME,
    PATH_CONNECTOR,
    PATH_KEY,
    PATH_MODELS,
    VOLUME_CONNECTOR,
    VOLUME_KEY,
    VOLUME_MODEL,
    labels,
)
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.pod_template import Container, PodTemplate, as_list, as_map
from dcp_operator.settings import Role

#: Resources that stand for accelerators, by the part of the name behind the vendor.
_ACCELERATORS = frozenset(
    {"nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi", "google.com/tpu"}
)
_OWNED_VOLUMES = (VOLUME_CONNECTOR, VOLUME_KEY, VOLUME_MODEL)
_OWNED_MOUNTS = (PATH_CONNECTOR, PATH_KEY, PATH_MODELS)
_GROUP_PREFIX = LABEL_NAME.split("/", maxsplit=1)[0] + "/"
#: Labels of other groups that the operator gives all pods.
_OWNED_LABELS = frozenset(labels("", Role.PREFILL))


def template_shape(context: Context) -> Iterator[Problem]:
    """A pod template has the shape of a PodTemplateSpec.

    The operator merges its own parts into the template by the names of containers, volumes and variables; what has
    another shape can't be merged, and the API server would refuse the pods. A field that is not known here is a
    warning, because a newer cluster may know it.

    Correct the part that the message names; `kubectl explain pod.spec` lists the fields.
    """
    for template in (context.prefill.template, context.decode.template, context.router_template):
        for problem in template.problems:
            yield Problem(problem.path, problem.message, problem.severity)


def template_owned(context: Context) -> Iterator[Problem]:
    """A pod template leaves to the operator what the typed fields say and what both roles rely on.

    The image and the arguments of main, the labels by which pods are found, the variables and mounts of the connector
    and of the model, and the router's ServiceAccount belong to the operator, which would overwrite what the template
    says. A command may be replaced.

    Move an image to spec.image and arguments to extraArgs; give labels, volumes and variables other names.
    """
    for role in context.roles:
        yield from _owned_metadata(role.template)
        yield from _owned_main(context, role)
        yield from _owned_volumes(role.template)
        yield from _owned_pod(role.template, "engine", (CONTAINER_CONNECTOR,))
    yield from _owned_router(context.router_template)


def _owned_router(template: PodTemplate) -> Iterator[Problem]:
    yield from _owned_metadata(template)
    yield from _owned_pod(template, "router")
    # Without its own ServiceAccount the router may not see the engines' pods.
    for path, content, fields in (
        (template.main.path, template.main.content, ("image", "args")),
        (f"{template.path}.spec", template.spec, ("serviceAccountName", "serviceAccount")),
    ):
        for field in fields:
            if content.get(field) is not None:
                yield _removable(f"{path}.{field}", "is set by the operator for the router; remove it")
    if template.spec.get("automountServiceAccountToken") is False:
        yield _removable(
            f"{template.path}.spec.automountServiceAccountToken",
            "false would keep the router from seeing the engines' pods; remove it",
        )


def _owned_metadata(template: PodTemplate) -> Iterator[Problem]:
    for section in ("labels", "annotations"):
        for key in as_map(template.metadata.get(section)):
            path = f"{template.path}.metadata.{section}[{key}]"
            if key.startswith(_GROUP_PREFIX):
                yield _removable(path, f"belongs to the operator, as everything under {_GROUP_PREFIX}; remove it")
            elif section == "labels" and key in _OWNED_LABELS:
                yield _removable(path, "is set by the operator; remove it, or choose another label")


def _owned_main(context: Context, role: RoleContext) -> Iterator[Problem]:
    main = role.template.main
    image, field = main.content.get("image"), f"{role.path}.image" if role.stated.image else "spec.image"
    if image is not None and image != (role.stated.image or context.spec.image):
        stated = role.stated.image or context.spec.image
        yield _removable(
            f"{main.path}.image",
            f"{show(image)} differs from {field} {show(stated)}, which the operator sets; remove it and set {field}",
        )
    if main.content.get("args") is not None:
        yield _removable(f"{main.path}.args", f"replaces the engine's arguments; add yours to {role.path}.extraArgs")
    for index, variable in enumerate(as_list(main.content.get("env"))):
        name = as_map(variable).get("name")
        if name in _owned_env(context.profile):
            yield _removable(f"{main.path}.env[{index}]", f"{name} belongs to the operator; remove it")
        is_injected = context.profile.bundled and context.spec.kv_connector.delivery == "Inject"
        is_extended = name == "PYTHONPATH" and is_injected
        if is_extended and not isinstance(as_map(variable).get("value"), str):
            yield Problem(
                f"{main.path}.env[{index}]",
                "PYTHONPATH needs a plain value, because the connector's folder is put in front of it",
            )
    for index, mount in enumerate(as_list(main.content.get("volumeMounts"))):
        path = as_map(mount).get("mountPath")
        owned = _owned_mount(path) if isinstance(path, str) else None
        if owned is not None:
            yield _removable(f"{main.path}.volumeMounts[{index}]", f"{owned} belongs to the operator; mount elsewhere")


def _removable(path: str, message: str) -> Problem:
    """Return a problem that is gone when the field is."""
    return Problem(path, message, fixes=(Fix(path, REMOVED),))


def _owned_env(profile: Profile) -> tuple[str, ...]:
    """Return the variables by which an engine finds its address, its port for transfers and the channel's key."""
    names = ("VLLM_HOST_IP", SECRET_FILE_ENV, profile.port_env, profile.host_env)
    return tuple(name for name in names if name is not None)


def _owned_mount(path: str) -> str | None:
    """Return the path of the operator that a mount is at or below, None if it is elsewhere."""
    # Two slashes at the beginning have a meaning of their own in POSIX, and would be kept.
    place = posixpath.normpath("/" + path.lstrip("/"))
    return next((owned for owned in _OWNED_MOUNTS if place == owned or place.startswith(f"{owned}/")), None)


def _owned_volumes(template: PodTemplate) -> Iterator[Problem]:
    for index, volume in enumerate(as_list(template.spec.get("volumes"))):
        name = as_map(volume).get("name")
        if name in _OWNED_VOLUMES:
            yield Problem(
                f"{template.path}.spec.volumes[{index}]", f"{name} is the operator's own volume; choose another name"
            )


def _owned_pod(template: PodTemplate, what: str, containers: tuple[str, ...] = ()) -> Iterator[Problem]:
    for container in (*template.containers, *template.init_containers):
        is_init = container in template.init_containers
        if container.name in containers or (is_init and container.name == CONTAINER_MAIN):
            yield Problem(
                f"{container.path}.name", f"{container.name} is the operator's own container; choose another name"
            )
    restart = template.spec.get("restartPolicy")
    if restart not in (None, "Always"):
        yield _removable(f"{template.path}.spec.restartPolicy", f"{show(restart)} ends the {what} for good; remove it")


def gpu_count(context: Context) -> Iterator[Problem]:
    """A stated accelerator request equals what the parallel sizes need.

    Every rank runs on one accelerator, so a pod needs tensor x prefillContext x pipeline x dataLocal of the resource
    spec.accelerator.resourceName, shared by the pods of multinode; decodeContext reuses the tensor ranks. Only the
    container main may hold accelerators.

    Leave the request out, and the operator fills it in.
    """
    resource = context.spec.accelerator.resource_name
    for role in context.roles:
        needed = role.settings.accelerators_per_pod
        for section in ("limits", "requests"):
            for name, amount in role.template.main.resources(section).items():
                path = f"{role.template.main.path}.resources.{section}[{name}]"
                if name == resource and resource != CPU:
                    yield from _count_problem(role, path, amount, needed)
                elif name in _ACCELERATORS:
                    yield _removable(
                        path, f"{show(amount)} is requested, but spec.accelerator.resourceName is {resource}; keep one"
                    )
        for sidecar in role.template.sidecars:
            yield from _sidecar_accelerators(sidecar, resource)


def _count_problem(role: RoleContext, path: str, amount: object, needed: int) -> Iterator[Problem]:
    sizes = role.settings
    named = {
        "tensor": sizes.tensor,
        "prefillContext": sizes.prefill_context,
        "pipeline": sizes.pipeline,
        "dataLocal": sizes.data_local,
    }
    factors = [f"{role.path}.parallelism.{name} {size}" for name, size in named.items() if size > 1 or name == "tensor"]
    shared = f" / {role.path}.multinode.nodeCount {sizes.nodes}" if sizes.nodes > 1 else ""
    try:
        stated: int | None = parse_count(amount)
    except QuantityError:
        stated = None
    if stated != needed:
        yield _removable(
            path,
            f"{show(amount)} differs from the {needed} that {' x '.join(factors)}{shared} needs; nearest that "
            f"works: {needed}, or leave it out",
        )


def _sidecar_accelerators(sidecar: Container, resource: str) -> Iterator[Problem]:
    for section in ("limits", "requests"):
        for name, amount in sidecar.resources(section).items():
            if name in _ACCELERATORS or (name == resource and resource != CPU):
                yield _removable(
                    f"{sidecar.path}.resources.{section}[{name}]",
                    f"{show(amount)} is requested by {sidecar.name or 'a container without a name'}, "
                    f"but the engine runs in the container {CONTAINER_MAIN}; rename it, or remove the request",
                )


def requests_within_limits(context: Context) -> Iterator[Problem]:
    """No container requests more of a resource than its limit.

    The API server refuses such a pod, and none would ever start.

    Raise the limit or lower the request.
    """
    for template in (context.prefill.template, context.decode.template, context.router_template):
        for container in (*template.containers, *template.init_containers):
            limits = container.resources("limits")
            for name, amount in container.resources("requests").items():
                try:
                    exceeds = name in limits and parse_quantity(amount) > parse_quantity(limits[name])
                except QuantityError:
                    continue
                if exceeds:
                    yield _removable(
                        f"{container.path}.resources.requests[{name}]",
                        f"{show(amount)} is above the limit {show(limits[name])}; nearest that works: "
                        f"{show(limits[name])}",
                    )


def grace_covers_drain(context: Context) -> Iterator[Problem]:
    """A stated terminationGracePeriodSeconds covers draining and the transfer lease.

    An engine that is asked to stop first ends its running requests, then keeps the KV cache that decode engines have
    yet to fetch until its lease ends. A shorter grace period kills it in between, and those requests are computed
    again.

    Leave the field out, and the operator reckons it, or raise it.
    """
    lease_s = lease_of(context.profile, context.spec.kv_connector.extra_config)
    if lease_s is None:
        return
    # Infinity is a number to YAML and to the connector, but not one that a pod could wait for.
    drain_s = context.spec.drain_timeout_seconds
    needed = drain_s + math.ceil(min(lease_s, 1e9))
    for role in context.roles:
        stated = role.template.spec.get("terminationGracePeriodSeconds")
        if isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated < needed:
            yield _removable(
                f"{role.template.path}.spec.terminationGracePeriodSeconds",
                f"{stated} is below the {needed} that draining ({drain_s}) and the transfer lease "
                f"({needed - drain_s}) take together; nearest that works: {needed}, or leave it out",
            )


RULES = (
    Rule("template-shape", template_shape),
    Rule("template-owned", template_owned),
    Rule("gpu-count", gpu_count),
    Rule("requests-within-limits", requests_within_limits),
    Rule("grace-covers-drain", grace_covers_drain, sources=("dynamo #7319", "dynamo #9344", "vllm PR #32420")),
)
