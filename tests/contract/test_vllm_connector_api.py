"""What the connector relies on in vLLM, in each supported version: names, signatures, fields, enum members.

0.32 is read where it is installed for the engines, 0.33 from its published wheel without its dependencies. Nothing of
vLLM is imported: it would need torch, and for 0.33 a GPU build.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dcp_connector import compat
from dcp_connector.config import ConnectorConfig, kv_transfer_config
from devcluster.engine.environment import ensure_engine_environment
from devcluster.paths import CHECKOUT, this_cache
from tests.support.kv_oracle import VLLM_LAYOUTS
from tests.support.python_source import Source, is_abstract, parameters, required
from tests.support.vllm_release import vllm_source

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
OURS = Source(CHECKOUT / "connector")
FACADE = ("dcp_connector.connector", "DCPMooncakeConnector")
#: Ours that vLLM calls in 0.33 only.
NEWER = {"supports_sleep_mode"}

#: Class -> members that are read or called.
READ = {
    ("vllm.config.kv_transfer", "KVTransferConfig"): [
        "engine_id",
        "kv_role",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
        "is_kv_producer",
        "is_kv_consumer",
    ],
    ("vllm.config.parallel", "ParallelConfig"): [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "cp_kv_cache_interleave_size",
        "data_parallel_rank_local",
        "data_parallel_size_local",
        "nnodes",
    ],
    ("vllm.config.model", "ModelConfig"): [
        "model",
        "served_model_name",
        "dtype",
        "quantization",
        "use_mla",
        "hf_text_config",
        "get_total_num_kv_heads",
    ],
    ("vllm.config.cache", "CacheConfig"): ["cache_dtype"],
    ("vllm.config.compilation", "CompilationConfig"): ["static_forward_context"],
    ("vllm.config.vllm", "VllmConfig"): [
        "kv_transfer_config",
        "parallel_config",
        "model_config",
        "cache_config",
        "compilation_config",
    ],
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): ["num_blocks", "kv_cache_groups"],
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): ["kv_cache_spec"],
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs"): ["kv_cache_specs", "block_size"],
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"): [
        "block_size",
        "dtype",
        "dcp_sharded",
        "head_size",
        "head_size_v",
        "state_content_bytes",
        "tokens_per_state",
    ],
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"): ["block_size", "dtype", "dcp_sharded", "tokens_per_state"],
    ("vllm.v1.outputs", "KVConnectorOutput"): ["finished_sending", "finished_recving", "kv_connector_worker_meta"],
    ("vllm.v1.request", "Request"): [
        "request_id",
        "kv_transfer_params",
        "prompt_token_ids",
        "num_prompt_tokens",
        "num_computed_tokens",
        "lora_request",
        "status",
    ],
    ("vllm.lora.request", "LoRARequest"): ["lora_name"],
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): ["get_block_ids"],
    ("vllm.v1.core.block_pool", "BlockPool"): ["blocks", "touch", "free_blocks", "null_block"],
    ("vllm.distributed.parallel_state", "GroupCoordinator"): ["rank_in_group", "broadcast_object"],
    ("vllm.v1.attention.backend", "AttentionImplBase"): ["supports_dcp"],
    (METRICS, "KVConnectorStats"): ["data", "aggregate", "reduce", "reset", "is_empty"],
    (METRICS, "KVConnectorPromMetrics"): ["_counter_cls", "_gauge_cls", "_histogram_cls", "per_engine_labelvalues"],
}


def _installed() -> Source:
    environment = ensure_engine_environment(this_cache().root, print)
    return Source(next((environment / "lib").glob("python3*/site-packages")))


@pytest.fixture(scope="module", params=["0.32", "0.33"])
def vllm(request: pytest.FixtureRequest) -> Source:
    return _installed() if request.param == "0.32" else Source(vllm_source("0.33.0"))


def test_the_versions_that_are_read_here_are_those_that_the_connector_supports() -> None:
    assert compat.SUPPORTED == ((0, 32), (0, 33))
    (metadata,) = _installed().root.glob("vllm*-*.dist-info/METADATA")
    version = re.search(r"^Version: (\S+)$", metadata.read_text(), re.MULTILINE)
    assert version
    assert version[1].startswith("0.32.")


def test_every_name_that_is_imported_from_vllm_is_there(vllm: Source) -> None:
    wanted: list[tuple[str, str]] = []
    for file in sorted((CHECKOUT / "connector" / "dcp_connector").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "vllm":
                    wanted += [(module, alias.name) for alias in node.names]
                case ast.Attribute(value=ast.Call(args=[ast.Constant(value=str(module))]), attr=name) if (
                    module.partition(".")[0] == "vllm"
                ):
                    wanted.append((module, name))
                case _:
                    pass
    assert len(wanted) >= 10
    groups = [f"get_{kind}_group" for kind in ("tp", "pp", "inner_dp_world")]
    for module, name in [*wanted, *(("vllm.distributed.parallel_state", group) for group in groups)]:
        assert name in vllm.names(module), (module, name)


@pytest.mark.parametrize(("module", "name"), READ, ids=lambda value: value.rpartition(".")[2])
def test_everything_that_is_read_of_vllms_objects_is_there(vllm: Source, module: str, name: str) -> None:
    assert set(READ[module, name]) - vllm.members(module, name) == set()


def test_every_method_of_the_facade_is_one_that_vllm_calls_with_these_parameters(vllm: Source) -> None:
    base = vllm.methods(BASE, "KVConnectorBase_V1") | vllm.methods(BASE, "SupportsHMA")
    ours = {name: method for name, method in OURS.methods(*FACADE).items() if not name.startswith("_")}
    assert ours.keys() - base.keys() <= NEWER
    for name in ours.keys() & base.keys():
        takes_any = ours[name].args.kwarg is not None
        assert takes_any or set(parameters(base[name])) <= set(parameters(ours[name])), name
        positional = parameters(base[name])[: len(parameters(ours[name]))]
        assert parameters(ours[name])[: len(positional)] == positional, name
        assert set(required(ours[name])) <= set(parameters(base[name])), name


def test_every_abstract_method_of_vllms_base_is_written(vllm: Source) -> None:
    abstract = {
        name
        for cls in ("KVConnectorBase_V1", "SupportsHMA")
        for name, method in vllm.methods(BASE, cls).items()
        if is_abstract(method)
    }
    assert len(abstract) >= 7
    assert abstract <= OURS.methods(*FACADE).keys()


def test_vllms_classes_are_made_as_they_want_to_be(vllm: Source) -> None:
    assert parameters(vllm.methods(BASE, "KVConnectorBase_V1")["__init__"]) == [
        "vllm_config",
        "role",
        "kv_cache_config",
    ]
    assert parameters(vllm.methods(METRICS, "KVConnectorPromMetrics")["__init__"]) == [
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ]
    assert vllm.fields(BASE, "KVConnectorTransferResults") == ["finished_sending", "finished_recving", "failed_recving"]


def test_the_block_pool_that_vllm_hands_over_takes_and_gives_up_references_of_blocks(vllm: Source) -> None:
    pool = vllm.methods("vllm.v1.core.block_pool", "BlockPool")
    assert required(pool["touch"]) == ["blocks"]
    assert required(pool["free_blocks"]) == ["ordered_blocks"]
    assert ".bind_kv_cache_manager(self.kv_cache_manager)" in vllm.text("vllm.v1.core.sched.scheduler")
    assert "self.bind_gpu_block_pool(kv_cache_manager.block_pool)" in vllm.text(BASE)


def test_the_members_of_vllms_enums_have_the_names_that_are_used(vllm: Source) -> None:
    assert {"SCHEDULER", "WORKER"} <= vllm.enum_names(BASE, "KVConnectorRole")
    assert "P2P" in vllm.enum_names("vllm.v1.metrics.cache_hit_source", "CacheHitSource")
    finished = {name for name in vllm.enum_names("vllm.v1.request", "RequestStatus") if name.startswith("FINISHED_")}
    assert finished >= compat._NORMAL_ENDS
    known = {*compat._NORMAL_ENDS, "FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR"}
    assert finished <= known, "a new way for a request to end: is its prompt's KV complete?"


def test_the_physical_layouts_are_those_that_the_byte_tests_go_through(vllm: Source) -> None:
    dimensions = ("layer", "block", "head", "row", "entry")
    named = vllm.constants("vllm.v1.kv_cache_layout", "KVCacheLayout")
    orders = {name: tuple(dimensions[axis] for axis in order) for name, order in named.items()}
    assert orders == {name: (*order, "entry") for name, order in VLLM_LAYOUTS.items()}


def test_vllm_takes_every_key_of_the_transfer_config_that_is_rendered(vllm: Source) -> None:
    rendered = kv_transfer_config("kv_producer", ConnectorConfig(), load_failure_policy="fail")
    assert rendered.keys() <= set(vllm.fields("vllm.config.kv_transfer", "KVTransferConfig"))


def test_the_engine_core_hands_over_all_stages_and_numbers_data_parallel_engines(vllm: Source) -> None:
    core = vllm.text("vllm.v1.engine.core")
    assert ".set_xfer_handshake_metadata_pp_aware(" in core
    assert '.engine_id}_dp{dp_rank}"' in core
    assert ".data_parallel_rank_local = " in core
    counting = vllm.text("vllm.distributed.kv_transfer.kv_connector.utils")
    assert "connector.get_finished_count() or world_size" in counting, "every rank of every stage reports"


def test_no_supported_version_stores_layers_across_blocks_unless_asked(vllm: Source) -> None:
    """Older versions asked connectors for `prefer_cross_layer_blocks`; today strides say it all."""
    assert "prefer_cross_layer_blocks" not in vllm.members(BASE, "KVConnectorBase_V1")


def test_the_specs_that_are_served_exist(vllm: Source) -> None:
    assert set(compat._SPECS) <= vllm.names("vllm.v1.kv_cache_interface")


def test_source_that_is_not_there_fails_and_is_not_skipped(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"there is no module vllm\.gone"):
        Source(tmp_path).text("vllm.gone")
