"""What a transfer between two layouts would look like: who sends which tokens to whom, how, and what would be faster.

It asks the same functions that a transfer does (`mapping`, `paths`, `bind`, `packing`), with pages as vLLM allocates
them: head after head, each with the rows of a block, and with blocks that are never neighbours in memory.

    direct    one fragment per run of bytes that is consecutive on both sides, in each layer
    pack      one fragment per run of bytes that is consecutive on decode, in each layer
    scatter   chunks of up to `paths.CHUNK_BYTES`, over all layers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dcp_connector.bind import bind
from dcp_connector.geometry import PageLayout, SideLayout
from dcp_connector.mapping import Runs, check_pair, plan_runs, sources
from dcp_connector.packing import plan_image
from dcp_connector.pages import ragged_arange
from dcp_connector.paths import CHUNK_BYTES, Fragments, Path, Transport, choose_path, mean_fragments
from dcp_connector.units import KIB, MIB, GlobalHead, IntArray, LocalHead, cdiv

__all__ = ["Delivery", "Forecast", "Hint", "Question", "faster", "forecast"]

#: Times that a byte is copied on the hosts on its way, besides the transfer itself.
_COPIES: dict[Path, int] = {"direct": 0, "pack": 1, "scatter": 2}
#: A change that leaves the path as it is has to divide the fragments by this to be worth a hint.
_MIN_GAIN = 2
#: Block sizes that are tried. Larger ones hold memory that short sequences don't use.
_BLOCK_SIZES = (64, 128)
#: Whole-page writes of this size reach the transport's rate, so nothing is left to gain.
_LARGE_BYTES: dict[Transport, int] = {"tcp": MIB, "rdma": 64 * KIB}


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of `num_tokens`, none of which decode has, between two sides of one model.

    `entry_bytes` are those of one (token, head) in one layer: key and value together, or MLA's one vector.
    """

    prefill: SideLayout
    decode: SideLayout
    num_tokens: int
    entry_bytes: int
    num_layers: int
    transport: Transport


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one prefill rank sends one decode rank: `num_tokens` of each of `heads`, over all layers.

    `ranges` are the first of its token ranges, each [first, last], and `num_ranges` all of them. `num_fragments` are
    what the TransferEngine is given.
    """

    prefill_rank: int
    decode_rank: int
    heads: tuple[GlobalHead, ...]
    num_tokens: int
    num_ranges: int
    ranges: tuple[tuple[int, int], ...]
    path: Path
    num_bytes: int
    num_fragments: int

    @property
    def fragment_bytes(self) -> float:
        """Mean size of a fragment."""
        return self.num_bytes / self.num_fragments


@dataclass(frozen=True, slots=True)
class Forecast:
    """All deliveries of a transfer, by decode rank. Prefill ranks that send nothing are replicas, or have no token."""

    question: Question
    deliveries: tuple[Delivery, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return sum(delivery.num_bytes for delivery in self.deliveries)

    @property
    def num_fragments(self) -> int:
        """Fragments in all."""
        return sum(delivery.num_fragments for delivery in self.deliveries)

    @property
    def paths(self) -> dict[Path, int]:
        """Rank pairs by the path that they take, the most frequent first."""
        counts: Counter[Path] = Counter(delivery.path for delivery in self.deliveries)
        return dict(counts.most_common())

    @property
    def idle_prefill_ranks(self) -> tuple[int, ...]:
        """Prefill ranks that send nothing in this transfer."""
        busy = {delivery.prefill_rank for delivery in self.deliveries}
        return tuple(rank for rank in range(self.question.prefill.tensor_parallel_size) if rank not in busy)

    @property
    def copies(self) -> float:
        """Times that a byte is copied on the hosts on average."""
        return sum(_COPIES[each.path] * each.num_bytes for each in self.deliveries) / max(1, self.num_bytes)


@dataclass(frozen=True, slots=True)
class Hint:
    """A change of settings that makes the transfer faster: (side, setting, value) each, and what comes of it."""

    changes: tuple[tuple[str, str, int], ...]
    result: Forecast


def forecast(question: Question, transfer_id: str = "") -> Forecast:
    """Return what would be sent. Which of several replicas sends depends on the transfer's id.

    Raises GeometryError when the two sides can't exchange KV.
    """
    check_pair(question.prefill, question.decode)
    deliveries: list[Delivery] = []
    for decode_rank in range(question.decode.tensor_parallel_size):
        shard = question.decode.shard_of_rank(decode_rank)
        for source in sources(question.prefill, question.decode, decode_rank, transfer_id):
            src_heads = question.prefill.local_heads(source.prefill_rank, source.heads)
            dst_heads = question.decode.local_heads(decode_rank, source.heads)
            amount = _amount(question, source.prefill_shard, shard, src_heads, dst_heads)
            if amount is not None:
                tokens, path, num_bytes, num_fragments = amount
                deliveries.append(
                    Delivery(
                        source.prefill_rank,
                        decode_rank,
                        source.heads,
                        tokens.num_tokens,
                        tokens.num_ranges,
                        tokens.first,
                        path,
                        num_bytes,
                        num_fragments,
                    )
                )
    return Forecast(question, tuple(deliveries))


def faster(now: Forecast, limit: int = 3) -> tuple[Hint, ...]:
    """Return changes that save copies or fragments, the simplest first, each with what it would bring.

    A change counts if it saves copies on the hosts, or divides the fragments by two at least; a later one only if it
    brings more than those before it. Nothing is left to gain once large fragments go straight from page to page.
    """
    hints: list[Hint] = []
    best = now
    for changes in _changes(now.question):
        if len(hints) == limit or _is_at_full_rate(best):
            break
        changed = _apply(now.question, changes)
        if changed is not None and _is_faster(result := forecast(changed), best):
            hints.append(Hint(changes, result))
            best = result
    return tuple(hints)


def _is_at_full_rate(now: Forecast) -> bool:
    large = now.num_bytes >= _LARGE_BYTES[now.question.transport] * now.num_fragments
    return now.copies == 0 and (large or not now.deliveries)


def _is_faster(new: Forecast, old: Forecast) -> bool:
    if new.copies != old.copies:
        return new.copies < old.copies
    return new.num_fragments * _MIN_GAIN <= old.num_fragments


_Changes = tuple[tuple[str, str, int], ...]


def _changes(question: Question) -> Iterator[_Changes]:
    """Yield the changes that are tried: one setting first, then the block sizes of both sides, then prefill's DCP."""
    sides = {"decode": question.decode, "prefill": question.prefill}
    sharded = [name for name, side in sides.items() if side.dcp_size > 1 and side.interleave != side.block_size]
    for name in sharded:
        yield ((name, "interleave", sides[name].block_size),)
    if len(sharded) == 2:
        yield tuple((name, "interleave", sides[name].block_size) for name in sharded)
    smallest = min(side.block_size for side in sides.values())
    for size in _BLOCK_SIZES:
        if size > smallest:
            grown = [name for name, side in sides.items() if side.block_size != size]
            blocks = tuple((name, "block", size) for name in grown)
            yield (*blocks, *((name, "interleave", size) for name, side in sides.items() if side.dcp_size > 1))
    if question.prefill.dcp_size > 1:
        yield (("prefill", "dcp", 1),)


