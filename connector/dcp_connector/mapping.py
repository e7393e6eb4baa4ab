"""Who sends which tokens to whom: pairing of ranks, and runs of rows to copy. No addresses, no I/O.

A decode rank d with heads Hd and shard cd needs, for each h in Hd and each prefill shard cp, the tokens

    { i in [start, end) : shard_P(i) == cp and shard_D(i) == cd }

from one of the ranks that hold (h, cp). Both sides compute the pairing from the handshake alone, so no message
carries it; `tiling.verify_tiling` proves it for a pair of layouts before the first byte moves.

Both placements repeat after `period` = lcm(Bp*Wp, Bd*Wd) tokens, and no run crosses a period's edge because it is a
block edge on both sides. So the runs of one period are kept, and a longer range is that pattern shifted by blocks.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dcp_connector.geometry import GeometryError, SideLayout, Violation
from dcp_connector.units import GlobalHead, IntArray, cdiv

__all__ = [
    "Runs",
    "Source",
    "check_pair",
    "destinations",
    "mean_run",
    "period",
    "plan_runs",
    "shares_tokens",
    "sources",
]


@dataclass(frozen=True, slots=True)
class Source:
    """One prefill rank that supplies a decode rank, with the heads that it supplies (ascending)."""

    prefill_rank: int
    prefill_shard: int
    heads: tuple[GlobalHead, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Rows to copy between one prefill shard and one decode shard: int64 arrays of equal length, one element per run.

    Run j copies rows [src_row, src_row + num_tokens) of one source block to rows [dst_row, dst_row + num_tokens) of one
    destination block, in order. Blocks are indices into the request's block table on that side, rows count within a
    rank's block (0 <= row < B). Runs are in token order. The arrays are read-only because patterns are shared.
    """

    src_block: IntArray
    src_row: IntArray
    dst_block: IntArray
    dst_row: IntArray
    num_tokens: IntArray

    def __post_init__(self) -> None:
        for array in (self.src_block, self.src_row, self.dst_block, self.dst_row, self.num_tokens):
            array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def total_tokens(self) -> int:
        """Tokens over all runs; 0 when the pair shares no token in the range."""
        return int(self.num_tokens.sum())


def check_pair(prefill: SideLayout, decode: SideLayout) -> None:
    """Raise `GeometryError` when the two sides can't exchange KV although each is valid by itself."""
    if prefill.num_kv_heads != decode.num_kv_heads:
        words = (
            f"prefill has {prefill.num_kv_heads} KV heads and decode {decode.num_kv_heads}; "
            "both roles have to serve the same model"
        )
        raise GeometryError((Violation("kv-heads-equal", words),))


def period(prefill: SideLayout, decode: SideLayout) -> int:
    """Return the tokens after which both placements repeat at a block edge: lcm(Bp*Wp, Bd*Wd)."""
    return math.lcm(prefill.virtual_block_size, decode.virtual_block_size)


def sources(prefill: SideLayout, decode: SideLayout, decode_rank: int, transfer_id: str) -> tuple[Source, ...]:
    """Return the prefill ranks that supply a decode rank in this transfer, ascending, each (head, token) by one rank.

    Replicas share the load: the ranks that hold (head, prefill shard) are dealt out in turn to the decode ranks that
    need it, from a starting point that a hash of (transfer, head, shard) chooses. So within one transfer the numbers of
    decode ranks that replicas serve differ by one at most, and over many transfers the extra ones average out.
    A prefill shard that never has a token in common with the decode rank's shard is left out.
    """
    check_pair(prefill, decode)
    decode_shard = decode.shard_of_rank(decode_rank)
    supplied: dict[int, list[GlobalHead]] = {}
    for head in decode.heads_of_rank(decode_rank):
        replica = (decode_rank % decode.ranks_per_head) // decode.dcp_size
        for prefill_shard in range(prefill.dcp_size):
            needing = _decode_shards_needing(prefill, decode, prefill_shard)
            if decode_shard not in needing:
                continue
            turn = replica * len(needing) + needing.index(decode_shard)
            holders = prefill.ranks_holding(head, prefill_shard)
            chosen = holders[(_stable_hash(transfer_id, head, prefill_shard) + turn) % len(holders)]
            supplied.setdefault(chosen, []).append(head)
    return tuple(Source(rank, prefill.shard_of_rank(rank), tuple(heads)) for rank, heads in sorted(supplied.items()))


def destinations(prefill: SideLayout, decode: SideLayout, prefill_rank: int, transfer_id: str) -> tuple[int, ...]:
    """Return the decode ranks that a prefill rank supplies in this transfer, ascending: the inverse of `sources`."""
    held = set(prefill.heads_of_rank(prefill_rank))
    return tuple(
        rank
        for rank in range(decode.tensor_parallel_size)
        if held.intersection(decode.heads_of_rank(rank))
        and any(source.prefill_rank == prefill_rank for source in sources(prefill, decode, rank, transfer_id))
    )


