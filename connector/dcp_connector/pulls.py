"""What a pull means on either side: who serves it, and which rows of which pages. No addresses yet, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_connector.bind import bind
from dcp_connector.chunks import Chunk, Entries, locate_layers, plan_chunks, row_bytes
from dcp_connector.errors import PeerError, Reason
from dcp_connector.geometry import PageLayout, SideLayout
from dcp_connector.handshake import page_layout, side_layout
from dcp_connector.mapping import Runs, Source, plan_runs, sources
from dcp_connector.packing import plan_image
from dcp_connector.paths import Fragments, mean_fragments
from dcp_connector.units import LocalHead, cdiv
from dcp_connector.wire import Pull

__all__ = ["LandingPlan", "WritePlan", "plan_landing", "plan_write", "real_fragments", "typical_fragments"]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Everything that is the same for all batches of one pull, on prefill."""

    prefill: SideLayout
    decode: SideLayout
    source: Source
    decode_shard: int
    runs: Runs
    src_table: Sequence[int]
    dst_table: Sequence[int]
    pages: tuple[tuple[PageLayout, PageLayout], ...]
    """(source, destination) of each layer, in the pull's order."""
    src_heads: tuple[LocalHead, ...]
    dst_heads: tuple[LocalHead, ...]

    @property
    def src_pages(self) -> tuple[PageLayout, ...]:
        """The source pages alone."""
        return tuple(source for source, _ in self.pages)

    def chunks(self, chunk_bytes: int) -> tuple[Chunk, ...]:
        """Return the chunks of the scatter path. Raises BindError when one can't hold a row."""
        return plan_chunks(self.runs.total_tokens, row_bytes(self.src_pages, len(self.src_heads)), chunk_bytes)

    def entries(self) -> tuple[Entries, ...]:
        """Return where the rows of each layer are. Raises BindError."""
        runs = self.runs
        return locate_layers(
            "source", runs.src_block, runs.src_row, runs.num_tokens, self.src_table, self.src_pages, self.src_heads
        )


@dataclass(frozen=True, slots=True)
class LandingPlan:
    """Where the chunks of a pull's scatter path go, on decode."""

    chunks: tuple[Chunk, ...]
    entries: tuple[Entries, ...]
    pages: tuple[PageLayout, ...]


def plan_write(
    pull: Pull,
    src_table: Sequence[int],
    pages: Mapping[str, PageLayout],
    prefill: SideLayout,
    tp_rank: int,
    *,
    whole_pages: bool,
) -> WritePlan:
    """Return what prefill rank `tp_rank` with these pages (by name) has to write.

    With `whole_pages` the range is widened to whole blocks of decode. Raises PeerError when the rank can't serve the
    pull, LayoutError when the layouts don't fit.
    """
    decode = side_layout(pull.layout)
    rank = pull.decode_rank % decode.tensor_parallel_size  # within its pipeline stage
    mine = _source(prefill, decode, rank, pull.transfer_id, tp_rank)
    unknown = sorted(pull.pages.keys() - pages.keys())
    if unknown:
        raise PeerError(
            Reason.INCOMPATIBLE,
            f"decode asks for {len(pull.pages)} layers, of which prefill rank {tp_rank} doesn't have {unknown[:4]}",
        )
    shard = decode.shard_of_rank(rank)
    end = pull.end
    if whole_pages:
        end = cdiv(end, decode.virtual_block_size) * decode.virtual_block_size
    return WritePlan(
        prefill=prefill,
        decode=decode,
        source=mine,
        decode_shard=shard,
        runs=plan_runs(prefill, decode, mine.prefill_shard, shard, pull.start, end),
        src_table=src_table,
        dst_table=_table(pull).tolist(),
        pages=tuple((pages[name], page_layout(page, decode)) for name, page in pull.pages.items()),
        src_heads=prefill.local_heads(tp_rank, mine.heads),
        dst_heads=decode.local_heads(rank, mine.heads),
    )


def plan_landing(pull: Pull, prefill: SideLayout, chunk_bytes: int) -> LandingPlan:
    """Return where decode puts the chunks of its own pull. Raises PeerError or LayoutError, like `plan_write`."""
    decode = side_layout(pull.layout)
    rank = pull.decode_rank % decode.tensor_parallel_size
    source = _source(prefill, decode, rank, pull.transfer_id, pull.prefill_rank % prefill.tensor_parallel_size)
    heads = decode.local_heads(rank, source.heads)
    pages = tuple(page_layout(page, decode) for page in pull.pages.values())
    shard = decode.shard_of_rank(rank)
    runs = plan_runs(prefill, decode, source.prefill_shard, shard, pull.start, pull.end)
    return LandingPlan(
        chunks=plan_chunks(runs.total_tokens, row_bytes(pages, len(heads)), chunk_bytes),
        entries=locate_layers("destination", runs.dst_block, runs.dst_row, runs.num_tokens, _table(pull), pages, heads),
        pages=pages,
    )


def typical_fragments(plan: WritePlan) -> Fragments:
    """Return the mean fragments of the first layer for blocks that are never neighbours."""
    shards = plan.source.prefill_shard, plan.decode_shard
    return mean_fragments(plan.prefill, plan.decode, *shards, *plan.pages[0], plan.src_heads, plan.dst_heads)


def real_fragments(plan: WritePlan) -> Fragments:
    """Return the mean fragments of the first layer for the blocks that this request really has."""
    arguments = (plan.runs, plan.src_table, plan.dst_table, *plan.pages[0], plan.src_heads, plan.dst_heads)
    copies, image = bind(*arguments), plan_image(*arguments)
    return Fragments(copies.total_bytes / len(copies), image.num_bytes / len(image.length))


def _source(prefill: SideLayout, decode: SideLayout, decode_rank: int, transfer_id: str, prefill_rank: int) -> Source:
    for source in sources(prefill, decode, decode_rank, transfer_id):
        if source.prefill_rank == prefill_rank:
            return source
    raise PeerError(Reason.INCOMPATIBLE, f"prefill rank {prefill_rank} is no source of rank {decode_rank}")


def _table(pull: Pull) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.frombuffer(pull.block_table, dtype="<i8")
