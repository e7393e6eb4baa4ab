"""What vLLM's own connectors check of a pair of engines, called as they call it when two engines first meet.

Their checks are methods of workers that hold GPU memory; here they get an object with the attributes that they read.
Lengths of blocks follow from the sizes, as they would be registered: rows x heads of a rank x bytes of one entry.
"""

import types

ENTRY_BYTES = 256


def judge(case):
    """Return why a connector refuses a pair, None if its checks pass.

    A case has `connector`, `geometry`, `prefill` and `decode`; a role has `tensor`, `decode_context` and `block_size`.
    """
    kv_heads = 1 if case["geometry"]["attention"] == "mla" else case["geometry"]["kvHeads"]
    check = {"nixl": _nixl, "mooncake-upstream": _mooncake}[case["connector"]]
    try:
        return check(case["prefill"], case["decode"], case["geometry"]["attention"] == "mla", kv_heads)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error)[:600]}"


def _block_bytes(role, kv_heads):
    return role["block_size"] * max(1, kv_heads // role["tensor"]) * ENTRY_BYTES


def _nixl(prefill, decode, is_mla, kv_heads):
    """Let decode's worker check what prefill's handshake says."""
    from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

    length = _block_bytes(prefill, kv_heads)
    topology = TransferTopology(
        tp_rank=0,
        tp_size=decode["tensor"],
        block_size=decode["block_size"],
        engine_id="decode",
        is_mla=is_mla,
        is_mamba=False,
        total_num_kv_heads=kv_heads,
        attn_backends=[],
        dcp_size=decode["decode_context"],
    )
    topology.register_remote_engine(
        "prefill",
        EngineTransferInfo(
            remote_tp_size=prefill["tensor"],
            remote_block_len=length,
            remote_block_size=prefill["block_size"],
            remote_physical_blocks_per_logical=1,
            remote_dcp_size=prefill["decode_context"],
        ),
    )
    metadata = types.SimpleNamespace(
        engine_id="prefill",
        pcp_size=1,
        dcp_size=prefill["decode_context"],
        block_size=prefill["block_size"],
        physical_blocks_per_logical_kv_block=1,
        kv_cache_layout="LBHNC",
        attn_backend_name="FLASH_ATTN",
        block_lens=[length],
        block_strides=[length],
        num_blocks=1,
        kv_caches_base_addr=[0],
        region_num_blocks=None,
        region_group_ids=None,
        region_names=None,
        region_mem_types=None,
    )
    worker = types.SimpleNamespace(
        transfer_topo=topology,
        pcp_size=1,
        dcp_size=decode["decode_context"],
        use_mla=is_mla,
        use_host_buffer=False,
        kv_cache_layout="LBHNC",
        enable_permute_local_kv=False,
        backend_name="FLASH_ATTN",
        region_group_ids=None,
        block_len_per_layer=[_block_bytes(decode, kv_heads)],
        dst_num_blocks={"prefill": 1},
        _has_mamba=False,
        _is_hma_required=False,
        _physical_blocks_per_logical_kv_block=1,
        _transfer_layer_region_indices=None,
        _transfer_layer_names=None,
        _is_region_replicated=lambda region: False,
        _head_sharded_draft_regions=(),
        _layer_specs={},
        _TRANSFER_MODE="pull",
    )
    NixlBaseConnectorWorker._validate_remote_parallel_config(worker, metadata)
    NixlBaseConnectorWorker._validate_remote_agent_handshake(
        worker, metadata, prefill["tensor"], prefill["decode_context"]
    )


def _mooncake(prefill, decode, is_mla, kv_heads):
    """Let prefill's worker check the regions that decode has sent with its request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as connector

    def region(role):
        length = _block_bytes(role, kv_heads)
        return connector.TransferRegion("layer", 0, base_addr=0, block_len=length, kv_block_len=length)

    connector._get_tp_ratio(prefill["tensor"], decode["tensor"])
    return connector._validate_asymmetric_region_lengths(
        local_regions=[region(prefill)],
        remote_regions=[region(decode)],
        local_tp_size=prefill["tensor"],
        remote_tp_size=decode["tensor"],
        producer_cache_replicated=is_mla or prefill["tensor"] > kv_heads,
        total_num_kv_heads=None if is_mla else kv_heads,
    )
