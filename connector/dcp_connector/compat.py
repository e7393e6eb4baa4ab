"""The only reader of vLLM's internals. Everything that may change between vLLM versions is read here.

Supported: 0.32 and 0.33 (`SUPPORTED`). What is read, and where it lives there:

    vllm_config.kv_transfer_config   engine_id, kv_role, kv_connector_extra_config,
                                     kv_load_failure_policy                                   config/kv_transfer.py
    vllm_config.parallel_config      tensor/pipeline/prefill-context/decode-context sizes,
                                     cp_kv_cache_interleave_size, data_parallel_rank_local,
                                     data_parallel_size_local, nnodes                         config/parallel.py
    vllm_config.model_config         hf_text_config, dtype, quantization, use_mla,
                                     get_total_num_kv_heads()                                 config/model.py
    vllm_config.compilation_config   static_forward_context: layer name -> layer with .impl   config/compilation.py
    vllm_config.cache_config         cache_dtype                                              config/cache.py
    kv_cache_config                  num_blocks, kv_cache_groups[0].kv_cache_spec: its class,
                                     block_size, dtype, dcp_sharded, head_size, head_size_v,
                                     state_content_bytes, tokens_per_state, kv_cache_specs    v1/kv_cache_interface.py
    distributed.parallel_state       get_tp_group(), get_pp_group(): this worker's ranks
                                     get_inner_dp_world_group(): all ranks of the engine
    scheduler_output                 total_num_scheduled_tokens                               v1/core/sched/output.py
    request.status                   the names of the finished states                         v1/request.py
    logging.getLogger("vllm")        its handlers and level                                   logger.py
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from dcp_connector.config import SECRET_FILE_ENV, ConnectorConfig
from dcp_connector.errors import StartupError
from dcp_connector.geometry import GeometryError
from dcp_connector.handshake import SideFacts, side_layout
from dcp_connector.keys import KeyFile
from dcp_connector.wire import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

#: vLLM versions (major, minor) that this connector is tested with.
SUPPORTED = ((0, 32), (0, 33))

#: Classes of KV-cache specs that are served, not their subclasses: those keep other tokens, or keep them elsewhere.
_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_NORMAL_ENDS = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
#: Model facts that decide what a KV entry means. Paths and names of copies of the same model are left out.
_MODEL_FACTS = (
    "architectures",
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "intermediate_size",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "quantization_config",
)


def check_version(version: str, *, allow_unsupported: bool) -> None:
    """Raise StartupError unless this vLLM version is one that the connector is tested with."""
    found = re.match(r"(\d+)\.(\d+)", version)
    known = found is not None and (int(found[1]), int(found[2])) in SUPPORTED
    if not known and not allow_unsupported:
        names = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise StartupError(
            f"this connector is tested with vLLM {names}, this is {version}: use one of them, or set "
            "kv_connector_extra_config.allow_unsupported_vllm to true and test it yourself"
        )


def adopt_logging() -> None:
    """Let this package's log lines appear with vLLM's own: vLLM configures its own logger only, not the root."""
    ours, theirs = logging.getLogger("dcp_connector"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def vllm_version() -> str:
    """Return the version of the vLLM that runs."""
    return str(importlib.import_module("vllm").__version__)


def read_config(vllm_config: Any) -> ConnectorConfig:
    """Return the connector's own options. Raises StartupError that names every wrong key."""
    given: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    try:
        return ConnectorConfig.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))} is {ascii(item['input'])[:60]}: {item['msg']}"
            for item in error.errors()
        )
        raise StartupError(f"kv_connector_extra_config is wrong: {problems}") from None


def read_secret(environ: Mapping[str, str]) -> KeyFile:
    """Return the control channel's keys, from the file that the environment names. Raises StartupError."""
    path = environ.get(SECRET_FILE_ENV)
    if not path:
        raise StartupError(
            f"{SECRET_FILE_ENV} is not set: it has to name the file with the secret that prefill and decode share"
        )
    return KeyFile(Path(path))


def host_address() -> str:
    """Return the address at which peers reach this pod: VLLM_HOST_IP, or vLLM's guess."""
    address = os.environ.get("VLLM_HOST_IP") or str(importlib.import_module("vllm.utils.network_utils").get_ip())
    if address in ("0.0.0.0", "::", ""):  # noqa: S104 - compared with, not bound to
        raise StartupError("this pod's address is unknown: set VLLM_HOST_IP, in Kubernetes from status.podIP")
    return address


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise StartupError for a deployment that this version of the connector can't serve."""
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise StartupError(
            f"prefill context parallel size is {parallel.prefill_context_parallel_size}; this connector needs 1"
        )
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise StartupError(
            f"the model has {groups} KV-cache groups; this connector serves models with one "
            "(--disable-hybrid-kv-cache-manager can make it one)"
        )
    for spec in _layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec):
        _check_spec(spec, int(parallel.decode_context_parallel_size))


def _layer_specs(spec: Any) -> tuple[Any, ...]:
    """Return the specs of a group's layers: one for all, or one for each where their pages differ in size."""
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        return tuple(spec.kv_cache_specs.values())
    return (spec,)


def _check_spec(spec: Any, dcp_size: int) -> None:
    kind = type(spec).__name__
    if kind not in _SPECS:
        raise StartupError(
            f"the KV cache is a {kind}; this connector serves {' and '.join(_SPECS)}, so full attention and MLA only"
        )
    if getattr(spec, "dtype", None) is None:
        raise StartupError(f"the KV cache is a {kind} without a data type, which this connector doesn't understand")
    states = getattr(spec, "tokens_per_state", 1)
    if states != 1:
        raise StartupError(
            f"the KV cache is a {kind} that keeps {states} tokens in one entry; this connector serves one in each"
        )
    if dcp_size > 1 and not getattr(spec, "dcp_sharded", False):
        raise StartupError(
            f"the KV cache is a {kind} whose tokens are not dealt out to the {dcp_size} ranks of a DCP group: "
            "run this model with --decode-context-parallel-size 1"
        )


