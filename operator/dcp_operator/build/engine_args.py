"""Arguments of one engine: the resolved settings in vLLM's words.

Flags are those of vLLM 0.32 and 0.33 (`vllm/engine/arg_utils.py`, `vllm/entrypoints/openai/cli_args.py`). One argument
per element in the form `--flag=value`, so that `kubectl describe` shows a line per setting.
"""

import json
import math
from typing import Any, Final

from dcp_connector.config import ConnectorConfig, kv_transfer_config
from dcp_operator.api.spec import Spec
from dcp_operator.build.model_source import model_source
from dcp_operator.settings import DRAIN_TIMEOUT_S, EngineSettings, Role, resolve_role, role_spec

#: What an engine may need beyond drain and lease to end its processes, in seconds.
EXIT_MARGIN_S: Final = 30

#: Infinity is a number to YAML and to the connector, but not a grace period.
_MAX_LEASE_S: Final = 1e9

_KV_ROLE: Final[dict[Role, Any]] = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


def connector_config(spec: Spec) -> ConnectorConfig:
    """Return the connector's options, the same for both roles.

    Raises pydantic.ValidationError for an extraConfig that the connector doesn't take; the rules say so in words first.
    """
    return ConnectorConfig.model_validate(
        {**spec.kv_connector.extra_config, "mooncake_protocol": spec.kv_connector.protocol}
    )


def termination_grace_s(config: ConnectorConfig) -> int:
    """Return the grace period of an engine pod, in seconds: requests end, then held KV is fetched or expires."""
    return DRAIN_TIMEOUT_S + math.ceil(min(config.lease_s, _MAX_LEASE_S)) + EXIT_MARGIN_S


def engine_args(name: str, spec: Spec, role: Role) -> list[str]:
    """Return the arguments of one role's engine; `name` is the object's, for the served model name."""
    settings = resolve_role(spec, role)
    config = connector_config(spec)
    source = model_source(spec.model)
    transfer = kv_transfer_config(_KV_ROLE[role], config, load_failure_policy=spec.kv_connector.load_failure_policy)
    flags: list[tuple[str, str | int | None]] = [
        ("--model", source.reference),
        ("--revision", source.revision),
        ("--served-model-name", spec.model.served_name or name),
        ("--port", config.api_port),
        *_sizes(settings),
        ("--block-size", settings.block_size),
        ("--dtype", settings.dtype),
        ("--kv-cache-dtype", settings.kv_cache_dtype),
        ("--max-model-len", settings.max_model_len),
        ("--shutdown-timeout", DRAIN_TIMEOUT_S),
        ("--kv-transfer-config", json.dumps(transfer, sort_keys=True, separators=(",", ":"))),
    ]
    rendered = [f"{flag}={value}" for flag, value in flags if value is not None]
    switches = ["--enable-expert-parallel"] if settings.expert else []
    return [*rendered, *switches, *role_spec(spec, role).extra_args]


def _sizes(settings: EngineSettings) -> list[tuple[str, str | int | None]]:
    """Return the parallel sizes. Those that are 1 are left to vLLM's default, except tensor: it says what runs."""

    def above_one(size: int) -> int | None:
        return size if size > 1 else None

    sharded = settings.decode_context > 1
    return [
        ("--tensor-parallel-size", settings.tensor),
        ("--pipeline-parallel-size", above_one(settings.pipeline)),
        ("--data-parallel-size", above_one(settings.data)),
        ("--data-parallel-size-local", settings.data_local if settings.data > 1 else None),
        ("--prefill-context-parallel-size", above_one(settings.prefill_context)),
        ("--decode-context-parallel-size", above_one(settings.decode_context)),
        # vLLM refuses an interleave without context parallelism; prefill-context shards by the same interleave.
        (
            "--cp-kv-cache-interleave-size",
            settings.interleave if sharded or settings.prefill_context > 1 else None,
        ),
    ]
