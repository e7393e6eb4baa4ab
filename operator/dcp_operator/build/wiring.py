"""What the chosen connector needs of an engine: its part of the command line, its port, its environment.

Read off the table of connectors (`dcp_operator.connectors`), so that a pod is built without asking which one it is.
"""

from dataclasses import dataclass
from typing import Any, Final

from dcp_connector.config import SECRET_FILE_ENV, ConnectorConfig, kv_transfer_config
from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.connectors import PROFILES, Profile
from dcp_operator.ports import EnginePorts, side_count
from dcp_operator.settings import Role

_KV_ROLE: Final[dict[Role, Any]] = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


@dataclass(frozen=True, slots=True)
class Probe:
    """Where an engine says that it is ready, its connector included."""

    path: str
    port_name: str


def profile_of(spec: Spec) -> Profile:
    """Return the connector that a spec names."""
    return PROFILES[spec.kv_connector.type]


def is_injected(spec: Spec) -> bool:
    """Whether an init container brings the connector into the engine's image."""
    return profile_of(spec).bundled and spec.kv_connector.delivery == "Inject"


def transfer_config(spec: Spec, role: Role, ports: EnginePorts) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config` of one role, whose engines have these ports, JSON-ready.

    Keys are those of vLLM's KVTransferConfig (`vllm/config/kv_transfer.py`, 0.32 and 0.33). Raises
    pydantic.ValidationError for an option of the bundled connector that it doesn't take.
    """
    profile, stated = profile_of(spec), spec.kv_connector
    extra = dict(stated.extra_config)
    if profile.protocol_option is not None:
        extra[profile.protocol_option] = stated.protocol
    if profile.bundled:
        # Values equal to the connector's defaults are left out of what is rendered.
        extra |= {"bootstrap_port": ports.side, "api_port": ports.api}
        config = ConnectorConfig.model_validate(extra)
        return kv_transfer_config(_KV_ROLE[role], config, load_failure_policy=stated.load_failure_policy)
    return {
        "kv_connector": profile.vllm_class,
        "kv_role": _KV_ROLE[role],
        "kv_load_failure_policy": stated.load_failure_policy,
        "kv_connector_extra_config": extra,
    }


def listens(spec: Spec, role: Role) -> bool:
    """Whether a role's pods listen on the connector's port."""
    return side_count(spec, role) > 0


def side_ports(spec: Spec, role: Role, ports: EnginePorts) -> list[tuple[str, int]]:
    """Return the ports on which a role's pods take what concerns transfers: name and number."""
    return [
        (names.PORT_NAME_BOOTSTRAP if rank == 0 else f"kv-{rank}", ports.side + rank)
        for rank in range(side_count(spec, role))
    ]


def ready_probe(spec: Spec, role: Role) -> Probe:
    """Return where a role's pods are asked whether they are ready."""
    profile = profile_of(spec)
    if profile.ready_path is not None and listens(spec, role):
        return Probe(profile.ready_path, names.PORT_NAME_BOOTSTRAP)
    return Probe("/health", names.PORT_NAME_HTTP)


def owned_env(spec: Spec, ports: EnginePorts) -> list[dict[str, Any]]:
    """Return the variables that an engine and its connector must find, in the order of the pod."""
    profile = profile_of(spec)
    result = [_pod_ip("VLLM_HOST_IP")]
    if profile.bundled:
        result.append({"name": SECRET_FILE_ENV, "value": f"{names.PATH_KEY}/{names.SECRET_KEY}"})
    result.append({"name": profile.port_env, "value": str(ports.side)})
    if profile.host_env is not None:
        result.append(_pod_ip(profile.host_env))
    return result


def default_env(spec: Spec) -> list[dict[str, Any]]:
    """Return the variables that choose the transport, which a template may override."""
    if spec.kv_connector.protocol != "tcp":
        return []
    return [{"name": name, "value": value} for name, value in profile_of(spec).tcp_env.items()]


def _pod_ip(name: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
