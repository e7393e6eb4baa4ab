"""Whether vLLM itself takes one engine: its arguments, its configuration objects, its layers, its attention backend."""

import functools
import json
import tempfile
import types
from pathlib import Path
from unittest import mock

import flag_parser

#: What the checks of a configuration object raise: pydantic's ValidationError is a ValueError.
REFUSALS = (ValueError, AssertionError, NotImplementedError)
HEAD_SIZE = 128


def judge(parser, case):
    """Return {"facts"} of an engine that vLLM takes, else {"stage", "error"}: what refuses it, and its words.

    A case has `geometry` (as in the custom resource) and `args`, the arguments that the operator renders; the model
    that they name is replaced by one of that geometry. Stages, in the order of an engine's start: arguments, config,
    block, heads, backend, and connector for the checks that the bundled one makes of its engine.
    """
    geometry = case["geometry"]
    folder = model_folder(json.dumps(geometry, sort_keys=True))
    arguments = [f"--model={folder}" if each.startswith("--model=") else each for each in case["args"]]
    stage = "arguments"
    try:
        namespace = flag_parser.parse(parser, arguments)
        stage = "config"
        config = _engine_config(namespace)
        stage = "block"
        config.validate_block_size()
        stage = "heads"
        _spread_heads(config, geometry)
        stage = "backend"
        _attention_backend(config)
        stage = "connector"
        _connector(config)
        facts = _facts(config)
    except flag_parser.RefusedError as error:
        return {"stage": stage, "error": str(error)[:600]}
    except REFUSALS as error:
        return {"stage": stage, "error": f"{type(error).__name__}: {str(error)[:600]}"}
    return {"facts": {name: str(value) for name, value in facts.items()}}


def _facts(config):
    """Return what an engine runs with, in the operator's words for it."""
    parallel = config.parallel_config
    return {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "data": parallel.data_parallel_size,
        "expert": parallel.enable_expert_parallel,
        "decode_context": parallel.decode_context_parallel_size,
        "prefill_context": parallel.prefill_context_parallel_size,
        "interleave": parallel.cp_kv_cache_interleave_size,
        "block_size": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "dtype": config.model_config.dtype,
        "kv_cache_dtype": _kv_cache_dtype(config),
    }


def _engine_config(namespace):
    from vllm.engine.arg_utils import EngineArgs

    _know_architectures()
    namespace.skip_tokenizer_init = True
    return EngineArgs.from_cli_args(namespace).create_engine_config()


@functools.cache
def model_folder(geometry_text):
    """Return a folder with the config.json of a model of this geometry: all that a configuration reads of a model."""
    geometry = json.loads(geometry_text)
    heads = geometry["attentionHeads"]
    config = {
        "hidden_size": heads * HEAD_SIZE,
        "num_attention_heads": heads,
        "num_hidden_layers": geometry.get("layers", 2),
        "max_position_embeddings": geometry.get("maxModelLen") or 32768,
        "intermediate_size": 256,
        "vocab_size": 512,
        "torch_dtype": "bfloat16",
    }
    if geometry["attention"] == "mla":
        config |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": heads,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        }
    else:
        config |= {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": geometry["kvHeads"],
            "head_dim": HEAD_SIZE,
        }
    folder = Path(tempfile.mkdtemp(prefix="dcp-disagg-model-", dir=_temporary().name))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def _temporary():
    return tempfile.TemporaryDirectory(prefix="dcp-disagg-models-")


@functools.cache
def _know_architectures():
    """Tell vLLM what it would find out by importing a model's class, which needs compiled kernels."""
    import dataclasses

    from vllm.model_executor.models import registry

    known = {"is_text_generation_model": True, "supports_pp": True, "attn_type": "decoder", "score_type": "bi-encoder"}
    known |= {"default_seq_pooling_type": "LAST", "default_tok_pooling_type": "ALL"}
    known |= {"supported_video_pruning_methods": ()}
    names = [field.name for field in dataclasses.fields(registry._ModelInfo) if field.name != "architecture"]

    def inspect_model_cls(self, architectures, model_config):
        architecture = architectures if isinstance(architectures, str) else architectures[0]
        values = {name: known.get(name, False) for name in names}
        return registry._ModelInfo(architecture=architecture, **values), architecture

    registry._ModelRegistry.inspect_model_cls = inspect_model_cls


def _spread_heads(config, geometry):
    """Make the layer that spreads attention heads over tensor ranks, as rank 0 would, without memory for weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import QKVParallelLinear

    heads = geometry["attentionHeads"]
    kv_heads = heads if geometry["attention"] == "mla" else geometry["kvHeads"]
    group = types.SimpleNamespace(world_size=config.parallel_config.tensor_parallel_size, rank_in_group=0)
    with (
        mock.patch.object(parallel_state, "_TP", group),
        set_current_vllm_config(config),
        torch.device("meta"),
    ):
        QKVParallelLinear(HEAD_SIZE, HEAD_SIZE, heads, kv_heads, bias=False)


def _attention_backend(config):
    """Choose the attention backend as an attention layer does when it is made."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        return get_attn_backend(
            model.get_head_size(),
            model.dtype,
            config.cache_config.cache_dtype,
            use_mla=model.use_mla,
            num_heads=model.get_num_attention_heads(config.parallel_config),
        )


def _connector(config):
    """Let the bundled connector judge the engine that it would be part of, with the cache that vLLM would give it."""
    if config.kv_transfer_config is None or config.kv_transfer_config.kv_connector != "DCPMooncakeConnector":
        return
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

    from dcp_connector.compat import check_supported
    from dcp_connector.errors import StartupError

    model = config.model_config
    spec = (MLAAttentionSpec if model.use_mla else FullAttentionSpec)(
        block_size=config.cache_config.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=_kv_cache_dtype(config),
    )
    group = KVCacheGroupSpec(layer_names=["model.layers.0.self_attn.attn"], kv_cache_spec=spec)
    try:
        check_supported(config, KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group]))
    except StartupError as error:
        raise ValueError(str(error)) from error


def _kv_cache_dtype(config):
    """Return the type of the cached numbers, as an attention layer finds it."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    return kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, config.model_config)
