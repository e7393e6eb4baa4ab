"""A whole transfer in simulated memory: every rank of both sides, moved by the product's plans, applied as memcpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_connector.bind import bind_layers, split_batches
from dcp_connector.chunks import locate_layers, plan_chunks, row_bytes, staged
from dcp_connector.geometry import PageLayout
from dcp_connector.mapping import plan_runs, sources
from dcp_connector.packing import pack_chunks
from dcp_connector.page_sets import halves
from tests.support.kv_oracle import HEAD_MAJOR, Physical, Rank, Sizes


@dataclass(frozen=True)
class Case:
    """One transfer: two sides, their memory layouts, a token range and a path."""

    prefill: Sizes
    decode: Sizes
    start: int
    end: int
    prefill_physical: Physical = HEAD_MAJOR
    decode_physical: Physical = HEAD_MAJOR
    path: str = "direct"
    num_layers: int = 2
    entry_bytes: int = 4
    staging_bytes: int = 200
    max_descriptors: int = 5
    seed: int = 0


def check_bytes(case: Case) -> int:
    """Run the case and compare every byte of every decode rank; return the number of descriptors that it took."""
    rng = np.random.default_rng(case.seed)
    prefill, decode = case.prefill.layout(), case.decode.layout()
    src_table = _table(rng, prefill.num_blocks(case.end))
    dst_table = _table(rng, decode.num_blocks(case.end))
    senders = [_rank(case, case.prefill, r, src_table, case.prefill_physical) for r in range(case.prefill.t)]
    receivers = [_rank(case, case.decode, r, dst_table, case.decode_physical) for r in range(case.decode.t)]
    for sender in senders:
        sender.fill(sender.memory, src_table, 0, case.end)
    before = [sender.memory.copy() for sender in senders]

    num_descriptors = 0
    for receiver in receivers:
        expected = receiver.memory.copy()
        receiver.fill(expected, dst_table, case.start, case.end)
        for source in sources(prefill, decode, receiver.rank, "transfer"):
            num_descriptors += _move(case, senders[source.prefill_rank], receiver, source, (src_table, dst_table))
        np.testing.assert_array_equal(receiver.memory, expected)
    for sender, memory in zip(senders, before, strict=True):
        np.testing.assert_array_equal(sender.memory, memory)
    return num_descriptors


def _table(rng: np.random.Generator, num_blocks: int) -> list[int]:
    """Return a block table in random order, in a cache with blocks of others and a look-ahead block at the end."""
    return rng.permutation(num_blocks * 2 + 3)[: num_blocks + 1].tolist()


def _rank(case: Case, sizes: Sizes, rank: int, table: list[int], physical: Physical) -> Rank:
    return Rank(
        sizes=sizes,
        rank=rank,
        address=1000 * (rank + 1),
        num_blocks=max(table) + 2,
        num_layers=case.num_layers,
        entry_bytes=case.entry_bytes,
        physical=physical,
    )


def _move(case: Case, sender: Rank, receiver: Rank, source, tables: tuple[list[int], list[int]]) -> int:
    prefill, decode = case.prefill.layout(), case.decode.layout()
    shard = decode.shard_of_rank(receiver.rank)
    runs = plan_runs(prefill, decode, source.prefill_shard, shard, case.start, case.end)
    pages = list(zip(*alike(sender, receiver), strict=True))
    heads = prefill.local_heads(sender.rank, source.heads), decode.local_heads(receiver.rank, source.heads)
    if case.path == "direct":
        copies = bind_layers(runs, *tables, pages, *heads)
        return sum(_apply(batch, case, sender, receiver) for batch in split_batches(copies, case.max_descriptors, 64))
    if case.path == "scatter":
        return _scatter(case, (sender, receiver), runs, tables, heads)
    chunks = pack_chunks(
        runs, *tables, pages, *heads, staging_bytes=case.staging_bytes, max_descriptors=case.max_descriptors
    )
    return sum(_deliver(chunk, case, sender, receiver) for chunk in chunks)


def _scatter(case: Case, ranks: tuple[Rank, Rank], runs, tables, heads) -> int:
    """Move every chunk through one slot of memory. Each side plans from what it knows itself: no address is shared."""
    sender, receiver = ranks
    src_pages, dst_pages = alike(sender, receiver)
    slot_bytes = max(case.staging_bytes, len(heads[0]) * case.entry_bytes)
    chunks = plan_chunks(runs.total_tokens, row_bytes(src_pages, len(heads[0])), slot_bytes)
    assert chunks == plan_chunks(runs.total_tokens, row_bytes(dst_pages, len(heads[1])), slot_bytes)
    source = locate_layers("source", runs.src_block, runs.src_row, runs.num_tokens, tables[0], src_pages, heads[0])
    destination = locate_layers(
        "destination", runs.dst_block, runs.dst_row, runs.num_tokens, tables[1], dst_pages, heads[1]
    )
    for chunk in chunks:
        assert 0 < chunk.num_bytes <= slot_bytes
        slot = np.full(slot_bytes, 255, dtype=np.uint8)
        filled = np.zeros(slot_bytes, dtype=np.int64)
        for item in staged(chunk, source):
            for number, place in enumerate(_units(item, sender, src_pages)):
                begin = item.staging_offset + number * item.unit_bytes
                slot[begin : begin + item.unit_bytes] = place
                filled[begin : begin + item.unit_bytes] += 1
        assert (filled[: chunk.num_bytes] == 1).all(), "a byte of the chunk is missing or written twice"
        for item in staged(chunk, destination):
            for number, place in enumerate(_units(item, receiver, dst_pages)):
                begin = item.staging_offset + number * item.unit_bytes
                place[:] = slot[begin : begin + item.unit_bytes]
    return len(chunks)


def _units(item, rank: Rank, pages: list[PageLayout]) -> list[np.ndarray]:
    """Return the memory of each unit, in order."""
    base = pages[item.layer].base
    return [rank.at(base + unit * item.unit_bytes, item.unit_bytes) for unit in item.units.tolist()]


def alike(sender: Rank, receiver: Rank) -> tuple[list[PageLayout], list[PageLayout]]:
    """Return both sides' pages in the same pieces: where only one keeps keys and values apart, the other is cut."""
    if sender.physical.parts == receiver.physical.parts:
        return sender.pages, receiver.pages
    return tuple(
        [half for page in rank.pages for half in halves("layer", page, rank.entry_bytes // 2).values()]
        if rank.physical.parts == 1
        else rank.pages
        for rank in (sender, receiver)
    )


def _apply(batch, case: Case, sender: Rank, receiver: Rank) -> int:
    assert 0 < len(batch) <= case.max_descriptors
    assert batch.total_bytes <= 64
    for src, dst, length in zip(batch.src.tolist(), batch.dst.tolist(), batch.length.tolist(), strict=True):
        receiver.at(dst, length)[:] = sender.at(src, length)
    return len(batch)


def _deliver(chunk, case: Case, sender: Rank, receiver: Rank) -> int:
    assert 0 < len(chunk.length) <= case.max_descriptors
    assert chunk.num_bytes <= case.staging_bytes
    staging = np.full(case.staging_bytes, 255, dtype=np.uint8)
    for gather in chunk.gathers:
        page = alike(sender, receiver)[0][gather.layer]
        view = sender.at(page.base, page.span_bytes).reshape(-1, gather.unit_bytes)
        size = len(gather.units) * gather.unit_bytes
        staging[gather.staging_offset : gather.staging_offset + size] = view[gather.units].ravel()
    assert int(chunk.length.sum()) == chunk.num_bytes
    for offset, dst, length in zip(
        chunk.staging_offset.tolist(), chunk.dst.tolist(), chunk.length.tolist(), strict=True
    ):
        receiver.at(dst, length)[:] = staging[offset : offset + length]
    return len(chunk.length)