def shares_tokens(prefill: SideLayout, decode: SideLayout, prefill_shard: int, decode_shard: int) -> bool:
    """Tell whether the two shards have any token in common, in a sequence that is long enough.

    Shard c has the tokens whose remainder by S = I*W is in [c*I, (c+1)*I). Tokens with remainders x and y by Sp and Sd
    exist exactly when x - y is a multiple of g = gcd(Sp, Sd), and x - y takes every value of one interval.
    """
    distance = prefill_shard * prefill.interleave - decode_shard * decode.interleave
    lowest, highest = distance - (decode.interleave - 1), distance + (prefill.interleave - 1)
    common = math.gcd(prefill.interleave * prefill.dcp_size, decode.interleave * decode.dcp_size)
    return highest // common * common >= lowest


def plan_runs(
    prefill: SideLayout, decode: SideLayout, prefill_shard: int, decode_shard: int, start: int, end: int
) -> Runs:
    """Return the runs that copy the tokens of [start, end) which lie on both shards, in token order.

    A run ends where the source or destination block ends or where either side's rows stop being consecutive. Token
    numbers need not be consecutive: rows of equal placements run on although their tokens have gaps.
    Cost and memory are linear in the tokens that the pair shares, so bound `end` by the block tables first.
    Raises `ValueError` unless 0 <= start <= end.
    """
    if not 0 <= start <= end:
        raise ValueError(f"token range [{start}, {end}) has to satisfy 0 <= start <= end")
    repeat = period(prefill, decode)
    first, last = cdiv(start, repeat), end // repeat
    if last - first < 2:
        return _plan_tokens(prefill, decode, prefill_shard, decode_shard, start, end)
    return _concatenate(
        [
            _plan_tokens(prefill, decode, prefill_shard, decode_shard, start, first * repeat),
            _shift(
                _plan_period(prefill, decode, prefill_shard, decode_shard),
                np.arange(first, last, dtype=np.int64),
                src_blocks=repeat // prefill.virtual_block_size,
                dst_blocks=repeat // decode.virtual_block_size,
            ),
            _plan_tokens(prefill, decode, prefill_shard, decode_shard, last * repeat, end),
        ]
    )


def mean_run(runs: Runs) -> float:
    """Return the mean length of a run in tokens; 0.0 when there is none."""
    return runs.total_tokens / len(runs) if len(runs) else 0.0


def _stable_hash(transfer_id: str, head: int, shard: int) -> int:
    """Hash the same on every machine and in every process, unlike `hash()`."""
    digest = hashlib.sha256(f"{head}/{shard}/{transfer_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


@lru_cache(maxsize=1024)
def _decode_shards_needing(prefill: SideLayout, decode: SideLayout, prefill_shard: int) -> tuple[int, ...]:
    return tuple(shard for shard in range(decode.dcp_size) if shares_tokens(prefill, decode, prefill_shard, shard))


@lru_cache(maxsize=512)
def _plan_period(prefill: SideLayout, decode: SideLayout, prefill_shard: int, decode_shard: int) -> Runs:
    return _plan_tokens(prefill, decode, prefill_shard, decode_shard, 0, period(prefill, decode))


def _plan_tokens(
    prefill: SideLayout, decode: SideLayout, prefill_shard: int, decode_shard: int, start: int, end: int
) -> Runs:
    """Plan token by token, vectorised."""
    # Enumerate the rows of the side with more shards: fewer tokens of the other side to throw away.
    if decode.dcp_size >= prefill.dcp_size:
        lister, shard, other, other_shard = decode, decode_shard, prefill, prefill_shard
    else:
        lister, shard, other, other_shard = prefill, prefill_shard, decode, decode_shard
    rows = np.arange(lister.local_token_count(start, shard), lister.local_token_count(end, shard), dtype=np.int64)
    tokens = lister.token_of(shard, rows)
    tokens = tokens[other.place(tokens)[1] == other_shard]

    src_block, _, src_row = prefill.place(tokens)
    dst_block, _, dst_row = decode.place(tokens)
    starts_run = np.ones(len(tokens), dtype=np.bool_)
    starts_run[1:] = (
        (np.diff(src_row) != 1) | (np.diff(dst_row) != 1) | (np.diff(src_block) != 0) | (np.diff(dst_block) != 0)
    )
    first = np.flatnonzero(starts_run)
    return Runs(
        src_block=src_block[first],
        src_row=src_row[first],
        dst_block=dst_block[first],
        dst_row=dst_row[first],
        num_tokens=np.diff(first, append=len(tokens)).astype(np.int64),
    )


def _shift(pattern: Runs, periods: IntArray, *, src_blocks: int, dst_blocks: int) -> Runs:
    """Repeat the runs of one period at each of these periods."""
    return Runs(
        src_block=(periods[:, None] * src_blocks + pattern.src_block).ravel(),
        src_row=np.tile(pattern.src_row, len(periods)),
        dst_block=(periods[:, None] * dst_blocks + pattern.dst_block).ravel(),
        dst_row=np.tile(pattern.dst_row, len(periods)),
        num_tokens=np.tile(pattern.num_tokens, len(periods)),
    )


def _concatenate(parts: list[Runs]) -> Runs:
    return Runs(
        src_block=np.concatenate([part.src_block for part in parts]),
        src_row=np.concatenate([part.src_row for part in parts]),
        dst_block=np.concatenate([part.dst_block for part in parts]),
        dst_row=np.concatenate([part.dst_row for part in parts]),
        num_tokens=np.concatenate([part.num_tokens for part in parts]),
    )
