"""Transfer rates of the connector beside plain TransferEngine transfers: `python -m tests.bench.connector`.

Two processes on this machine, TCP, host memory. Prefill has one rank, or two with DCP 2; decode has two or four, one
for each shard of its DCP. A prompt of 8,192 tokens with 16 layers of 1,024 bytes each (one KV head of 256 values for K
and V, two bytes) is 128 MiB; a page, one layer of one block, is block x 1,024 bytes. A round is timed from the moment
all decode ranks learn of the load until all have reported it, with the handshake of an earlier round cached.

The limit is what writes of 16 MiB each reach between the same two processes, and what a path could reach at most is
what plain writes as long as its descriptors reach. Both are measured again in every round of a case, the limit right
before the transfer and right behind it, so that other load on the machine meets all alike; figures are medians over the
rounds. The first round of a case makes connections and plans; it isn't timed, and all bytes of all ranks are compared
behind it.

Targets, as a share of the limit: whole blocks 0.8 with pages of 1 MiB, 0.6 from 64 KiB, 0.4 from 8 KiB; interleave 1
and prefill with DCP, where rows are gathered, 0.4, and ten times one descriptor per token. Plain writes as long as a
page stand below each case: no path that writes page by page could be faster.

Each case says which path its bytes took, as prefill's ranks counted it.

Planning (`tests.bench.mapping`) and what idle steps cost (`tests.bench.steps`) are measured first. Prints a table,
writes all figures to build/bench/connector.json, and tells the machine's load on stderr. With `--only TEXT` just the
figures whose name contains the text are measured, and the others in the file stay as they are.
"""

import argparse
import os
import statistics
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import mapping, steps
from tests.bench.report import Figure, publish
from tests.support.kv_oracle import Sizes
from tests.support.transfer_pair import Host, Pair, Transfers, hosts, opened

TOKENS, LAYERS, ENTRY_BYTES, ROUNDS = 8192, 16, 1024, 7
KIB = 1024
LARGE, LARGE_TOTAL = 16 * KIB * KIB, 64 * KIB * KIB
#: Plain writes shorter than this are slow, and a part of the memory tells as much.
SMALL, SMALL_TOTAL = 64 * KIB, 32 * KIB * KIB
#: (case, the same by one descriptor per token): the first has to be ten times as fast.
TEN_TIMES = (
    ("interleave 1, block 32", "interleave 1, block 32, one descriptor per token"),
    ("DCP 2 interleave 1 to interleave 32, block 32", "DCP 2 interleave 1 to 32, one descriptor per token"),
)


@dataclass(frozen=True)
class Case:
    """One pair of sides, with the share of the limit that it should reach. Blocks lie scattered in memory or not."""

    name: str
    prefill: Sizes
    decode: Sizes
    target: float | None
    scattered: bool = True
    path: str = "auto"
    tokens: int = TOKENS
    descriptor_bytes: int | None = None

    @property
    def length(self) -> int:
        """Bytes of the plain writes to compare with: by default a page."""
        return self.descriptor_bytes or self.decode.b * ENTRY_BYTES

    @property
    def pair(self) -> Pair:
        """The two sides, each with just the blocks that the prompt needs, and a few more."""
        return Pair(
            self.prefill,
            self.decode,
            config={"path": self.path},
            num_blocks=self.num_blocks(self.prefill),
            num_layers=LAYERS,
            entry_bytes=ENTRY_BYTES,
            decode_facts={"num_blocks": self.num_blocks(self.decode)},
        )

    def num_blocks(self, side: Sizes) -> int:
        """Blocks of a side's cache."""
        return self.tokens // (side.b * side.w) + 4


