"""How long planning takes for one pair of ranks: a part of `python -m tests.bench.connector`.

32,768 tokens, 60 layers, prefill without DCP to 8 shards with interleave 1: the longest plan that a rank pair meets in
practice. The scatter path is planned on both sides, for prefill with DCP 8 and interleave 16. "Cold" is the first plan
in a process, "cached" a later one of another request with other blocks. Planning is everything up to lists of
addresses.

Planning has to be linear in the tokens. So each way to plan is timed with four times the tokens too, in turn with the
first and cached like it, and the medians are compared: it may take twice as long as four plans do.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from dcp_connector.bind import bind_layers, split_batches
from dcp_connector.chunks import locate_layers, plan_chunks, row_bytes, staged
from dcp_connector.geometry import PageLayout, SideLayout
from dcp_connector.mapping import plan_runs
from dcp_connector.packing import pack_chunks
from dcp_connector.tiling import verify_tiling
from tests.bench.report import Figure

TOKENS, MORE, LAYERS, REPEATS = 32_768, 4, 60, 9
ENTRY_BYTES, BLOCK, CACHE_BLOCKS = 1152, 16, 20_000
#: What a plan of `MORE` times the tokens may take, as a share of `MORE` plans.
LINEAR = 2.0

#: Figures with their targets in milliseconds: plans that are the first ones, plans that aren't, and what else.
COLD = {"pack, cold": 100.0, "scatter, cold": 100.0}
CACHED = {
    "pack, cached": 5.0,
    "direct, one descriptor per token, cached": 20.0,
    "scatter, cached, prefill": 5.0,
    "scatter, cached, decode": 5.0,
    "runs only, 32k tokens": 5.0,
}
OTHERS = {"runs only, 256k tokens": 40.0, "proof at the handshake": 5.0}

Plan = Callable[[int], None]


def _side(dcp_size: int, interleave: int = 1) -> SideLayout:
    return SideLayout(
        tensor_parallel_size=8, dcp_size=dcp_size, interleave=interleave, block_size=BLOCK, num_kv_heads=1
    )


def _pages() -> list[PageLayout]:
    page_bytes = BLOCK * ENTRY_BYTES
    return [
        PageLayout(
            base=layer * CACHE_BLOCKS * page_bytes,
            num_blocks=CACHE_BLOCKS,
            kernel_block_size=BLOCK,
            block_size=BLOCK,
            num_heads=1,
            block_stride=page_bytes,
            head_stride=page_bytes,
            row_stride=ENTRY_BYTES,
            entry_bytes=ENTRY_BYTES,
        )
        for layer in range(LAYERS)
    ]


def _plans() -> tuple[Plan, Plan, Plan, Plan, Plan]:
    """Return what plans so many tokens: direct, pack, scatter on prefill, scatter on decode, and runs alone."""
    prefill, decode, sharded, rng = _side(1), _side(8), _side(8, 16), np.random.default_rng(0)
    one_side = _pages()
    pages = [(page, page) for page in one_side]
    # Long enough for whatever is planned: a plan reads as much of a table as it needs.
    tables, sharded_table = [rng.permutation(CACHE_BLOCKS) for _ in range(2)], rng.permutation(CACHE_BLOCKS)

    def direct(num_tokens: int) -> None:
        runs = plan_runs(prefill, decode, 0, 3, 0, num_tokens)
        for _ in split_batches(bind_layers(runs, *tables, pages, [0], [0]), 512, 128 << 20):
            pass

    def pack(num_tokens: int) -> None:
        runs = plan_runs(prefill, decode, 0, 3, 0, num_tokens)
        for _ in pack_chunks(runs, *tables, pages, [0], [0], staging_bytes=64 << 20, max_descriptors=512):
            pass

    def scatter(side: str, num_tokens: int) -> None:
        runs = plan_runs(sharded, decode, 2, 3, 0, num_tokens)
        mine = (runs.src_block, runs.src_row) if side == "source" else (runs.dst_block, runs.dst_row)
        table = sharded_table if side == "source" else tables[1]
        entries = locate_layers(side, *mine, runs.num_tokens, table, one_side, [0])
        for chunk in plan_chunks(runs.total_tokens, row_bytes(one_side, 1), 8 << 20):
            staged(chunk, entries)

    def runs_only(num_tokens: int) -> None:
        plan_runs(prefill, decode, 0, 3, 0, num_tokens)

    return (
        direct,
        pack,
        lambda tokens: scatter("source", tokens),
        lambda tokens: scatter("destination", tokens),
        runs_only,
    )


def _milliseconds(work: Callable[[], None]) -> float:
    # Processor time: planning waits for nothing, and other load must not count.
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1e3


def _medians(works: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Return the median time of each, taken in turn so that they share whatever the machine does."""
    rounds = [[_milliseconds(work) for work in works] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def names() -> list[str]:
    """Return the names of the figures."""
    return [*map(_name, COLD), *(name for each in CACHED for name in (_name(each), _more(each))), *map(_name, OTHERS)]


def measure(repeats: int = REPEATS) -> list[Figure]:
    """Return the times of planning and how they grow with the tokens; `repeats` are what a median is taken over."""
    direct, pack, scatter, scattered, runs_only = _plans()
    figures = [
        Figure(_name(name), _milliseconds(lambda plan=plan: plan(TOKENS)), "ms", target=target)
        for (name, target), plan in zip(COLD.items(), (pack, scatter), strict=True)
    ]
    for (name, target), plan in zip(CACHED.items(), (pack, direct, scatter, scattered, runs_only), strict=True):
        plan(TOKENS)
        plan(MORE * TOKENS)
        one, more = _medians((lambda plan=plan: plan(TOKENS), lambda plan=plan: plan(MORE * TOKENS)), repeats)
        figures.append(Figure(_name(name), one, "ms", target=target))
        figures.append(Figure(_more(name), more, "ms", baseline=MORE * one, target=LINEAR))
    works = (lambda: runs_only(8 * TOKENS)), (lambda: verify_tiling(_side(1), _side(8), 3))
    values = _medians(works, repeats)
    return figures + [
        Figure(_name(name), value, "ms", target=target)
        for (name, target), value in zip(OTHERS.items(), values, strict=True)
    ]


def _name(what: str) -> str:
    return f"planning: {what}"


def _more(what: str) -> str:
    return f"{_name(what)}, {MORE} times the tokens"
