"""Rules on what an engine's pod gets of its node: RDMA devices, shared memory, and no privileges."""

from collections.abc import Iterator
from typing import Final

from dcp_operator.api import sentences
from dcp_operator.api.findings import Severity, show
from dcp_operator.api.quantities import QuantityError, parse_count, parse_quantity
from dcp_operator.names import PATH_SHM, VOLUME_SHM
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.pod_template import Container, PodTemplate, as_list, as_map

#: Words in the names of resources that give a pod RDMA devices.
_RDMA_WORDS: Final = ("rdma", "hca", "roce", "infiniband", "efa", "ib")
#: Fields by which a pod shares something of its node, and what that is.
_SHARED: Final = {"hostPID": "processes", "hostIPC": "shared memory"}
#: The one capability that an engine may need: it pins memory for RDMA.
_KNOWN_CAPABILITIES: Final = frozenset({"IPC_LOCK"})


def rdma_resources(context: Context) -> Iterator[Problem]:
    """With protocol rdma the engines' containers ask for an RDMA device (a warning).

    A pod sees no RDMA device unless its container requests one from a device plugin or claims one; the transfer engine
    then ends at start-up. How the resource is called depends on the cluster.

    State it in spec.kvConnector.rdma, or set protocol tcp.
    """
    stated = context.spec.kv_connector
    if stated.protocol != "rdma" or stated.rdma is not None:
        return
    for role in context.roles:
        if not _has_rdma(role):
            yield Problem(
                f"{role.template.main.path}.resources.limits",
                "has no RDMA resource, and spec.kvConnector.protocol is rdma; state the cluster's RDMA device in "
                "spec.kvConnector.rdma, or set protocol tcp",
                Severity.WARNING,
            )


def _has_rdma(role: RoleContext) -> bool:
    main = role.template.main
    names = [*main.resources("limits"), *main.resources("requests")]
    words = [word for name in names for word in name.lower().replace("/", "_").replace("-", "_").split("_")]
    claims = as_list(as_map(main.content.get("resources")).get("claims"))
    return bool(claims) or any(word.startswith(_RDMA_WORDS) for word in words)


def rdma_devices(context: Context) -> Iterator[Problem]:
    """spec.kvConnector.rdma goes with protocol rdma, and no template asks for another number of the same devices.

    With protocol tcp the devices would be taken and never used. The operator requests them for the container main of
    both roles, so a template that states them too can only contradict.

    Set spec.kvConnector.protocol to rdma or leave the devices out, and state them in one place.
    """
    stated = context.spec.kv_connector
    if stated.rdma is None:
        return
    if stated.protocol != "rdma":
        yield Problem(
            "spec.kvConnector.rdma",
            sentences.RDMA_NEEDS_PROTOCOL.say(),
            fixes=(Fix("spec.kvConnector.protocol", "rdma"), Fix("spec.kvConnector.rdma", REMOVED)),
        )
        return
    for role in context.roles:
        for section in ("limits", "requests"):
            amount = role.template.main.resources(section).get(stated.rdma.resource_name)
            if amount is not None and not _is_count(amount, stated.rdma.count):
                path = f"{role.template.main.path}.resources.{section}[{stated.rdma.resource_name}]"
                yield Problem(
                    path,
                    f"{show(amount)} differs from spec.kvConnector.rdma.count {stated.rdma.count}, which the operator "
                    "requests; remove it",
                    fixes=(Fix(path, REMOVED),),
                )


def _is_count(amount: object, count: int) -> bool:
    try:
        return parse_count(amount) == count
    except QuantityError:
        return False


def shared_memory(context: Context) -> Iterator[Problem]:
    """sharedMemorySize is stated in one place, fits into the container's memory, and isn't 0 for several ranks.

    The ranks of an engine exchange tensors through /dev/shm. With 0 it is left to the container runtime, which gives
    64 MiB, too little for more than one rank (a warning). What is written there counts as memory of the container, so a
    size above its memory limit ends the container before it is reached (a warning). A volume or mount of the template
    in the same place contradicts the field.

    State sharedMemorySize, or leave it out for half of the node's memory.
    """
    for role in context.roles:
        stated = role.stated.shared_memory_size
        if stated is None:
            continue
        path, size = f"{role.path}.sharedMemorySize", parse_quantity(stated)
        yield from _stated_twice(role, stated)
        if size == 0 and role.settings.ranks_per_pod > 1:
            yield Problem(
                path,
                f"0 leaves /dev/shm to the container runtime, whose 64 MiB are too little for the "
                f"{role.settings.ranks_per_pod} ranks of a pod; leave the field out, or mount a volume at /dev/shm",
                Severity.WARNING,
            )
        limit = role.template.main.resources("limits").get("memory")
        try:
            exceeds = limit is not None and size > parse_quantity(limit)
        except QuantityError:
            continue
        if exceeds:
            yield Problem(
                path,
                f"{show(stated)} is above the memory limit {show(limit)} of {role.template.main.path}, and shared "
                "memory counts towards it; raise the limit or lower the size",
                Severity.WARNING,
            )