def _cases() -> Iterator[Case]:
    def one(block: int) -> Sizes:
        return Sizes(1, 1, block, block, 1)

    def two(interleave: int, block: int) -> Sizes:
        return Sizes(2, 2, interleave, block, 1)

    for block, target in ((1024, 0.8), (128, 0.6), (64, 0.6), (32, 0.4), (16, 0.4), (8, 0.4)):
        yield Case(f"interleave = block {block}", one(block), two(block, block), target)
    for block in (1024, 128, 64, 32, 16, 8):
        yield Case(f"interleave 1, block {block}", one(block), two(1, block), 0.4)
    yield Case("interleave = block 32, neighbouring blocks", one(32), two(32, 32), None, scattered=False)
    yield Case("interleave 1, block 32, neighbouring blocks", one(32), two(1, 32), None, scattered=False)
    yield Case(TEN_TIMES[1][0], two(1, 32), two(32, 32), 0.4)
    yield Case("DCP 2 interleave 16 to DCP 4 interleave 1, block 16", two(16, 16), Sizes(4, 4, 1, 16, 1), 0.4)
    per_token: dict[str, Any] = {"path": "direct", "tokens": 1024, "descriptor_bytes": ENTRY_BYTES}
    yield Case(TEN_TIMES[0][1], one(32), two(1, 32), None, **per_token)
    yield Case(TEN_TIMES[1][1], two(1, 32), two(32, 32), None, **per_token)


@dataclass(frozen=True)
class Rates:
    """Bytes per second of one case: through the connector, and of plain writes in the same rounds.

    `path` is what the connector took in those rounds.
    """

    case: Case
    limit: float
    plain: float
    connector: float
    path: str

    def figures(self) -> list[Figure]:
        """Return the case beside the limit and beside writes as long as its descriptors."""
        name, limit = self.case.name, self.limit / 1e9
        return [
            Figure(name, self.connector / 1e9, "GB/s", limit, self.case.target, "higher", self.path),
            Figure(f"{name}: plain writes of {self.case.length // KIB} KiB", self.plain / 1e9, "GB/s", limit),
        ]


def main() -> int:
    """Measure, print, write the file. Returns 0 when every target was reached."""
    parser = argparse.ArgumentParser(prog="tests.bench.connector")
    parser.add_argument("--only", default="", help="measure the figures whose name contains this")
    only = parser.parse_args().only
    cases = [case for case in _cases() if only in case.name]
    figures: list[Figure] = []
    for part in (mapping, steps):
        if any(only in name for name in part.names()):
            figures += [figure for figure in part.measure() if only in figure.name]
    if cases:
        figures += _transfers(cases, whole=not only)
    if not figures:
        known = [*mapping.names(), *steps.names(), *(case.name for case in _cases())]
        parser.error(f"no figure's name contains {only!r}; there are: {'; '.join(known)}")
    return 0 if publish("connector", figures, partial=bool(only)) else 1


def _transfers(cases: list[Case], *, whole: bool) -> list[Figure]:
    """Measure the cases. What is taken over all of them is measured in a whole run only."""
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder)) as both:
        measured = [_measure(both, case) for case in cases]
        limit = statistics.median(rates.limit for rates in measured) / 1e9
        figures = [Figure("limit: writes of 16 MiB, all rounds", limit, "GB/s"), *_one_large(both)] if whole else []
    for rates in measured:
        figures += rates.figures()
    by_name = {rates.case.name: rates for rates in measured}
    for name, per_token in TEN_TIMES:
        if {name, per_token} <= by_name.keys():
            many, one = by_name[name], by_name[per_token]
            label = f"{name}, over one descriptor per token"
            figures.append(Figure(label, many.connector / 1e9, "GB/s", one.connector / 1e9, 10.0, "higher", many.path))
    return figures


def _measure(both: tuple[Host, Host], case: Case) -> Rates:
    rounds: list[tuple[float, float, float]] = []
    paths: set[str] = set()
    with opened(both, case.pair) as transfers:
        _verified_round(transfers, case)
        for number in range(ROUNDS):
            plain = _plain(transfers, case.length, SMALL_TOTAL if case.length <= SMALL else LARGE_TOTAL)
            before = _plain(transfers, LARGE, LARGE_TOTAL)
            rate, _, taken = _transfer(transfers, case, f"round-{number}")
            paths |= taken
            after = _plain(transfers, LARGE, LARGE_TOTAL)
            rounds.append((2 / (1 / before + 1 / after), plain, rate))
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    rates = Rates(case, *medians, path=" and ".join(sorted(paths)))
    print(
        f"load {os.getloadavg()[0]:4.1f}  {case.name}, {rates.path}: "
        f"{rates.connector / 1e9:.3f} GB/s of {rates.limit / 1e9:.3f}, "
        f"rounds {min(r[2] for r in rounds) / 1e9:.3f} to {max(r[2] for r in rounds) / 1e9:.3f}",
        file=sys.stderr,
    )
    return rates


