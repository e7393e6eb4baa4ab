"""The KV connectors that an object can name, as data: which pairs each takes, and what each needs of its pods.

Rules and builders read this table; neither asks for a connector by name. Sources: `dcp_connector` for the bundled one;
vLLM 0.32 `kv_connector/v1/mooncake/mooncake_connector.py`, `kv_connector/v1/nixl/` (`connector.py`, `base_worker.py`)
and `config/vllm.py` for the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp_connector.config import (
    CONNECTOR_CLASS,
    CONNECTOR_MODULE,
    DEFAULT_API_PORT,
    DEFAULT_BOOTSTRAP_PORT,
    ConnectorConfig,
)


@dataclass(frozen=True, slots=True)
class Takes:
    """Pairs of engines that a connector transfers between. Fields have the names of a role's fields in the spec.

    W is decodeContext, T tensor. Everything that is left at its default is no limit.
    """

    #: Largest value that a size may have on either role.
    largest: Mapping[str, int] = field(default_factory=dict[str, int])
    #: Fields that must be the same on both roles.
    equal: tuple[str, ...] = ()
    #: Fields that must be the same on both roles as soon as one of them has W > 1.
    equal_when_sharded: tuple[str, ...] = ()
    #: Fields of which one role's value must divide the other's.
    divide: tuple[str, ...] = ()
    #: W is 1 or T.
    whole_tensor_group: bool = False
    #: Attention kinds that may have W > 1; None: all that the engine takes.
    sharded_attention: tuple[str, ...] | None = None
    #: Layouts of a model's layers that it takes; None: all. With one kind of cache for all layers the layout is no
    #: matter (`--disable-hybrid-kv-cache-manager`, where windows are kept whole).
    layouts: tuple[str, ...] | None = None
    #: With W > 1 the interleave is the block size.
    interleave_is_block: bool = False
    #: Prefill's T may be above decode's although it is above the number of KV heads.
    replicated_prefill: bool = True


class MooncakeUpstreamOptions(BaseModel):
    """What vLLM's MooncakeConnector reads from kv_connector_extra_config."""

    model_config = ConfigDict(extra="allow", frozen=True)

    num_workers: Annotated[int, Field(ge=1)] = 10
    device_name: str = ""


class NixlOptions(BaseModel):
    """What vLLM's NixlConnector reads from kv_connector_extra_config."""

    model_config = ConfigDict(extra="allow", frozen=True)

    backends: list[str] = ["UCX"]
    num_threads: Annotated[int, Field(ge=1)] = 4
    kv_lease_duration: Annotated[int, Field(ge=1)] = 30
    kv_recompute_threshold: Annotated[int, Field(ge=0)] = 64
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: Annotated[int, Field(ge=1)] = 480
    engine_ttl: Annotated[float, Field(gt=0)] = 3600.0
    enforce_handshake_compat: bool = True


@dataclass(frozen=True, slots=True)
class Profile:
    """One connector: its name in the spec, what it is to vLLM, what it takes, and what its pods need."""

    name: str
    words: str
    takes: Takes
    vllm_class: str
    #: Module that vLLM imports it from; None for those that vLLM brings.
    module: str | None
    #: Whether this project delivers it: with its init container, its control key and its readiness endpoint.
    bundled: bool
    options: type[BaseModel]
    #: Options that the operator sets -> where they are stated instead, or why they are fixed.
    operator_sets: Mapping[str, str]
    #: Port on which the other role's engines find an engine: the bootstrap server, or NIXL's side channel.
    side_port: int
    #: Roles whose pods listen on it.
    side_port_roles: tuple[str, ...]
    #: Whether each data-parallel rank has a port of its own, the next one up.
    side_port_per_rank: bool
    #: How long prefill holds the blocks of a request that nobody fetches, in seconds, and the option that says so.
    lease_s: float
    lease_option: str | None
    #: Option by which the transport is chosen; None where environment variables do it.
    protocol_option: str | None
    #: Environment of an engine: the side channel's port, and the variable that takes the pod's address.
    port_env: str
    host_env: str | None = None
    #: Variables for protocol tcp, which a template may override.
    tcp_env: Mapping[str, str] = field(default_factory=dict[str, str])
    #: The flow of vllm-router that suits it (--kv-connector).
    router_flow: str = "nixl"
    #: Whether that flow works with engines that the router discovers by their labels.
    router_discovers: bool = True
    #: Path that a prefill engine answers on the side port once its connector is up; None: the engine's own health.
    ready_path: str | None = None


