"""Pod template of an engine.

Three layers: defaults, the user's template over them, and what the operator owns over both. The operator owns what the
typed fields say and what the two roles and the router rely on; everything else is the user's.
"""

from typing import Any

from dcp_operator import names
from dcp_operator.api.quantities import parse_quantity
from dcp_operator.api.spec import CPU, RoleSpec
from dcp_operator.build.engine_args import engine_args
from dcp_operator.build.merge import Manifest, TemplateError, merge, named_list, part, readable
from dcp_operator.build.model_source import ModelSource, model_source
from dcp_operator.build.objects import Context
from dcp_operator.build.placement import with_topology
from dcp_operator.build.stopping import engine_pre_stop, termination_grace_s, with_pre_stop
from dcp_operator.build.wiring import (
    default_env,
    is_injected,
    owned_env,
    profile_of,
    ready_probe,
    side_ports,
)
from dcp_operator.ports import engine_ports
from dcp_operator.settings import Role, resolve_role, role_spec

_COMMAND = ("python3", "-m", "vllm.entrypoints.openai.api_server")
_PYTHONPATH = "PYTHONPATH"
#: An hour for the largest models: a pod that is slow to load must not be restarted for it.
_STARTUP_PERIOD_S = 3
_STARTUP_FAILURES = 1200


def engine_pod_template(context: Context, role: Role, revision: str = "") -> Manifest:
    """Return the pod template of one role, without the revision's label.

    A topology constraint holds among the engines of `revision`, or of all revisions without one.

    Raises TemplateError for a user template that can't be merged.
    """
    user = role_spec(context.spec, role).template
    path = f"spec.{role}.template"
    source = model_source(context.spec.model)
    merged = merge(_defaults(context, role, source), user, path)
    result = merge(merged, _owned(context, role, source, _user_pythonpath(user, path)), path)
    # Variables can refer to earlier ones only: the operator's come first, so that the user's can use them.
    main = result["spec"]["containers"][0]
    ours = {element["name"] for element in _owned_env(context, role, source, None)}
    main["env"] = sorted(main["env"], key=lambda element: element["name"] not in ours)
    result["spec"]["containers"][0] = readable(_drained(context, main, result["spec"], path))
    constraint = context.spec.topology_constraint
    result["spec"] = with_topology(result["spec"], constraint, context.name, revision, f"{path}.spec")
    return result


def _drained(context: Context, main: Manifest, pod: Manifest, path: str) -> Manifest:
    """Return the engine's container with its preStop handler, which depends on what the template made of the rest."""
    port = next(each["containerPort"] for each in main["ports"] if each.get("name") == names.PORT_NAME_HTTP)
    grace_s = pod["terminationGracePeriodSeconds"]
    return with_pre_stop(main, engine_pre_stop(context.spec, main["command"], port, grace_s=grace_s), path)


def restricted(*, uid: int | None = None) -> Manifest:
    """Return a container's security context without privileges; with `uid` also without root and read-only."""
    result: Manifest = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if uid is not None:
        result |= {"runAsNonRoot": True, "runAsUser": uid, "runAsGroup": uid, "readOnlyRootFilesystem": True}
    return result


#: The user that the operator image runs as.
OPERATOR_UID = 65532


def _defaults(context: Context, role: Role, source: ModelSource) -> Manifest:
    """Return what the user's template may change."""
    security = restricted()
    ready = ready_probe(context.spec, role)
    volumes, mounts = _shared_memory(role_spec(context.spec, role))
    if context.spec.kv_connector.protocol == "rdma":
        # Registering memory for RDMA pins it, which the default limit on locked memory forbids.
        security["capabilities"]["add"] = ["IPC_LOCK"]
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "command": list(_COMMAND),
        "imagePullPolicy": "IfNotPresent",
        "env": [*source.default_env, *default_env(context.spec)],
        "securityContext": security,
        "startupProbe": _probe(
            ready.path,
            ready.port_name,
            periodSeconds=_STARTUP_PERIOD_S,
            failureThreshold=_STARTUP_FAILURES,
            timeoutSeconds=3,
        ),
        "readinessProbe": _probe(ready.path, ready.port_name, periodSeconds=5, failureThreshold=2, timeoutSeconds=3),
        "livenessProbe": _probe(
            "/health", names.PORT_NAME_HTTP, periodSeconds=10, failureThreshold=6, timeoutSeconds=10
        ),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": termination_grace_s(context.spec),
        "containers": [main],
        "volumes": volumes,
    }
    if role_spec(context.spec, role).host_network:
        # With the default policy a pod on the host's network asks the node's resolver, which knows no Services.
        pod["dnsPolicy"] = "ClusterFirstWithHostNet"
    return {"metadata": {}, "spec": pod}


