"""The byte oracle on a device: whole transfers between tensors of torch, through the code that moves device memory.

Run with the engine environment's interpreter, as `python -m tests.gpu.oracle cuda` or `... cpu`. Both sides are the
product's workers in this process. Only the TransferEngine is stood in for, by a copy between addresses: a build of it
that can read device memory is not part of the test environment. On the CPU the same code runs on tensors in host
memory, without a stream.

Prints one line per case and says in words when it did not run.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcp_connector import staging
from dcp_connector.requests_prefill import Hold
from dcp_connector.work import StepWork
from tests.support.kv_oracle import HEAD_MAJOR, TOKEN_MAJOR, Physical, Rank, Sizes
from tests.support.transfer_memory import Engine, MemoryTransport, engine, prompt

PAIRS = {
    "one rank to DCP 2, interleave 1": (Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1)),
    "DCP 2 to DCP 3": (Sizes(2, 2, 4, 16, 1), Sizes(3, 3, 2, 16, 1)),
    "two heads split, then sharded": (Sizes(2, 1, 16, 16, 2), Sizes(4, 2, 1, 16, 2)),
    "four heads on one rank to two ranks": (Sizes(1, 1, 16, 16, 4), Sizes(2, 1, 16, 16, 4)),
}
PHYSICAL = {
    "head-major": HEAD_MAJOR,
    "token-major": TOKEN_MAJOR,
    "padded, cut into kernel blocks": Physical(("block", "layer", "head", "row"), 16, 2),
}
ENDS = (1, 15, 131)


class Arenas:
    """Device memory of ranks, by rank."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._arenas: dict[int, torch.Tensor] = {}

    def tensors(self, rank: Rank) -> dict[str, torch.Tensor]:
        """One view per layer of the rank's arena on the device."""
        arena = self._arenas[id(rank)] = torch.from_numpy(rank.memory.copy()).to(self._device)
        return {
            f"layer.{number}": arena.as_strided(
                (page.num_blocks, page.num_heads, page.kernel_block_size, page.entry_bytes),
                (page.block_stride, page.head_stride, page.row_stride, 1),
                page.base - rank.address,
            )
            for number, page in enumerate(rank.pages)
        }

    def upload(self, rank: Rank) -> None:
        self._arenas[id(rank)].copy_(torch.from_numpy(rank.memory))

    def download(self, rank: Rank) -> np.ndarray:
        return self._arenas[id(rank)].cpu().numpy()


class DeviceTransport(MemoryTransport):
    """Copies between any two addresses that CUDA knows, wherever they lie."""

    def __init__(self) -> None:
        super().__init__()
        loaded = [Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
        runtime = next(path for path in loaded if path.name.startswith(("libcudart", "libamdhip64")))
        library = ctypes.CDLL(str(runtime))
        self._copy = getattr(library, "cudaMemcpy", None) or library.hipMemcpy

    def write(self, segment: str, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> None:
        for source, target, size in zip(src, dst, length, strict=True):
            code = self._copy(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), 4)
            assert code == 0, f"a copy of {size} bytes failed with {code}"


def check(device: str, pair: tuple[Sizes, Sizes], physical: Physical, path: str, where: str) -> None:
    """Move prompts of several lengths and compare every byte of every decode rank."""
    transport = MemoryTransport if device == "cpu" else DeviceTransport
    options: dict[str, Any] = {"physical": physical, "transport": transport, "path": path, "staging_memory": where}
    arenas, (prefill, decode) = Arenas(device), pair
    with (
        engine("kv_producer", prefill, tensors=arenas.tensors, num_blocks=40, **options) as p,
        engine("kv_consumer", decode, tensors=arenas.tensors, num_blocks=40, **options) as d,
    ):
        rng = np.random.default_rng(0)
        for end in ENDS:
            source, target = (
                rng.permutation(40)[: -(-end // (side.b * side.w))].tolist() for side in (prefill, decode)
            )
            _hold(arenas, p, str(end), end, source)
            expected = [arenas.download(rank).copy() for rank in d.ranks]
            d.load(str(end), end, target, p.origin, p.engine_id)
            reasons, _ = d.received(str(end), 60)
            assert reasons == [None] * decode.t, reasons
            for rank, bytes_of_rank in zip(d.ranks, expected, strict=True):
                rank.fill(bytes_of_rank, target, 0, end)
                different = int((arenas.download(rank) != bytes_of_rank).sum())
                assert different == 0, f"{different} bytes of decode rank {rank.rank} are wrong for {end} tokens"
            p.sent(str(end), 60)


def _hold(arenas: Arenas, p: Engine, transfer_id: str, end: int, table: list[int]) -> None:
    for rank in p.ranks:
        rank.fill(rank.memory, table, 0, end)
        arenas.upload(rank)
    p.start(StepWork(holds=[Hold(transfer_id, transfer_id, tuple(table), end, prompt(end), "")]))


def cases(device: str) -> Iterator[tuple[str, str, str, str]]:
    # The direct path doesn't touch staging memory; on a device it still shows that the model's stream is waited for.
    paths = ("pack", "scatter") if device == "cpu" else ("direct", "pack", "scatter")
    yield from product(PAIRS, PHYSICAL, paths, ("device", "host"))


def main(device: str) -> int:
    if device == "cuda" and not torch.cuda.is_available():
        print("the byte oracle did not run on a device: torch finds no CUDA (or ROCm) device on this machine")
        return 0
    if device == "cpu":
        # Host memory is otherwise moved by numpy; here it stands for a device's.
        staging.make_mover = staging.TorchMover
    number = 0
    for number, (pair, physical, path, where) in enumerate(cases(device), 1):  # noqa: B007 - counted for the last line
        check(device, PAIRS[pair], PHYSICAL[physical], path, where)
        print(f"{pair}, {physical}, {path}, staging on {where}: every byte is right", flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"the byte oracle ran on {name}: {number} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