def _stated_twice(role: RoleContext, stated: str) -> Iterator[Problem]:
    if parse_quantity(stated) == 0:
        return
    template = role.template
    places = [
        *((f"{template.path}.spec.volumes[{index}]", as_map(each).get("name") == VOLUME_SHM)
          for index, each in enumerate(as_list(template.spec.get("volumes")))),
        *((f"{template.main.path}.volumeMounts[{index}]", as_map(each).get("mountPath") == PATH_SHM)
          for index, each in enumerate(as_list(template.main.content.get("volumeMounts")))),
    ]  # fmt: skip
    for path, is_ours in places:
        if is_ours:
            yield Problem(
                path,
                f"is /dev/shm, whose size {role.path}.sharedMemorySize {show(stated)} states already; remove one of "
                "the two",
                fixes=(Fix(f"{role.path}.sharedMemorySize", REMOVED),),
            )


def no_privileges(context: Context) -> Iterator[Problem]:
    """No container is privileged, and nothing of the node is shared (a warning) that engines don't need.

    A privileged container can do on its node what root can, to every other pod of it. Neither GPUs nor RDMA need that:
    device plugins and resource claims give a pod its devices, and IPC_LOCK, which the operator adds with protocol rdma,
    lets it pin memory. The node's processes, its files and further capabilities are warned of: namespaces under Pod
    Security Standards refuse such pods.

    Remove the field, and state devices as resources.
    """
    for template in (context.prefill.template, context.decode.template, context.router_template):
        for container in (*template.containers, *template.init_containers):
            yield from _container_privileges(container)
        yield from _shared_with_node(template)


def _container_privileges(container: Container) -> Iterator[Problem]:
    security = as_map(container.content.get("securityContext"))
    path = f"{container.path}.securityContext"
    if security.get("privileged") is True:
        yield Problem(
            f"{path}.privileged",
            "true gives the container the whole node; remove it, and state devices as resources "
            "(spec.accelerator, spec.kvConnector.rdma, resource claims)",
            fixes=(Fix(f"{path}.privileged", REMOVED),),
        )
    added = [each for each in as_list(as_map(security.get("capabilities")).get("add")) if isinstance(each, str)]
    further = [each for each in added if each.upper().removeprefix("CAP_") not in _KNOWN_CAPABILITIES]
    if further:
        yield Problem(
            f"{path}.capabilities.add",
            f"{show(further)} are capabilities that no engine needs; remove them unless your image does",
            Severity.WARNING,
        )


def _shared_with_node(template: PodTemplate) -> Iterator[Problem]:
    for field, what in _SHARED.items():
        if template.spec.get(field) is True:
            yield Problem(
                f"{template.path}.spec.{field}",
                f"true gives the pod the node's {what}, which nothing of the engine needs; remove it",
                Severity.WARNING,
            )
    for index, volume in enumerate(as_list(template.spec.get("volumes"))):
        source = as_map(as_map(volume).get("hostPath"))
        if source:
            yield Problem(
                f"{template.path}.spec.volumes[{index}].hostPath",
                f"{show(source.get('path'))} is a folder of the node, which differs from node to node and which Pod "
                "Security Standards refuse; a PersistentVolumeClaim or an image volume does without",
                Severity.WARNING,
            )


RULES = (
    Rule("rdma-resources", rdma_resources, sources=("dynamo #3724", "dynamo #5884")),
    Rule("rdma-devices", rdma_devices),
    Rule("shared-memory", shared_memory),
    Rule("no-privileges", no_privileges, sources=("llm-d #1075", "the pod templates of OME")),
)
