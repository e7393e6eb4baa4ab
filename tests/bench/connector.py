"""Transfer rates of the connector beside plain TransferEngine transfers: `python -m tests.bench.connector`.

Two processes on this machine, TCP, host memory. Prefill has one rank; decode is TP 2 with DCP 2, so each of its ranks
gets half of the tokens. A prompt of 8,192 tokens with 16 layers of 1,024 bytes each (one KV head of 256 values for K
and V, two bytes) is 128 MiB; a page, one layer of one block, is block x 1,024 bytes. A round is timed from the moment
both decode ranks learn of the load until both have reported it, with the handshake of an earlier round cached.

The limit is what writes of 16 MiB each reach between the same two processes, and what a path could reach at most is
what plain writes as long as its descriptors reach. Both are measured again in every round of a case, right before the
transfer, so that other load on the machine meets all three alike; figures are medians over the rounds. The first round
of a case makes connections and plans; it isn't timed, and all bytes of both ranks are compared behind it.

Targets, as a share of the limit: whole blocks 0.8 with pages of 1 MiB, 0.6 from 64 KiB, 0.4 from 16 KiB; interleave 1,
where rows are gathered into pages, 0.4, and ten times one descriptor per token. Small scattered pages can't do better
than plain writes of their size, which is why those stand below each case.

Prints a table, writes build/bench/connector.json, and tells the machine's load on stderr. The bench of planning
(`tests.bench.mapping`) runs first. With `--only TEXT` just the cases whose name contains the text are measured.
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

from tests.bench import mapping
from tests.bench.report import Figure, publish
from tests.support.kv_oracle import Sizes
from tests.support.transfer_pair import Host, Pair, Transfers, hosts, opened

TOKENS, LAYERS, ENTRY_BYTES, ROUNDS = 8192, 16, 1024, 7
KIB = 1024
LARGE, LARGE_TOTAL = 16 * KIB * KIB, 64 * KIB * KIB
#: Plain writes shorter than this are slow, and a part of the memory tells as much.
SMALL, SMALL_TOTAL = 64 * KIB, 32 * KIB * KIB
PER_TOKEN = "interleave 1, block 32, one descriptor per token"


@dataclass(frozen=True)
class Case:
    """One pair of sides, with the share of the limit that it should reach. Blocks lie scattered in memory or not."""

    name: str
    block: int
    interleave: int
    target: float | None
    scattered: bool = True
    path: str = "auto"
    tokens: int = TOKENS
    descriptor_bytes: int | None = None

    @property
    def length(self) -> int:
        """Bytes of the plain writes to compare with: by default a page."""
        return self.descriptor_bytes or self.block * ENTRY_BYTES

    @property
    def pair(self) -> Pair:
        """The two sides, each with just the blocks that the prompt needs, and a few more."""
        blocks = self.tokens // self.block
        return Pair(
            Sizes(1, 1, self.block, self.block, 1),
            Sizes(2, 2, self.interleave, self.block, 1),
            config={"path": self.path},
            num_blocks=blocks + 8,
            num_layers=LAYERS,
            entry_bytes=ENTRY_BYTES,
            decode_facts={"num_blocks": blocks // 2 + 4},
        )


def _cases() -> Iterator[Case]:
    for block, target in ((1024, 0.8), (128, 0.6), (64, 0.6), (32, 0.4), (16, 0.4)):
        yield Case(f"interleave = block {block}", block, block, target)
    for block in (1024, 128, 64, 32, 16):
        yield Case(f"interleave 1, block {block}", block, 1, 0.4)
    yield Case("interleave = block 32, neighbouring blocks", 32, 32, None, scattered=False)
    yield Case("interleave 1, block 32, neighbouring blocks", 32, 1, None, scattered=False)
    yield Case(PER_TOKEN, 32, 1, None, path="direct", tokens=1024, descriptor_bytes=ENTRY_BYTES)


@dataclass(frozen=True)
class Rates:
    """Bytes per second of one case: through the connector, and of plain writes in the same rounds."""

    case: Case
    limit: float
    plain: float
    connector: float

    def figures(self) -> list[Figure]:
        """Return the case beside the limit and beside writes as long as its descriptors."""
        size = f"{self.case.length // KIB} KiB"
        return [
            Figure(self.case.name, self.connector / 1e9, "GB/s", self.limit / 1e9, self.case.target, "higher"),
            Figure(f"  plain writes of {size} then", self.plain / 1e9, "GB/s", self.limit / 1e9),
        ]


def main() -> int:
    """Measure, print, write the file. Returns 0 when every target was reached."""
    parser = argparse.ArgumentParser(prog="tests.bench.connector")
    parser.add_argument("--only", default="", help="measure the cases whose name contains this")
    only = parser.parse_args().only
    cases = [case for case in _cases() if only in case.name]
    if not cases:
        parser.error(f"no case's name contains {only!r}; there are: {'; '.join(case.name for case in _cases())}")
    planned = only or mapping.main() == 0
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder)) as both:
        measured = [_measure(both, case) for case in cases]
        figures = [
            Figure("limit: writes of 16 MiB, all rounds", statistics.median(r.limit for r in measured) / 1e9, "GB/s"),
            *_one_large(both),
        ]
    for rates in measured:
        figures += rates.figures()
    packed = [rates.connector for rates in measured if rates.case.name == "interleave 1, block 32"]
    per_token = [rates.connector for rates in measured if rates.case.name == PER_TOKEN]
    if packed and per_token:
        figures.append(
            Figure("packed over one descriptor per token", packed[0] / 1e9, "GB/s", per_token[0] / 1e9, 10.0, "higher")
        )
    return 0 if publish("connector", figures) and planned else 1


def _measure(both: tuple[Host, Host], case: Case) -> Rates:
    rounds: list[tuple[float, float, float]] = []
    with opened(both, case.pair) as transfers:
        _verified_round(transfers, case)
        for number in range(ROUNDS):
            limit = _plain(transfers, LARGE, LARGE_TOTAL)
            plain = _plain(transfers, case.length, SMALL_TOTAL if case.length <= SMALL else LARGE_TOTAL)
            rounds.append((limit, plain, _transfer(transfers, case, f"round-{number}")[0]))
    rates = Rates(case, *(statistics.median(column) for column in zip(*rounds, strict=True)))
    print(
        f"load {os.getloadavg()[0]:4.1f}  {case.name}: {rates.connector / 1e9:.3f} GB/s of {rates.limit / 1e9:.3f}, "
        f"rounds {min(r[2] for r in rounds) / 1e9:.3f} to {max(r[2] for r in rounds) / 1e9:.3f}",
        file=sys.stderr,
    )
    return rates


def _one_large(both: tuple[Host, Host]) -> list[Figure]:
    """Time one descriptor alone, as a write and as a read: it travels on one connection."""
    case = Case("", 1024, 1024, None)
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


def _transfer(transfers: Transfers, case: Case, transfer_id: str) -> tuple[float, dict[str, list[int]]]:
    """Move one prompt through the connector. Returns its bytes per second and both sides' block tables."""
    rng = np.random.default_rng(zlib.crc32(transfer_id.encode()))
    tables: dict[str, list[int]] = {}
    for name, virtual_block in (("prefill", case.block), ("decode", 2 * case.block)):
        count = case.tokens // virtual_block
        blocks = rng.permutation(count + 4) if case.scattered else np.arange(count)
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
    if done["received"] != [None, None] or done["stats"]["bytes_received"] != expected:
        raise SystemExit(f"bench: {case.name}: the transfer of {expected} bytes failed: {done}")
    transfers.sent(transfer_id)
    return expected / done["seconds"], tables


def _verified_round(transfers: Transfers, case: Case) -> None:
    """Move one prompt into cleared memory and compare every byte of it."""
    transfers.decode.ask(do="clear")
    _, tables = _transfer(transfers, case, "verified")
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
