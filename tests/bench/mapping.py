"""How long planning takes for one pair of ranks: `python -m tests.bench.mapping`.

32,768 tokens, 60 layers, prefill without DCP to 8 shards with interleave 1: the longest plan that a rank pair meets in
practice. The scatter path is planned on both sides, for prefill with DCP 8 and interleave 16. "Cold" is the first plan
in a process, "cached" a later one of another request with other blocks. Planning is everything up to lists of
addresses. Prints a table and writes build/bench/mapping.json.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from dcp_connector.bind import bind_layers, split_batches
from dcp_connector.chunks import locate_layers, plan_chunks, row_bytes, staged
from dcp_connector.geometry import PageLayout, SideLayout
from dcp_connector.mapping import plan_runs
from dcp_connector.packing import pack_chunks
from dcp_connector.tiling import verify_tiling

TOKENS, LAYERS, REPEATS = 32_768, 60, 7
ENTRY_BYTES, BLOCK, CACHE_BLOCKS = 1152, 16, 20_000
OUTPUT = Path("build/bench/mapping.json")


def _side(dcp_size):
    return SideLayout(tensor_parallel_size=8, dcp_size=dcp_size, interleave=1, block_size=BLOCK, num_kv_heads=1)


def _pages():
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


def _milliseconds(function):
    # Processor time: planning waits for nothing, and other load must not count.
    begin = time.process_time()
    function()
    return (time.process_time() - begin) * 1e3


def main():
    prefill, decode, rng = _side(1), _side(8), np.random.default_rng(0)
    pages = [(page, page) for page in _pages()]

    tables = [rng.permutation(CACHE_BLOCKS)[: side.num_blocks(TOKENS)] for side in (prefill, decode)]

    def direct():
        runs = plan_runs(prefill, decode, 0, 3, 0, TOKENS)
        for _ in split_batches(bind_layers(runs, *tables, pages, [0], [0]), 512, 128 << 20):
            pass

    def pack():
        runs = plan_runs(prefill, decode, 0, 3, 0, TOKENS)
        chunks = pack_chunks(runs, *tables, pages, [0], [0], staging_bytes=64 << 20, max_descriptors=512)
        for _ in chunks:
            pass

    sharded = SideLayout(tensor_parallel_size=8, dcp_size=8, interleave=16, block_size=BLOCK, num_kv_heads=1)
    source_table = rng.permutation(CACHE_BLOCKS)[: sharded.num_blocks(TOKENS)]

    def scatter(side="source"):
        runs = plan_runs(sharded, decode, 2, 3, 0, TOKENS)
        mine = (runs.src_block, runs.src_row) if side == "source" else (runs.dst_block, runs.dst_row)
        table = source_table if side == "source" else tables[1]
        one_side = [page for page, _ in pages]
        entries = locate_layers(side, *mine, runs.num_tokens, table, one_side, [0])
        for chunk in plan_chunks(runs.total_tokens, row_bytes(one_side, 1), 8 << 20):
            staged(chunk, entries)

    def runs_only(num_tokens=TOKENS):
        plan_runs(prefill, decode, 0, 3, 0, num_tokens)

    cold, cold_scatter = _milliseconds(pack), _milliseconds(scatter)

    def median(function, *arguments):
        return statistics.median(_milliseconds(lambda: function(*arguments)) for _ in range(REPEATS))

    cached, eighth = median(pack), median(runs_only, TOKENS * 8)
    rows = [
        _row("pack, cold", cold, 100.0),
        _row("pack, cached", cached, 5.0),
        _row("direct, one descriptor per token, cached", median(direct), 20.0),
        _row("scatter, cold", cold_scatter, 100.0),
        _row("scatter, cached, prefill", median(scatter), 5.0),
        _row("scatter, cached, decode", median(scatter, "destination"), 5.0),
        _row("runs only, 32k tokens", median(runs_only), 5.0),
        _row("runs only, 256k tokens", eighth, 40.0, baseline=8 * median(runs_only)),
        _row("proof at the handshake", median(verify_tiling, prefill, decode, 3), 5.0),
    ]
    for row in rows:
        print(f"{row['name']:45} {row['value']:9.3f} {row['unit']}   target {row['target']:6.1f}   met {row['met']}")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["met"] for row in rows) else 1


def _row(name, value, target, baseline=None):
    ratio = value / baseline if baseline else None
    return {
        "name": f"planning: {name}",
        "value": value,
        "unit": "ms",
        "baseline": baseline,
        "ratio": ratio,
        "target": target,
        "met": value <= target,
    }


if __name__ == "__main__":
    sys.exit(main())
