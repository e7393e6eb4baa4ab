"""The connector's extra config: the one model that the operator renders and the engine reads.

It travels as `kv_connector_extra_config` inside vLLM's `--kv-transfer-config`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

CONNECTOR_CLASS = "DCPMooncakeConnector"
CONNECTOR_MODULE = "dcp_connector.connector"

#: vLLM's and every Mooncake router's default for the bootstrap server (VLLM_MOONCAKE_BOOTSTRAP_PORT).
DEFAULT_BOOTSTRAP_PORT = 8998
#: The engine's own HTTP port when none is given (`vllm serve --port`).
DEFAULT_API_PORT = 8000
#: Environment variable that names the file with the control channel's shared secret.
SECRET_FILE_ENV = "DCP_KV_SECRET_FILE"  # noqa: S105 - the name of a variable, not a secret

_MIB = 1024 * 1024


class ConnectorConfig(BaseModel):
    """Options of one engine's connector. Unknown keys are refused, so a typing error never goes unnoticed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mooncake_protocol: Literal["tcp", "rdma"] = Field(
        default="rdma", description="Transport that the TransferEngine is initialised with."
    )
    device_name: str = Field(
        default="", description="RDMA devices to use, comma separated; empty lets Mooncake choose."
    )
    bootstrap_port: int = Field(
        default=DEFAULT_BOOTSTRAP_PORT,
        ge=1,
        le=65535,
        description="Port of /query, /v1/topology, /v1/failures, /readyz, /healthz. Data-parallel rank i of a pod "
        "listens i ports further on.",
    )
    api_port: int = Field(
        default=DEFAULT_API_PORT, ge=1, le=65535, description="The engine's own HTTP port, for /readyz."
    )
    request_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="A decode request whose KV has not arrived by then asks the writers to stop, and ends by "
        "kv_load_failure_policy once they have confirmed or cancel_grace_s is over.",
    )
    cancel_grace_s: float = Field(
        default=5.0,
        gt=0,
        description="How long a request that failed or was cancelled waits at most for its writers to confirm that "
        "they stopped. It ends then; blocks of a writer that has not answered stay out of use until it answers, or "
        "its process has ended, or 360 s after the request's deadline. Writers are asked again after each such time.",
    )
    lease_s: float = Field(
        default=120.0,
        gt=0,
        description="How long prefill holds a finished prompt's blocks for a decode engine that never asks.",
    )
    staging_bytes: int = Field(
        default=256 * _MIB,
        ge=_MIB,
        description="Registered staging memory of one rank at most: prefill gathers rows in it, decode receives them "
        "in it. A rank that does both uses half of it for each.",
    )
    staging_memory: Literal["device", "host"] = Field(
        default="device",
        description="Where staging memory of KV caches on a device lies: beside them, or in page-locked host memory.",
    )
    max_batch_descriptors: int = Field(
        default=512,
        ge=1,
        le=1024,
        description="Descriptors in one TransferEngine batch (3,000 fail, 4,000 wedge a TCP session).",
    )
    max_batch_bytes: int = Field(
        default=128 * _MIB, ge=_MIB, le=1024 * _MIB, description="Bytes in one TransferEngine batch."
    )
    transfer_threads: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Transfers that one prefill rank runs at the same time. With two or more, one is left to others "
        "however many ranks of a decode engine are frozen.",
    )
    path: Literal["auto", "direct", "pack", "scatter"] = Field(
        default="auto",
        description="Transfer path; auto chooses per rank pair by fragment size and transport. Prefill's choice "
        "counts; scatter needs a decode side that is not set to another path.",
    )
    allow_unsupported_vllm: bool = Field(
        default=False, description="Start with a vLLM version that this connector was not tested with."
    )


def staging_shares(staging_bytes: int, *, gathers: bool, receives: bool) -> tuple[int, int]:
    """Return the bytes that a rank may register to gather rows in, and to receive them in.

        gathering + receiving <= staging_bytes

    A rank that does one of the two has all of it, one that does both has half of it for each.
    """
    share = staging_bytes // max(1, gathers + receives)
    return share * gathers, share * receives


def kv_transfer_config(
    role: Literal["kv_producer", "kv_consumer"],
    config: ConnectorConfig,
    *,
    load_failure_policy: Literal["recompute", "fail"],
) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config` for one role, JSON-ready.

    Keys are those of vLLM's KVTransferConfig (vllm/config/kv_transfer.py, 0.32 and 0.33), which refuses unknown ones.
    Extra-config values equal to their defaults are left out, so that what runs shows what was chosen.
    """
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": role,
        "kv_load_failure_policy": load_failure_policy,
        "kv_connector_extra_config": config.model_dump(exclude_defaults=True),
    }
