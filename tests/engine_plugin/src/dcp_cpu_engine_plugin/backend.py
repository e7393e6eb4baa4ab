"""vLLM's view of the plugin: backend, metadata builder and implementation that stand in for CPU_ATTN."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from dcp_cpu_engine_plugin.attention import attend, merge
from dcp_cpu_engine_plugin.cache import read_rows, write_rows
from dcp_cpu_engine_plugin.placement import slots_of
from dcp_cpu_engine_plugin.shards import Shard, shard_of_rank

__all__ = ["RowBackend", "RowImpl", "RowMetadataBuilder"]


@dataclass(frozen=True, slots=True)
class RequestPart:
    """What this rank does for one request in one step."""

    queries: slice  # of the step's tokens
    slots: torch.Tensor  # int64 [num_keys]: where this rank keeps the request's tokens
    visible: torch.Tensor  # bool [num_queries, num_keys]: causal mask


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """One step, the same for every layer."""

    num_actual_tokens: int
    parts: tuple[RequestPart, ...]
    slot_mapping: torch.Tensor  # vLLM reads it by this name


class RowMetadataBuilder(AttentionMetadataBuilder[RowMetadata]):
    """Turns the step's block tables into slots and masks, once for all layers."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        group = get_dcp_group()
        self._shard = Shard(
            world=group.world_size,
            index=shard_of_rank(group.rank_in_group, group.world_size),
            interleave=vllm_config.parallel_config.cp_kv_cache_interleave_size,
            block_size=kv_cache_spec.block_size,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RowMetadata:
        """Build the metadata of one step."""
        step = common_attn_metadata
        starts = step.query_start_loc.tolist()
        lengths = step.seq_lens.tolist()
        parts = tuple(
            self._part(slice(start, end), length, table)
            for start, end, length, table in zip(starts, starts[1:], lengths, step.block_table_tensor, strict=False)
            if end > start
        )
        return RowMetadata(step.num_actual_tokens, parts, step.slot_mapping)

    def _part(self, queries: slice, length: int, block_table: torch.Tensor) -> RequestPart:
        positions = torch.arange(length)
        kept = positions[self._shard.holds(positions)]
        asked = positions[length - (queries.stop - queries.start) :]
        return RequestPart(queries, slots_of(self._shard, kept, block_table), kept <= asked[:, None])


class RowImpl(CPUAttentionBackendImpl):
    """Attention over plain rows, with or without decode context parallelism."""

    # vLLM asks for both before it allows DCP. A connector can take `supports_dcp` as the sign that a token is a row
    # of bytes: stock CPU attention has it False.
    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked = {
            "a sliding window": self.sliding_window != -1,
            "ALiBi": self.alibi_slopes is not None,
            "soft-capped logits": self.logits_soft_cap != 0,
            "attention sinks": self.sinks is not None,
            "a quantised KV cache": self.is_fp8_kv_cache,
            "several KV heads per rank with DCP": self.dcp_world_size > 1 and self.num_kv_heads > 1,
        }
        if refused := [name for name, wanted in asked.items() if wanted]:
            raise NotImplementedError(f"The CPU engine's test plugin has no {', '.join(refused)}: use another model.")

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store the step's keys and values, `[num_tokens, kv_heads, head_dim]` each."""
        num_tokens = min(slot_mapping.numel(), key.shape[0])  # either may be padded
        write_rows(kv_cache, slot_mapping[:num_tokens], key[:num_tokens], value[:num_tokens])

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RowMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill `output` `[num_tokens, heads, head_dim]` from `query` of the same shape and the cache's rows."""
        if attn_metadata is None:  # vLLM's warm-up
            return output
        num_tokens, world = attn_metadata.num_actual_tokens, self.dcp_world_size
        query = query[:num_tokens]
        if world > 1:
            # The ranks of a group hold the same single KV head, and each its own query heads: every rank needs all
            # of them, because it alone holds its tokens.
            query = get_dcp_group().all_gather(query.contiguous(), dim=1)
        out = torch.zeros(query.shape, dtype=torch.float32)
        lse = torch.full(query.shape[:2], float("-inf"))
        for part in attn_metadata.parts:
            keys, values = read_rows(kv_cache, part.slots)
            out[part.queries], lse[part.queries] = attend(query[part.queries], keys, values, part.visible, self.scale)
        if world > 1:
            out = self._merge_over_ranks(out, lse)
        output[:num_tokens] = out.to(output.dtype)
        return output

    def _merge_over_ranks(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Merge the ranks' parts and keep this rank's own query heads."""
        packed = torch.cat((out, lse.unsqueeze(-1)), dim=-1).unsqueeze(0)  # one collective in place of two
        parts = get_dcp_group().all_gather(packed, dim=0)
        own = slice(self.dcp_rank * self.num_heads, (self.dcp_rank + 1) * self.num_heads)
        return merge(parts[:, :, own, :-1], parts[:, :, own, -1])


class RowBackend(CPUAttentionBackend):
    """CPU_ATTN with row-wise cache and DCP. It keeps the name, because it takes the place."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Allow any block of 16 rows or more."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[RowImpl]:
        """Return the implementation."""
        return RowImpl

    @staticmethod
    def get_builder_cls() -> type[RowMetadataBuilder]:
        """Return the metadata builder."""
        return RowMetadataBuilder
