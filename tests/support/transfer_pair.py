"""Two processes of `transfer_ranks`, one per side, and the commands that a test sends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.command_process import CommandProcess
from tests.support.kv_oracle import HEAD_MAJOR, Physical, Sizes

NUM_LAYERS = 2
ENTRY_BYTES = 16


class Host(CommandProcess):
    """One side's process."""

    def __init__(self, role: str, log: Path) -> None:
        super().__init__("tests.support.transfer_ranks", role, log=log)


@dataclass(frozen=True)
class Pair:
    """One case: two sides and how each keeps its memory."""

    prefill: Sizes
    decode: Sizes
    prefill_physical: Physical = HEAD_MAJOR
    decode_physical: Physical = HEAD_MAJOR
    config: dict[str, Any] = field(default_factory=dict)
    decode_facts: dict[str, Any] = field(default_factory=dict)
    both_facts: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 40
    num_layers: int = NUM_LAYERS
    entry_bytes: int = ENTRY_BYTES
    #: pipeline stages of prefill and of decode
    stages: tuple[int, int] = (1, 1)
    #: bytes of the key in an entry that both sides know to hold a key and a value; 0: an entry can't be cut
    key_bytes: int = 0
    #: blocks in a random order; False: neighbours, as a fresh cache hands them out
    scattered: bool = True


class Transfers:
    """Both sides, opened for one pair."""

    def __init__(self, prefill: Host, decode: Host, pair: Pair, seed: int = 0) -> None:
        self.prefill, self.decode, self.pair = prefill, decode, pair
        self._rng = np.random.default_rng(seed)
        stages, more = pair.stages, pair.decode_facts
        self.peer = prefill.ask(**self._open(pair.prefill, pair.prefill_physical, stages[0], {}))
        self.target = decode.ask(**self._open(pair.decode, pair.decode_physical, stages[1], more))

    def _open(self, sizes: Sizes, physical: Physical, stages: int, facts: dict[str, Any]) -> dict[str, Any]:
        return {
            "do": "open",
            "sizes": [sizes.t, sizes.w, sizes.i, sizes.b, sizes.h],
            "order": physical.order,
            "padding": physical.padding,
            "kernel_blocks_per_block": physical.kernel_blocks_per_block,
            "registered": physical.registered,
            "value_bytes": physical.value_bytes,
            "stages": stages,
            "key_bytes": self.pair.key_bytes,
            "num_blocks": self.pair.num_blocks,
            "num_layers": self.pair.num_layers,
            "entry_bytes": self.pair.entry_bytes,
            "config": self.pair.config,
            **self.pair.both_facts,
            **facts,
        }

    def table(self, sizes: Sizes, num_tokens: int) -> list[int]:
        """Distinct block ids for a sequence."""
        count = -(-num_tokens // (sizes.b * sizes.w))
        if not self.pair.scattered:
            return list(range(1, count + 1))
        return [int(block) for block in self._rng.permutation(self.pair.num_blocks)[:count]]

    def hold(self, transfer_id: str, num_tokens: int, **more: Any) -> None:
        """Prefill has computed a prompt."""
        table = self.table(self.pair.prefill, num_tokens)
        self.prefill.ask(do="hold", transfer_id=transfer_id, num_tokens=num_tokens, table=table, **more)

    def start_load(self, transfer_id: str, start: int, end: int, **more: Any) -> None:
        """Decode begins to fetch; `finish_load` returns what came of it."""
        arguments = {
            "transfer_id": transfer_id,
            "start": start,
            "end": end,
            "table": self.table(self.pair.decode, end),
            "origin": self.peer["origin"],
            "engine_id": self.peer["engine_id"],
            **more,
        }
        self.decode.send(do="load", **arguments)

    def finish_load(self) -> dict[str, Any]:
        return self.decode.answer()

    def load(self, transfer_id: str, start: int, end: int, **more: Any) -> dict[str, Any]:
        self.start_load(transfer_id, start, end, **more)
        return self.finish_load()

    def sent(self, transfer_id: str, **more: Any) -> dict[str, Any]:
        """Wait until all prefill ranks are done with a transfer."""
        return self.prefill.ask(do="sent", transfer_id=transfer_id, **more)

    def close(self) -> None:
        self.decode.ask(do="close")
        self.prefill.ask(do="close")


@contextmanager
def hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Run a process per side for the length of a block."""
    started = [Host(role, folder / f"{role}.log") for role in ("prefill", "decode")]
    try:
        yield started[0], started[1]
    finally:
        for host in started:
            host.stop()


@contextmanager
def opened(both: tuple[Host, Host], pair: Pair) -> Iterator[Transfers]:
    """Open both sides for one pair and close them afterwards."""
    transfers = Transfers(*both, pair)
    try:
        yield transfers
    finally:
        transfers.close()