_PORT_WORDS = "the probes and the Services rely on its value; remove it"
_PROTOCOL_WORDS = "state spec.kvConnector.protocol instead"

_PROFILES: Final = (
    Profile(
        name="mooncake",
        words="the bundled connector",
        takes=Takes(
            largest={"prefillContext": 1},
            layouts=("full", "sparse"),
        ),
        vllm_class=CONNECTOR_CLASS,
        module=CONNECTOR_MODULE,
        bundled=True,
        options=ConnectorConfig,
        operator_sets={
            "mooncake_protocol": _PROTOCOL_WORDS,
            "bootstrap_port": _PORT_WORDS,
            "api_port": "the probes and the router rely on its value; remove it",
        },
        side_port=DEFAULT_BOOTSTRAP_PORT,
        side_port_roles=("prefill", "decode"),
        side_port_per_rank=True,
        lease_s=float(ConnectorConfig.model_fields["lease_s"].default),
        lease_option="lease_s",
        protocol_option="mooncake_protocol",
        port_env="VLLM_MOONCAKE_BOOTSTRAP_PORT",
        ready_path="/readyz",
    ),
    Profile(
        name="mooncake-upstream",
        words="vLLM's own MooncakeConnector",
        takes=Takes(
            # Prefill context was not tried here.
            largest={"prefillContext": 1},
            # Pages are copied one to one, and it compares their lengths at the first transfer.
            equal=("blockSize",),
            equal_when_sharded=("tensor", "decodeContext", "kvCacheInterleaveSize", "pipeline"),
            divide=("tensor",),
        ),
        vllm_class="MooncakeConnector",
        module=None,
        bundled=False,
        options=MooncakeUpstreamOptions,
        operator_sets={
            "mooncake_protocol": _PROTOCOL_WORDS,
            "bootstrap_server_address": "every prefill pod has a bootstrap server of its own; remove it",
        },
        side_port=DEFAULT_BOOTSTRAP_PORT,
        side_port_roles=("prefill",),
        side_port_per_rank=False,
        # VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
        lease_s=480.0,
        lease_option=None,
        protocol_option="mooncake_protocol",
        port_env="VLLM_MOONCAKE_BOOTSTRAP_PORT",
        router_flow="mooncake",
        # vllm-router 0.1.17 asks the bootstrap servers of engines given as addresses only: decode would get nothing.
        router_discovers=False,
        ready_path="/query",
    ),
    Profile(
        name="nixl",
        words="vLLM's NixlConnector",
        takes=Takes(
            # vLLM takes prefill context and, by another connector class, stages on prefill; it also converts between
            # block sizes while nothing is sharded. None of it was tried here.
            largest={"prefillContext": 1, "pipeline": 1},
            equal=("blockSize",),
            divide=("tensor", "decodeContext"),
            whole_tensor_group=True,
            sharded_attention=("mla",),
            interleave_is_block=True,
            replicated_prefill=False,
        ),
        vllm_class="NixlConnector",
        module=None,
        bundled=False,
        options=NixlOptions,
        operator_sets={},
        side_port=5600,
        side_port_roles=("prefill", "decode"),
        side_port_per_rank=True,
        lease_s=30.0,
        lease_option="kv_lease_duration",
        protocol_option=None,
        port_env="VLLM_NIXL_SIDE_CHANNEL_PORT",
        host_env="VLLM_NIXL_SIDE_CHANNEL_HOST",
        # UCX chooses the transport: all but InfiniBand and RoCE.
        tcp_env={"UCX_TLS": "^ib"},
    ),
)

PROFILES: Final[Mapping[str, Profile]] = {profile.name: profile for profile in _PROFILES}

#: Port of every engine's HTTP server.
API_PORT: Final = DEFAULT_API_PORT


def lease_of(profile: Profile, extra_config: Mapping[str, object]) -> float | None:
    """Return how long prefill holds KV that nobody fetches, in seconds; None where the option has no valid value."""
    if profile.lease_option is None or profile.lease_option not in extra_config:
        return profile.lease_s
    try:
        options = profile.options.model_validate({profile.lease_option: extra_config[profile.lease_option]})
    except ValidationError:
        return None
    return float(getattr(options, profile.lease_option))
