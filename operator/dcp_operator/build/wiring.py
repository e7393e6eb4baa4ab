"""What the chosen connector needs of an engine: its part of the command line, its port, its environment.

Read off the table of connectors (`dcp_operator.connectors`), so that a pod is built without asking which one it is.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

from dcp_connector.config import SECRET_FILE_ENV, ConnectorConfig, kv_transfer_config
from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.connectors import PROFILES, Profile, lease_of
from dcp_operator.settings import DRAIN_TIMEOUT_S, Role, resolve_role

#: What an engine may need beyond drain and lease to end its processes, in seconds.
EXIT_MARGIN_S: Final = 30
#: Infinity is a number to YAML and to the connector, but not a grace period.
_MAX_LEASE_S: Final = 1e9
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


def transfer_config(spec: Spec, role: Role) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config` of one role, JSON-ready.

    Keys are those of vLLM's KVTransferConfig (`vllm/config/kv_transfer.py`, 0.32 and 0.33). Raises
    pydantic.ValidationError for an option of the bundled connector that it doesn't take.
    """
    profile, stated = profile_of(spec), spec.kv_connector
    extra = dict(stated.extra_config)
    if profile.protocol_option is not None:
        extra[profile.protocol_option] = stated.protocol
    if profile.bundled:
        config = ConnectorConfig.model_validate(extra)
        return kv_transfer_config(_KV_ROLE[role], config, load_failure_policy=stated.load_failure_policy)
    return {
        "kv_connector": profile.vllm_class,
        "kv_role": _KV_ROLE[role],
        "kv_load_failure_policy": stated.load_failure_policy,
        "kv_connector_extra_config": extra,
    }


def termination_grace_s(spec: Spec) -> int:
    """Return the grace period of an engine pod, in seconds: requests end, then held KV is fetched or expires."""
    profile = profile_of(spec)
    stated_s = lease_of(profile, spec.kv_connector.extra_config)
    lease_s = min(profile.lease_s if stated_s is None else stated_s, _MAX_LEASE_S)
    return DRAIN_TIMEOUT_S + math.ceil(lease_s) + EXIT_MARGIN_S


def listens(spec: Spec, role: Role) -> bool:
    """Whether a role's pods listen on the connector's port."""
    return role in profile_of(spec).side_port_roles


def side_ports(spec: Spec, role: Role) -> list[tuple[str, int]]:
    """Return the ports on which a role's pods take what concerns transfers: name and number."""
    profile = profile_of(spec)
    if not listens(spec, role):
        return []
    ranks = resolve_role(spec, role).data_local if profile.side_port_per_rank else 1
    return [
        (names.PORT_NAME_BOOTSTRAP if rank == 0 else f"kv-{rank}", profile.side_port + rank) for rank in range(ranks)
    ]


def ready_probe(spec: Spec, role: Role) -> Probe:
    """Return where a role's pods are asked whether they are ready."""
    profile = profile_of(spec)
    if profile.ready_path is not None and listens(spec, role):
        return Probe(profile.ready_path, names.PORT_NAME_BOOTSTRAP)
    return Probe("/health", names.PORT_NAME_HTTP)


def owned_env(spec: Spec) -> list[dict[str, Any]]:
    """Return the variables that an engine and its connector must find, in the order of the pod."""
    profile = profile_of(spec)
    result = [_pod_ip("VLLM_HOST_IP")]
    if profile.bundled:
        result.append({"name": SECRET_FILE_ENV, "value": f"{names.PATH_KEY}/{names.SECRET_KEY}"})
    result.append({"name": profile.port_env, "value": str(profile.side_port)})
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
