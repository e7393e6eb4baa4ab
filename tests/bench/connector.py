"""Transfer rates of the connector beside plain TransferEngine writes: `python -m tests.bench.connector`.

Two processes on this machine, TCP, host memory; medians of `REPEATS` runs, all in one pair of processes. The limit is
what large contiguous writes between the same two processes reach. Prefill TP 1 holds a prompt of 8,192 tokens with 16
layers and one KV head of 512 bytes (128 values for K and V each, two bytes): 64 MiB. Decode is TP 2 with DCP 2.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from tests.bench.report import Figure, publish
from tests.support.kv_oracle import Sizes
from tests.support.transfer_pair import Host, Pair, hosts, opened

TOKENS, LAYERS, ENTRY_BYTES, REPEATS = 8192, 16, 512, 5
MIB = 1024 * 1024
#: name, decode side, blocks scattered in memory
CASES = (
    ("interleave 1, block 16", Sizes(2, 2, 1, 16, 1), True),
    ("interleave 8, block 16", Sizes(2, 2, 8, 16, 1), True),
    ("interleave 16 = block", Sizes(2, 2, 16, 16, 1), True),
    ("interleave 1, block 16, neighbouring blocks", Sizes(2, 2, 1, 16, 1), False),
    ("interleave 16 = block, neighbouring blocks", Sizes(2, 2, 16, 16, 1), False),
    ("interleave 1, block 128", Sizes(2, 2, 1, 128, 1), True),
    ("interleave 128 = block", Sizes(2, 2, 128, 128, 1), True),
)


def main() -> int:
    """Measure, print, write the file. Returns 0 when every target was reached."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder)) as both:
        limit = _measure_limit(both, 32 * MIB)
        figures.append(Figure("limit: large contiguous writes", limit, "GB/s"))
        figures += [
            Figure(f"plain writes of {length // 1024} KiB", _measure_limit(both, length), "GB/s", limit)
            for length in (64 * 1024, 8 * 1024)
        ]
        for name, decode, scattered in CASES:
            figures.append(Figure(name, _measure(both, decode, "auto", scattered), "GB/s", limit))
        per_token = _measure(both, Sizes(2, 2, 1, 16, 1), "direct", scattered=True)
        figures.append(Figure("interleave 1, one descriptor per token", per_token, "GB/s", limit))
        packed = next(figure.value for figure in figures if figure.name == CASES[0][0])
        figures.append(Figure("packed over one descriptor per token", packed, "GB/s", per_token, 5.0, "higher"))
    return 0 if publish("connector", figures) else 1


def _pair(decode: Sizes, path: str, scattered: bool) -> Pair:
    return Pair(
        Sizes(1, 1, decode.b, decode.b, 1),
        decode,
        config={"path": path},
        num_blocks=TOKENS // decode.b + 8,
        num_layers=LAYERS,
        entry_bytes=ENTRY_BYTES,
        scattered=scattered,
    )


def _measure_limit(both: tuple[Host, Host], length: int) -> float:
    with opened(both, _pair(Sizes(1, 1, 16, 16, 1), "auto", scattered=True)) as transfers:
        target = {key: transfers.target[key] for key in ("address", "num_bytes", "segment")}
        runs = [transfers.prefill.ask(do="raw", length=length, **target) for _ in range(REPEATS + 1)]
    return statistics.median(run["num_bytes"] / run["seconds"] / 1e9 for run in runs[1:])


def _measure(both: tuple[Host, Host], decode: Sizes, path: str, scattered: bool) -> float:
    rates: list[float] = []
    with opened(both, _pair(decode, path, scattered)) as transfers:
        for number in range(REPEATS + 1):
            transfers.hold(f"bench-{number}", TOKENS, fill=False)
            done = transfers.load(f"bench-{number}", 0, TOKENS, unchecked=True, timeout_s=120)
            if done["received"] != [None] * decode.t:
                raise SystemExit(f"the transfer failed: {done}")
            transfers.sent(f"bench-{number}")
            rates.append(done["stats"]["bytes_received"] / done["seconds"] / 1e9)
    # The first run makes connections and plans.
    return statistics.median(rates[1:])


if __name__ == "__main__":
    sys.exit(main())
