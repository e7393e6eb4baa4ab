"""Pod template of an engine.

Three layers: defaults, the user's template over them, and what the operator owns over both. The operator owns what the
typed fields say and what the two roles and the router rely on; everything else is the user's.
"""

from typing import Any

from dcp_connector.config import SECRET_FILE_ENV, ConnectorConfig
from dcp_operator import names
from dcp_operator.api.spec import CPU
from dcp_operator.build.engine_args import connector_config, engine_args, termination_grace_s
from dcp_operator.build.merge import Manifest, TemplateError, merge, named_list, part, readable
from dcp_operator.build.model_source import ModelSource, model_source
from dcp_operator.build.objects import Context
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
    config = connector_config(context.spec)
    source = model_source(context.spec.model)
    merged = merge(_defaults(context, config, source), user, path)
    result = merge(merged, _owned(context, role, config, source, _user_pythonpath(user, path)), path)
    # Variables can refer to earlier ones only: the operator's come first, so that the user's can use them.
    main = result["spec"]["containers"][0]
    ours = {element["name"] for element in _owned_env(context, config, source, None)}
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


def _defaults(context: Context, config: ConnectorConfig, source: ModelSource) -> Manifest:
    """Return what the user's template may change."""
    security = restricted()
    if context.spec.kv_connector.protocol == "rdma":
        # Registering memory for RDMA pins it, which the default limit on locked memory forbids.
        security["capabilities"]["add"] = ["IPC_LOCK"]
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "command": list(_COMMAND),
        "imagePullPolicy": "IfNotPresent",
        "env": list(source.default_env),
        "securityContext": security,
        "startupProbe": _probe(
            "/readyz",
            names.PORT_NAME_BOOTSTRAP,
            periodSeconds=_STARTUP_PERIOD_S,
            failureThreshold=_STARTUP_FAILURES,
            timeoutSeconds=3,
        ),
        "readinessProbe": _probe(
            "/readyz", names.PORT_NAME_BOOTSTRAP, periodSeconds=5, failureThreshold=2, timeoutSeconds=3
        ),
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
            "terminationGracePeriodSeconds": termination_grace_s(config),
            "containers": [main],
            # The ranks of an engine exchange tensors through shared memory; the runtime's 64 MiB are too little.
            "volumes": [{"name": names.VOLUME_SHM, "emptyDir": {"medium": "Memory"}}],
        },
    }


def _owned(
    context: Context, role: Role, config: ConnectorConfig, source: ModelSource, user_pythonpath: str | None
) -> Manifest:
    """Return what wins over the user's template."""
    spec = context.spec
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "image": spec.image,
        "args": engine_args(context.name, spec, role),
        "ports": [
            {"name": names.PORT_NAME_HTTP, "containerPort": config.api_port, "protocol": "TCP"},
            {"name": names.PORT_NAME_BOOTSTRAP, "containerPort": config.bootstrap_port, "protocol": "TCP"},
        ],
        "env": _owned_env(context, config, source, user_pythonpath),
        "volumeMounts": [{"name": names.VOLUME_KEY, "mountPath": names.PATH_KEY, "readOnly": True}],
    }
    volumes: list[Manifest] = [
        {
            "name": names.VOLUME_KEY,
            "secret": {
                "secretName": names.key_secret(context.name),
                "items": [{"key": names.SECRET_KEY, "path": names.SECRET_KEY}],
                "defaultMode": 0o444,
            },
        }
    ]
    pod: Manifest = {"containers": [main], "volumes": volumes}
    accelerators = resolve_role(spec, role).accelerators_per_pod
    if spec.accelerator.resource_name != CPU:
        count = str(accelerators)
        resource = spec.accelerator.resource_name
        main["resources"] = {"limits": {resource: count}, "requests": {resource: count}}
    if source.volume is not None:
        volumes.append(source.volume)
        main["volumeMounts"].append({"name": names.VOLUME_MODEL, "mountPath": names.PATH_MODELS, "readOnly": True})
    if spec.kv_connector.delivery == "Inject":
        pod["initContainers"] = [_connector_container(context)]
        volumes.append({"name": names.VOLUME_CONNECTOR, "emptyDir": {}})
        main["volumeMounts"].append(
            {"name": names.VOLUME_CONNECTOR, "mountPath": names.PATH_CONNECTOR, "readOnly": True}
        )
    return {"metadata": _pod_metadata(context, role), "spec": pod}


def _pod_metadata(context: Context, role: Role) -> Manifest:
    result: Manifest = {"labels": names.labels(context.name, role)}
    if context.kv_key is not None:
        result["annotations"] = {names.ANNOTATION_KEY: names.key_fingerprint(context.kv_key)}
    return result


def _owned_env(
    context: Context, config: ConnectorConfig, source: ModelSource, user_pythonpath: str | None
) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        {"name": SECRET_FILE_ENV, "value": f"{names.PATH_KEY}/{names.SECRET_KEY}"},
        {"name": "VLLM_MOONCAKE_BOOTSTRAP_PORT", "value": str(config.bootstrap_port)},
        *source.env,
    ]
    if context.spec.kv_connector.delivery == "Inject":
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
