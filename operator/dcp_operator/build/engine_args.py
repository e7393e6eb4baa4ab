"""Arguments of one engine: the resolved settings in vLLM's words.

Flags are those of vLLM 0.32 and 0.33 (`vllm/engine/arg_utils.py`, `vllm/entrypoints/openai/cli_args.py`). One argument
per element in the form `--flag=value`, so that `kubectl describe` shows a line per setting.
"""

import json

from dcp_operator.api.spec import Spec
from dcp_operator.build.group import node_flags
from dcp_operator.build.model_source import model_source
from dcp_operator.build.wiring import transfer_config
from dcp_operator.ports import engine_ports
from dcp_operator.settings import EngineSettings, Role, resolve_role, role_spec


def engine_args(name: str, spec: Spec, role: Role, host_ports: int | None = None) -> list[str]:
    """Return the arguments of one role's engine; `name` is the object's, for the served model name.

    `host_ports` is the first port of the revision's block, for roles on the host's network.

    Raises pydantic.ValidationError for an extraConfig that the connector doesn't take; the rules say so in words first.
    """
    settings = resolve_role(spec, role)
    source = model_source(spec.model)
    ports = engine_ports(spec, role, host_ports)
    transfer = transfer_config(spec, role, ports)
    flags: list[tuple[str, str | int | None]] = [
        ("--model", source.reference),
        ("--revision", source.revision),
        ("--served-model-name", spec.model.served_name or name),
        ("--port", ports.api),
        *_sizes(settings),
        *node_flags(spec, role, ports),
        ("--block-size", settings.block_size),
        ("--dtype", settings.dtype),
        ("--kv-cache-dtype", settings.kv_cache_dtype),
        ("--max-model-len", settings.max_model_len),
        ("--shutdown-timeout", spec.drain_timeout_seconds),
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