def engine_id(vllm_config: Any) -> str:
    """Return this engine's id, the same in all processes of its first node."""
    return str(vllm_config.kv_transfer_config.engine_id)


def shared_engine_id(vllm_config: Any) -> str:
    """Return this engine's id in a worker of any of its nodes; all of its workers have to ask at the same time.

    vLLM draws the id anew on every node of an engine that spans several. The one that counts is that of the node with
    the scheduler, which is the first rank's: it tells the others through vLLM's own process group.
    """
    own = engine_id(vllm_config)
    if int(vllm_config.parallel_config.nnodes) == 1:
        return own
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    return str(state.get_inner_dp_world_group().broadcast_object(own, src=0))


def local_data_parallel_rank(vllm_config: Any) -> int:
    """Return this engine core's number among the data-parallel ranks of its pod; 0 without data parallelism."""
    return int(vllm_config.parallel_config.data_parallel_rank_local or 0)


def local_data_parallel_size(vllm_config: Any) -> int:
    """Return the number of data-parallel ranks of this pod; 1 without data parallelism."""
    return int(vllm_config.parallel_config.data_parallel_size_local or 1)


def roles(vllm_config: Any) -> tuple[bool, bool]:
    """Return (is producer, is consumer)."""
    transfer = vllm_config.kv_transfer_config
    return bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)


def recomputes(vllm_config: Any) -> bool:
    """Tell whether vLLM computes a request itself whose KV could not be loaded; else it ends with an error."""
    return vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"


def virtual_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the tokens that one entry of a block table covers: B*W."""
    block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return int(block_size) * int(vllm_config.parallel_config.decode_context_parallel_size)


def ranks() -> tuple[int, int]:
    """Return this worker's (tensor rank, pipeline rank)."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    return int(state.get_tp_group().rank_in_group), int(state.get_pp_group().rank_in_group)


def side_facts(vllm_config: Any, kv_cache_config: Any, layer_names: tuple[str, ...]) -> SideFacts:
    """Return what all ranks of this engine have in common.

    Read when the KV tensors are registered, not earlier: until then vLLM may change the interleave. All workers of an
    engine register at the same time. Raises StartupError.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layout = Layout(
        tensor_parallel_size=int(parallel.tensor_parallel_size),
        dcp_size=int(parallel.decode_context_parallel_size),
        interleave=int(parallel.cp_kv_cache_interleave_size),
        block_size=int(spec.block_size),
        num_kv_heads=1 if model.use_mla else int(model.get_total_num_kv_heads()),
    )
    if layout.dcp_size == 1:
        layout = Layout(layout.tensor_parallel_size, 1, layout.block_size, layout.block_size, layout.num_kv_heads)
    try:
        side_layout(layout)
    except GeometryError as error:
        raise StartupError(f"this engine's parallel layout can't be served: {error}") from error
    page_format = _page_format(vllm_config, layer_names)
    return SideFacts(
        engine_id=shared_engine_id(vllm_config),
        role=vllm_config.kv_transfer_config.kv_role,
        model_hash=_model_hash(model),
        model=str(model.served_model_name or model.model)[:512],
        kv_dtype=_kv_dtype(str(vllm_config.cache_config.cache_dtype), _layer_specs(spec)),
        page_format=page_format,
        layout=layout,
        pipeline_parallel_size=int(parallel.pipeline_parallel_size),
        key_bytes=_key_bytes(_layer_specs(spec)) if page_format == "rows" else 0,
    )


def num_scheduled_tokens(scheduler_output: Any) -> int:
    """Return the tokens of a step."""
    return int(scheduler_output.total_num_scheduled_tokens)


def finished_normally(request: Any) -> bool:
    """Tell whether a finished request ran to its end, so that its prompt's KV is complete."""
    return request.status.name in _NORMAL_ENDS


def _kv_dtype(cache_dtype: str, specs: tuple[Any, ...]) -> str:
    """Return what the bytes mean. The tensors' own type doesn't tell: vLLM keeps every kind of fp8 as uint8."""
    if cache_dtype == "auto":
        return " and ".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs}))
    return "fp8_e4m3" if cache_dtype == "fp8" else cache_dtype


def _key_bytes(specs: tuple[Any, ...]) -> int:
    """Return the bytes of the key in an entry of a key and a value; 0 where entries can't be cut in two alike."""
    found = {
        0
        if getattr(spec, "state_content_bytes", None) is not None or not getattr(spec, "head_size_v", 0)
        else int(spec.head_size) * int(getattr(spec.dtype, "itemsize", 0))
        for spec in specs
    }
    return found.pop() if len(found) == 1 else 0


def _model_hash(model: Any) -> str:
    config = model.hf_text_config
    facts = {name: getattr(config, name, None) for name in _MODEL_FACTS}
    facts["dtype"], facts["quantization"] = str(model.dtype), str(model.quantization)
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _page_format(vllm_config: Any, layer_names: tuple[str, ...]) -> Literal["rows", "opaque"]:
    """Tell whether single (token, head) entries of a page can be addressed.

    An attention implementation with `supports_dcp` has to: its tokens are dealt out to ranks one by one. Others need
    not, and vLLM's own CPU_ATTN does not (it packs the keys of a page by column). Those exchange whole pages only.
    """
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        impl = getattr(layers.get(name), "impl", None)
        if not getattr(impl, "supports_dcp", False):
            return "opaque"
    return "rows"