def _shared_memory(stated: RoleSpec) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volume for /dev/shm and its mount; none of them where the size is 0.

    The ranks of an engine exchange tensors through it, and the container runtime's 64 MiB are too little for them.
    """
    source: Manifest = {"medium": "Memory"}
    if stated.shared_memory_size is not None:
        if parse_quantity(stated.shared_memory_size) == 0:
            return [], []
        source["sizeLimit"] = stated.shared_memory_size
    volume = {"name": names.VOLUME_SHM, "emptyDir": source}
    return [volume], [{"name": names.VOLUME_SHM, "mountPath": names.PATH_SHM}]


def _owned(context: Context, role: Role, source: ModelSource, user_pythonpath: str | None) -> Manifest:
    """Return what wins over the user's template."""
    spec, profile = context.spec, profile_of(context.spec)
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "image": role_spec(spec, role).image or spec.image,
        "args": engine_args(context.name, spec, role, context.host_ports),
        "ports": _ports(context, role),
        "env": _owned_env(context, role, source, user_pythonpath),
        "volumeMounts": [],
    }
    volumes: list[Manifest] = []
    if profile.bundled:
        main["volumeMounts"].append({"name": names.VOLUME_KEY, "mountPath": names.PATH_KEY, "readOnly": True})
        volumes.append(_key_volume(context))
    pod: Manifest = {"containers": [main], "volumes": volumes}
    if role_spec(spec, role).host_network:
        pod["hostNetwork"] = True
    devices = _devices(context, role)
    if devices:
        main["resources"] = {"limits": devices, "requests": dict(devices)}
    if source.volume is not None:
        volumes.append(source.volume)
        main["volumeMounts"].append({"name": names.VOLUME_MODEL, "mountPath": names.PATH_MODELS, "readOnly": True})
    if is_injected(spec):
        pod["initContainers"] = [_connector_container(context)]
        volumes.append({"name": names.VOLUME_CONNECTOR, "emptyDir": {}})
        main["volumeMounts"].append(
            {"name": names.VOLUME_CONNECTOR, "mountPath": names.PATH_CONNECTOR, "readOnly": True}
        )
    return {"metadata": {"labels": names.labels(context.name, role)}, "spec": pod}


def _ports(context: Context, role: Role) -> list[Manifest]:
    """Return the ports of the main container. On the host's network the scheduler keeps pods apart by them."""
    spec = context.spec
    ports, stated = engine_ports(spec, role, context.host_ports), role_spec(spec, role)
    named = [(names.PORT_NAME_HTTP, ports.api), *side_ports(spec, role, ports)]
    if stated.host_network and stated.multinode is not None:
        named.append((names.PORT_NAME_GROUP, ports.group))
    on_node = {"hostPort"} if stated.host_network else set[str]()
    return [
        {"name": name, "containerPort": port, **dict.fromkeys(on_node, port), "protocol": "TCP"} for name, port in named
    ]


def _devices(context: Context, role: Role) -> dict[str, str]:
    """Return the devices of one engine pod: extended resource -> how many, as a quantity."""
    spec = context.spec
    result: dict[str, str] = {}
    if spec.accelerator.resource_name != CPU:
        result[spec.accelerator.resource_name] = str(resolve_role(spec, role).accelerators_per_pod)
    rdma = spec.kv_connector.rdma
    if rdma is not None and spec.kv_connector.protocol == "rdma":
        result[rdma.resource_name] = str(rdma.count)
    return result


def _key_volume(context: Context) -> Manifest:
    return {
        "name": names.VOLUME_KEY,
        "secret": {
            "secretName": names.key_secret(context.name),
            "items": [{"key": names.SECRET_KEY, "path": names.SECRET_KEY}],
            "defaultMode": 0o444,
        },
    }


def _owned_env(context: Context, role: Role, source: ModelSource, user_pythonpath: str | None) -> list[dict[str, Any]]:
    ports = engine_ports(context.spec, role, context.host_ports)
    env: list[dict[str, Any]] = [*owned_env(context.spec, ports), *source.env]
    if is_injected(context.spec):
        folders = [names.PATH_CONNECTOR, *([user_pythonpath] if user_pythonpath else [])]
        env.append({"name": _PYTHONPATH, "value": ":".join(folders)})
    return env


def _user_pythonpath(user: Manifest, path: str) -> str | None:
    """Return the user's PYTHONPATH of the main container: it is kept, after the connector's folder."""
    spec = part(user, "spec", path)
    for container in named_list(spec, "containers", f"{path}.spec"):
        if container["name"] != names.CONTAINER_MAIN:
            continue
        where = f"{path}.spec.containers[{names.CONTAINER_MAIN}]"
        for variable in named_list(container, "env", where):
            if variable["name"] == _PYTHONPATH:
                value = variable.get("value")
                if not isinstance(value, str):
                    raise TemplateError(
                        f"{where}.env[{_PYTHONPATH}]: expected a plain value, because the connector's folder is put "
                        "in front of it; give value instead of valueFrom"
                    )
                return value
    return None


def _connector_container(context: Context) -> Manifest:
    """Return the init container that copies the connector out of the operator image into a folder of the pod."""
    return {
        "name": names.CONTAINER_CONNECTOR,
        "image": context.operator_image,
        "imagePullPolicy": context.pull_policy,
        "command": ["cp", "-r", f"{names.PATH_CONNECTOR_SOURCE}/.", f"{names.PATH_CONNECTOR}/"],
        "securityContext": restricted(uid=OPERATOR_UID),
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": names.VOLUME_CONNECTOR, "mountPath": names.PATH_CONNECTOR}],
    }


def _probe(path: str, port: str, **timing: int) -> Manifest:
    return {"httpGet": {"path": path, "port": port, "scheme": "HTTP"}, "successThreshold": 1, **timing}
