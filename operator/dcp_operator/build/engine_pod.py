"""Pod template of an engine.

Three layers: defaults, the user's template over them, and what the operator owns over both. The operator owns what the
typed fields say and what the two roles and the router rely on; everything else is the user's.
"""

from typing import Any

from dcp_operator import names
from dcp_operator.api.spec import CPU
from dcp_operator.build.engine_args import engine_args
from dcp_operator.build.merge import Manifest, TemplateError, merge, named_list, part, readable
from dcp_operator.build.model_source import ModelSource, model_source
from dcp_operator.build.objects import Context
from dcp_operator.build.wiring import (
    default_env,
    is_injected,
    owned_env,
    profile_of,
    ready_probe,
    side_ports,
    termination_grace_s,
)
from dcp_operator.connectors import API_PORT
from dcp_operator.settings import Role, resolve_role, role_spec

_COMMAND = ("python3", "-m", "vllm.entrypoints.openai.api_server")
_PYTHONPATH = "PYTHONPATH"
#: An hour for the largest models: a pod that is slow to load must not be restarted for it.
_STARTUP_PERIOD_S = 3
_STARTUP_FAILURES = 1200


def engine_pod_template(context: Context, role: Role) -> Manifest:
    """Return the pod template of one role, without the revision's label.

    Raises TemplateError for a user template that can't be merged.
    """
    user = role_spec(context.spec, role).template
    path = f"spec.{role}.template"
    source = model_source(context.spec.model)
    merged = merge(_defaults(context, role, source), user, path)
    result = merge(merged, _owned(context, role, source, _user_pythonpath(user, path)), path)
    # Variables can refer to earlier ones only: the operator's come first, so that the user's can use them.
    main = result["spec"]["containers"][0]
    ours = {element["name"] for element in _owned_env(context, source, None)}
    main["env"] = sorted(main["env"], key=lambda element: element["name"] not in ours)
    result["spec"]["containers"][0] = readable(main)
    return result


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
        "volumeMounts": [{"name": names.VOLUME_SHM, "mountPath": names.PATH_SHM}],
    }
    return {
        "metadata": {},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": termination_grace_s(context.spec),
            "containers": [main],
            # The ranks of an engine exchange tensors through shared memory; the runtime's 64 MiB are too little.
            "volumes": [{"name": names.VOLUME_SHM, "emptyDir": {"medium": "Memory"}}],
        },
    }


def _owned(context: Context, role: Role, source: ModelSource, user_pythonpath: str | None) -> Manifest:
    """Return what wins over the user's template."""
    spec, profile = context.spec, profile_of(context.spec)
    ports: list[Manifest] = [
        {"name": name, "containerPort": port, "protocol": "TCP"}
        for name, port in ((names.PORT_NAME_HTTP, API_PORT), *side_ports(spec, role))
    ]
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "image": role_spec(spec, role).image or spec.image,
        "args": engine_args(context.name, spec, role),
        "ports": ports,
        "env": _owned_env(context, source, user_pythonpath),
        "volumeMounts": [],
    }
    volumes: list[Manifest] = []
    if profile.bundled:
        main["volumeMounts"].append({"name": names.VOLUME_KEY, "mountPath": names.PATH_KEY, "readOnly": True})
        volumes.append(_key_volume(context))
    pod: Manifest = {"containers": [main], "volumes": volumes}
    accelerators = resolve_role(spec, role).accelerators_per_pod
    if spec.accelerator.resource_name != CPU:
        count = str(accelerators)
        resource = spec.accelerator.resource_name
        main["resources"] = {"limits": {resource: count}, "requests": {resource: count}}
    if source.volume is not None:
        volumes.append(source.volume)
        main["volumeMounts"].append({"name": names.VOLUME_MODEL, "mountPath": names.PATH_MODELS, "readOnly": True})
    if is_injected(spec):
        pod["initContainers"] = [_connector_container(context)]
        volumes.append({"name": names.VOLUME_CONNECTOR, "emptyDir": {}})
        main["volumeMounts"].append(
            {"name": names.VOLUME_CONNECTOR, "mountPath": names.PATH_CONNECTOR, "readOnly": True}
        )
    return {"metadata": _pod_metadata(context, role), "spec": pod}


def _key_volume(context: Context) -> Manifest:
    return {
        "name": names.VOLUME_KEY,
        "secret": {
            "secretName": names.key_secret(context.name),
            "items": [{"key": names.SECRET_KEY, "path": names.SECRET_KEY}],
            "defaultMode": 0o444,
        },
    }


def _pod_metadata(context: Context, role: Role) -> Manifest:
    result: Manifest = {"labels": names.labels(context.name, role)}
    if context.kv_key is not None and profile_of(context.spec).bundled:
        result["annotations"] = {names.ANNOTATION_KEY: names.key_fingerprint(context.kv_key)}
    return result


def _owned_env(context: Context, source: ModelSource, user_pythonpath: str | None) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [*owned_env(context.spec), *source.env]
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
