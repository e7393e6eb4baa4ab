"""Proof, before use, that a pair of layouts is mapped without gap or overlap.

For a decode rank and a range of tokens: over all of its sources, each (head, row) that the range puts on the rank is
written exactly once, and what is written there is that token's entry, read from a rank that holds its head and shard.
The proof uses the inverse formula (`SideLayout.token_of`) and counts rows; the plan uses the placement. A mistake in
either shows as a refused peer instead of a wrong cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dcp_connector.geometry import SideLayout
from dcp_connector.mapping import Runs, Source, period, plan_runs, sources
from dcp_connector.pages import ragged_arange
from dcp_connector.units import IntArray, LayoutError

__all__ = ["TilingError", "verify_tiling"]

#: Tokens that a proof covers when the layouts' common period is longer; keeps the handshake within milliseconds.
_MAX_PROOF_TOKENS = 1 << 17

PlanRuns = Callable[[SideLayout, SideLayout, int, int, int, int], Runs]


class TilingError(LayoutError):
    """The mapping of a pair of layouts would lose, repeat or misplace a row. Nothing may be transferred."""


def verify_tiling(
    prefill: SideLayout,
    decode: SideLayout,
    decode_rank: int,
    *,
    transfer_id: str = "",
    token_range: tuple[int, int] | None = None,
    assigned: tuple[Source, ...] | None = None,
    plan: PlanRuns = plan_runs,
) -> None:
    """Raise `TilingError` unless the sources of a decode rank tile its rows, each (head, row) once with its own token.

    By default the range starts one decode block into the sequence and covers two and a half periods, so that it has
    a beginning, whole periods and an end. `assigned` and `plan` default to what a transfer uses.
    """
    if token_range is None:
        start = decode.virtual_block_size
        token_range = start, start + min(period(prefill, decode) * 5 // 2 + 1, _MAX_PROOF_TOKENS)
    if assigned is None:
        assigned = sources(prefill, decode, decode_rank, transfer_id)
    start, end = token_range
    shard = decode.shard_of_rank(decode_rank)
    heads = decode.heads_of_rank(decode_rank)
    first_row, last_row = decode.local_token_count(start, shard), decode.local_token_count(end, shard)
    written = np.zeros((len(heads), last_row - first_row), dtype=np.int64)

    for source in assigned:
        where = f"decode rank {decode_rank}, prefill rank {source.prefill_rank}, tokens [{start}, {end})"
        _check_source(prefill, source, where)
        runs = plan(prefill, decode, source.prefill_shard, shard, start, end)
        src_rows = _expand(runs.src_block, runs.src_row, runs.num_tokens, prefill.block_size, where)
        dst_rows = _expand(runs.dst_block, runs.dst_row, runs.num_tokens, decode.block_size, where)
        if len(dst_rows) and (int(dst_rows.min()) < first_row or int(dst_rows.max()) >= last_row):
            raise TilingError(f"{where}: writes rows outside [{first_row}, {last_row})")
        read, needed = prefill.token_of(source.prefill_shard, src_rows), decode.token_of(shard, dst_rows)
        wrong = np.flatnonzero(read != needed)
        if len(wrong):
            j = int(wrong[0])
            raise TilingError(f"{where}: row {dst_rows[j]} needs token {needed[j]}, would get token {read[j]}")
        for head in source.heads:
            if head not in heads:
                raise TilingError(f"{where}: head {head} isn't one of the decode rank's heads")
            written[heads.index(head)] += np.bincount(dst_rows - first_row, minlength=last_row - first_row)

    for head, row in np.argwhere(written != 1)[:1].tolist():
        raise TilingError(
            f"decode rank {decode_rank}, tokens [{start}, {end}): head {heads[head]}, row {first_row + row} is written "
            f"{written[head, row]} times instead of once"
        )


def _check_source(prefill: SideLayout, source: Source, where: str) -> None:
    if prefill.shard_of_rank(source.prefill_rank) != source.prefill_shard:
        raise TilingError(f"{where}: the prefill rank doesn't hold shard {source.prefill_shard}")
    missing = sorted(set(source.heads) - set(prefill.heads_of_rank(source.prefill_rank)))
    if missing:
        raise TilingError(f"{where}: the prefill rank doesn't hold heads {missing}")


def _expand(blocks: IntArray, rows: IntArray, num_tokens: IntArray, block_size: int, where: str) -> IntArray:
    """Return the rows of all runs, counted over the shard's blocks, having checked that each run stays in its block."""
    if len(rows) and (int(rows.min()) < 0 or int((rows + num_tokens).max()) > block_size or int(num_tokens.min()) < 1):
        raise TilingError(f"{where}: a run leaves the {block_size} rows of its block")
    return ragged_arange(blocks * block_size + rows, num_tokens)