def _one_large(both: tuple[Host, Host]) -> list[Figure]:
    """Time one descriptor alone, as a write and as a read: it travels on one connection."""
    case = next(_cases())
    found: dict[str, list[float]] = {"write": [], "read": []}
    with opened(both, case.pair) as transfers:
        for _ in range(ROUNDS + 1):
            for kind, rates in found.items():
                rates.append(_plain(transfers, LARGE_TOTAL, LARGE_TOTAL, read=kind == "read"))
    return [
        Figure(f"one TransferEngine {kind} of 64 MiB", statistics.median(rates[1:]) / 1e9, "GB/s")
        for kind, rates in found.items()
    ]


def _plain(transfers: Transfers, length: int, total: int, *, read: bool = False) -> float:
    """Bytes per second of plain transfers between prefill's memory and decode rank 0's."""
    target = {key: transfers.target[key] for key in ("address", "segment")}
    num_bytes = min(total, transfers.target["num_bytes"])
    done = transfers.prefill.ask(do="raw", length=min(length, num_bytes), num_bytes=num_bytes, read=read, **target)
    return done["num_bytes"] / done["seconds"]


def _transfer(transfers: Transfers, case: Case, transfer_id: str) -> tuple[float, dict[str, list[int]], set[str]]:
    """Move one prompt through the connector.

    Returns its bytes per second, both sides' block tables, and the paths that prefill's ranks counted.
    """
    rng = np.random.default_rng(zlib.crc32(transfer_id.encode()))
    tables: dict[str, list[int]] = {}
    for name, side in (("prefill", case.prefill), ("decode", case.decode)):
        count = case.tokens // (side.b * side.w)
        blocks = rng.permutation(case.num_blocks(side)) if case.scattered else np.arange(count)
        tables[name] = blocks[:count].tolist()
    known: dict[str, Any] = {"transfer_id": transfer_id}
    transfers.prefill.ask(do="hold", num_tokens=case.tokens, table=tables["prefill"], fill=False, **known)
    done = transfers.decode.ask(
        do="load",
        start=0,
        end=case.tokens,
        table=tables["decode"],
        origin=transfers.peer["origin"],
        engine_id=transfers.peer["engine_id"],
        unchecked=True,
        timeout_s=120,
        **known,
    )
    expected = case.tokens * LAYERS * ENTRY_BYTES
    if done["received"] != [None] * case.decode.t or done["stats"]["bytes_received"] != expected:
        raise SystemExit(f"bench: {case.name}: the transfer of {expected} bytes failed: {done}")
    counted: dict[str, int] = transfers.sent(transfer_id)["stats"].get("paths", {})
    return expected / done["seconds"], tables, set(counted)


def _verified_round(transfers: Transfers, case: Case) -> None:
    """Move one prompt into cleared memory and compare every byte of it."""
    transfers.decode.ask(do="clear")
    _, tables, _ = _transfer(transfers, case, "verified")
    sizes = transfers.pair.prefill
    different = transfers.decode.ask(
        do="verify",
        table=tables["decode"],
        peer_sizes=[sizes.t, sizes.w, sizes.i, sizes.b, sizes.h],
        peer_blocks=transfers.pair.num_blocks,
        peer_table=tables["prefill"],
        end=case.tokens,
    )["different"]
    if any(different):
        raise SystemExit(f"bench: {case.name}: {different} bytes differ on decode's ranks; the rates would say nothing")


if __name__ == "__main__":
    sys.exit(main())
