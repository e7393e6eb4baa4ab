"""Slots of tokens: the formula of `shards` applied to block tables."""

import torch

from dcp_cpu_engine_plugin.shards import Shard, shard_of_rank

__all__ = ["compute_slot_mapping", "slots_of"]


def slots_of(shard: Shard, positions: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Return the slots, block * block_size + row, of positions that the shard holds.

    positions: int64 `[n]`; block_table: the request's block ids, `[max_blocks]`.
    """
    return block_table[shard.block(positions)].long() * shard.block_size + shard.row(positions)


# Names and order are those of the Triton kernel that this stands in for (ComputeSlotMappingKernel, vLLM 0.32).
def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,  # noqa: N803 - the kernel's name
    TOTAL_CP_WORLD_SIZE: int = 1,  # noqa: N803
    TOTAL_CP_RANK: int = 0,  # noqa: N803
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,  # noqa: N803
    PAD_ID: int = -1,  # noqa: N803
    BLOCK_SIZE: int = 1024,  # noqa: N803 - Triton's tile, of no use here
) -> None:
    """Fill `slot_mapping` in place: the slot of each scheduled token, PAD_ID where this rank does not keep it.

    query_start_loc: int32 `[num_reqs + 1]`; positions: int64 `[num_tokens]`, place of each token in its request;
    block_table: int32 `[max_reqs, block_table_stride]`; slot_mapping: int64 `[max_num_tokens]`.
    """
    shard = Shard(
        world=TOTAL_CP_WORLD_SIZE,
        index=shard_of_rank(TOTAL_CP_RANK, TOTAL_CP_WORLD_SIZE),
        interleave=CP_KV_CACHE_INTERLEAVE_SIZE,
        block_size=KV_CACHE_BLOCK_SIZE,
    )
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    tables = block_table.view(-1, block_table_stride)
    for request, (start, end) in enumerate(zip(query_start_loc.tolist(), query_start_loc[1:].tolist(), strict=False)):
        of_request = positions[start:end]
        slot_mapping[start:end] = torch.where(
            shard.holds(of_request), slots_of(shard, of_request, tables[request]), PAD_ID
        )