def _apply(question: Question, changes: _Changes) -> Question | None:
    """Return the question with other settings, or None where a side would be invalid."""
    names = {"interleave": "interleave", "block": "block_size", "dcp": "dcp_size"}
    settings: dict[str, dict[str, int]] = {"prefill": {}, "decode": {}}
    for side, setting, value in changes:
        settings[side][names[setting]] = value
    try:
        return replace(
            question,
            prefill=replace(question.prefill, **settings["prefill"]),
            decode=replace(question.decode, **settings["decode"]),
        )
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a pair of shards: how many, in how many ranges, and the first of these."""

    num_tokens: int
    num_ranges: int
    first: tuple[tuple[int, int], ...]


#: Ranges that are kept for people to see.
_SHOWN_RANGES = 8


@lru_cache(maxsize=4096)
def _amount(
    question: Question,
    prefill_shard: int,
    decode_shard: int,
    src_heads: tuple[LocalHead, ...],
    dst_heads: tuple[LocalHead, ...],
) -> tuple[_Tokens, Path, int, int] | None:
    """Return (tokens, path, bytes, fragments) of one pair of ranks, or None when no token goes that way."""
    prefill, decode, end = question.prefill, question.decode, question.num_tokens
    runs = plan_runs(prefill, decode, prefill_shard, decode_shard, 0, end)
    if not len(runs):
        return None
    pages = _page(prefill, question.entry_bytes), _page(decode, question.entry_bytes)
    tables = _table(prefill, end), _table(decode, end)
    direct = bind(runs, *tables, *pages, src_heads, dst_heads)
    image = plan_image(runs, *tables, *pages, src_heads, dst_heads)
    typical = mean_fragments(prefill, decode, prefill_shard, decode_shard, *pages, src_heads, dst_heads)
    path = choose_path(typical, question.transport)
    if path != "pack":
        real = Fragments(direct.total_bytes / len(direct), image.num_bytes / len(image.length))
        path = choose_path(real, question.transport)
    num_bytes = direct.total_bytes * question.num_layers
    match path:
        case "direct":
            num_fragments = len(direct) * question.num_layers
        case "pack":
            num_fragments = len(image.length) * question.num_layers
        case "scatter":
            num_fragments = cdiv(num_bytes, CHUNK_BYTES[question.transport])
    return _tokens(prefill, prefill_shard, runs), path, num_bytes, num_fragments


def _tokens(prefill: SideLayout, prefill_shard: int, runs: Runs) -> _Tokens:
    rows = np.repeat(runs.src_block * prefill.block_size + runs.src_row, runs.num_tokens)
    tokens = prefill.token_of(prefill_shard, rows + ragged_arange(np.zeros_like(runs.num_tokens), runs.num_tokens))
    begins = np.flatnonzero(np.diff(tokens, prepend=-2) != 1)
    lasts = np.append(begins[1:], len(tokens)) - 1
    shown = zip(tokens[begins[:_SHOWN_RANGES]].tolist(), tokens[lasts[:_SHOWN_RANGES]].tolist(), strict=True)
    return _Tokens(len(tokens), len(begins), tuple(shown))


def _page(side: SideLayout, entry_bytes: int) -> PageLayout:
    """Return a layer's page of one rank: [block, head, row, entry], with two blocks, see `_table`."""
    head_bytes = side.block_size * entry_bytes
    return PageLayout(
        base=0,
        num_blocks=3,
        kernel_block_size=side.block_size,
        block_size=side.block_size,
        num_heads=side.heads_per_rank,
        block_stride=side.heads_per_rank * head_bytes,
        head_stride=head_bytes,
        row_stride=entry_bytes,
        entry_bytes=entry_bytes,
    )


def _table(side: SideLayout, num_tokens: int) -> IntArray:
    """Return block ids 0, 2, 0, 2, ...: no block is followed by its neighbour."""
    return np.arange(side.num_blocks(num_tokens), dtype=np.int64) % 2 * 2
