"""One side of a transfer as a process: the product's worker code on plain tensors, without vLLM.

Run with the engine environment's interpreter, as `python -m tests.support.transfer_ranks prefill|decode`. It reads one
JSON command per line and answers each with one JSON line that has "ok", or "error" with a traceback:

    {"do": "open", "sizes": [T, W, I, B, H], ...}  make every rank: memory, TransferEngine, threads; prefill also serves
                                                   its topology. Prefill answers {"origin", "engine_id"}
    {"do": "hold", ...}                            prefill: a prompt is computed (its entries are filled in)
    {"do": "load", ...}                            decode: fetch it, compare every byte, answer outcomes and differences
    {"do": "clear"}, {"do": "verify", ...}         decode: the same comparison for transfers too large for that one
    {"do": "raw", ...}                             prefill: time plain writes or reads, without the connector
    {"do": "close"}                                stop all ranks
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from dcp_connector.bootstrap import BootstrapServer
from dcp_connector.config import ConnectorConfig
from dcp_connector.errors import Reason
from dcp_connector.geometry import PageLayout
from dcp_connector.handshake import SideFacts, assemble, wire_layout
from dcp_connector.pipe import Wire
from dcp_connector.requests_decode import Load
from dcp_connector.requests_prefill import Hold
from dcp_connector.stats import Counters, merge
from dcp_connector.transfer import MooncakeTransport
from dcp_connector.wire import token_digest
from dcp_connector.work import StepWork
from dcp_connector.worker import WorkerSide
from tests.support.kv_oracle import Physical, Rank, Sizes
from tests.support.transfer_arena import differing_bytes, prefill_arenas

HOST = "127.0.0.1"
#: The logical dimensions of what is registered, by `Physical.registered`: blocks, heads, rows, entry, key or value.
REGISTERED = {
    "heads first": "bhnc",
    "one head": "bnc",
    "kv first": "2bnhc",
    "kv second": "b2nhc",
    "kv first, one head": "2bnc",
    "two tensors": "bhnc",
}
SECRET = b"the secret of the byte tests"


class PooledTransport(MooncakeTransport):
    """A TransferEngine that outlives its side, since making one costs little and ending one a second.

    The ending would happen in whatever thread collects garbage, and hold that one up.
    """

    idle: ClassVar[list[PooledTransport]] = []

    def __init__(self) -> None:
        super().__init__(HOST, "tcp", "")
        self._registered: list[int] = []

    @classmethod
    def take(cls) -> PooledTransport:
        return cls.idle.pop() if cls.idle else cls()

    def register(self, address: int, num_bytes: int) -> None:
        super().register(address, num_bytes)
        self._registered.append(address)

    def give_back(self) -> None:
        """Forget the side's memory, so that a late write into it is refused."""
        for address in self._registered:
            assert self._engine.unregister_memory(address) == 0
        self._registered.clear()
        self.idle.append(self)


@dataclass
class Side:
    """All ranks of one engine in this process."""

    role: str
    sizes: Sizes
    engine_id: str
    ranks: list[Rank] = field(default_factory=list)
    workers: list[WorkerSide] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    bootstrap: BootstrapServer | None = None

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
            if isinstance(worker._transport, PooledTransport):
                worker._transport.give_back()
        if self.bootstrap:
            self.bootstrap.close()

    def stats(self) -> dict[str, Any]:
        total: dict[str, Any] = {}
        for counters in self.counters:
            total = merge(total, counters.take() or {})
        return total


def tensors_of(rank: Rank) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
    """The rank's arena as an attention backend would have it registered: views of one allocation, a layer or two."""
    arena, form = torch.from_numpy(rank.memory), rank.physical.registered
    found: dict[str, torch.Tensor | tuple[torch.Tensor, ...]] = {}
    parts = rank.physical.parts
    for number in range(rank.num_layers):
        pages = rank.pages[number * parts :][: 2 if form == "two tensors" else 1]
        found[f"layer.{rank.first_layer + number}"] = _views(rank, arena, pages)
    return found


def _views(rank: Rank, arena: torch.Tensor, pages: list[PageLayout]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """One tensor, or one of keys and one of values."""
    order = REGISTERED[rank.physical.registered]
    assert ("2" in order or len(pages) == 2) == (rank.physical.parts == 2)
    views: list[torch.Tensor] = []
    for page in pages:
        sizes = {"b": page.num_blocks, "h": page.num_heads, "n": page.kernel_block_size, "c": page.entry_bytes}
        strides = {"b": page.block_stride, "h": page.head_stride, "n": page.row_stride, "c": 1}
        sizes["2"], strides["2"] = 2, rank.strides.get("kv", 0)
        shape, stride = [sizes[d] for d in order], [strides[d] for d in order]
        views.append(arena.as_strided(shape, stride, page.base - rank.address))
    return tuple(views) if len(views) == 2 else views[0]


def open_side(role: str, command: dict[str, Any]) -> tuple[Side, dict[str, Any]]:
    sizes = Sizes(*command["sizes"])
    physical = Physical(
        tuple(command["order"]),
        command["padding"],
        command["kernel_blocks_per_block"],
        command["registered"],
        command["value_bytes"],
    )
    stages, num_layers, entry_bytes = command["stages"], command["num_layers"], command["entry_bytes"]
    config = ConnectorConfig(mooncake_protocol="tcp", **command["config"])
    side = Side(role, sizes, f"{role}-{uuid.uuid4().hex[:8]}")
    facts = SideFacts(
        engine_id=side.engine_id,
        role=f"kv_{'producer' if role == 'prefill' else 'consumer'}",
        model_hash=command.get("model_hash", "same"),
        model="tiny",
        kv_dtype="uint8",
        page_format=command.get("page_format", "rows"),
        layout=wire_layout(sizes.layout()),
        pipeline_parallel_size=stages,
        key_bytes=command.get("key_bytes", 0),
    )
    for index in range(stages * sizes.t):
        stage, number = divmod(index, sizes.t)
        first, end = stage * num_layers // stages, (stage + 1) * num_layers // stages
        rank = Rank(sizes, number, 0, command["num_blocks"], end - first, entry_bytes, physical, first)
        counters = Counters()
        worker = WorkerSide(
            host=HOST,
            tp_rank=number,
            pp_rank=stage,
            num_blocks=command["num_blocks"],
            read_facts=lambda _names: facts,
            open_transport=PooledTransport.take,
            config=config,
            secret=SECRET,
            counters=counters,
        )
        worker.register(tensors_of(rank))
        side.ranks.append(rank)
        side.workers.append(worker)
        side.counters.append(counters)
    if role == "decode":
        memory, transport = side.ranks[0].memory, side.workers[0]._transport
        return side, {"address": int(memory.ctypes.data), "num_bytes": memory.nbytes, "segment": transport.segment}
    side.bootstrap = BootstrapServer(0, 1, SECRET, serves_query=True)
    side.bootstrap.publish(assemble(uuid.uuid4().hex, [worker.facts for worker in side.workers]))
    return side, {"origin": f"http://{HOST}:{side.bootstrap.port}", "engine_id": side.engine_id}


def prompt(num_tokens: int, seed: int = 0) -> bytes:
    return np.arange(seed, seed + num_tokens, dtype="<i4").tobytes()


def hold(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    work = StepWork(
        holds=[
            Hold(
                request_id=command["transfer_id"],
                transfer_id=command["transfer_id"],
                block_ids=tuple(command["table"]),
                num_tokens=command["num_tokens"],
                tokens=prompt(command["num_tokens"], command.get("seed", 0)),
                adapter="",
            )
        ]
    )
    for rank, worker in zip(side.ranks, side.workers, strict=True):
        if command.get("fill", True):
            rank.fill(rank.memory, command["table"], 0, command["num_tokens"])
        worker.start(work)
    return {}


def drop(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    for worker in side.workers:
        worker.start(StepWork(drops=[(command["transfer_id"], Reason.PREFILL_ABORTED)]))
    return {}


def sent(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    """Wait until every rank has given the request's blocks back; answer with each rank's reason."""
    request_id, found = command["transfer_id"], {}
    deadline = time.monotonic() + command.get("timeout_s", 20)
    while len(found) < len(side.workers) and time.monotonic() < deadline:
        for number, worker in enumerate(side.workers):
            ids, _ = worker.finished()
            if ids:
                assert number not in found, f"rank {number} reported twice"
                assert ids == {request_id}
                found[number] = worker.take_report().sent[request_id]
        time.sleep(0.002)
    return {"sent": [found.get(number, "never") for number in range(len(side.workers))], "stats": side.stats()}


def load(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    request_id, start, end = command["transfer_id"], command["start"], command["end"]
    work = StepWork(
        loads=[
            Load(
                request_id=request_id,
                transfer_id=command["transfer_id"],
                bootstrap_addr=command["origin"],
                engine_id=command["engine_id"],
                block_ids=tuple(command["table"]),
                start=start,
                end=end,
                digest=token_digest(prompt(end, command.get("seed", 0)), ""),
            )
        ]
    )
    if command.get("unchecked"):
        for worker in side.workers:
            worker.start(work)
        return await_load(side, request_id, command.get("timeout_s", 30))
    before = [rank.memory.copy() for rank in side.ranks]
    for worker in side.workers:
        worker.start(work)
    if command.get("abort_after_s") is not None:
        time.sleep(command["abort_after_s"])
        for worker in side.workers:
            worker.start(StepWork(aborts=[request_id]))
    return {**await_load(side, request_id, command.get("timeout_s", 30)), **compare(side, command, before)}


def await_load(side: Side, request_id: str, timeout_s: float) -> dict[str, Any]:
    found: dict[int, Reason | None] = {}
    failed: set[int] = set()
    started = time.monotonic()
    while len(found) < len(side.workers) and time.monotonic() < started + timeout_s:
        for number, worker in enumerate(side.workers):
            _, ids = worker.finished()
            failed |= worker.take_failed_blocks()
            if ids:
                assert number not in found, f"rank {number} reported twice"
                found[number] = worker.take_report().received[request_id]
        time.sleep(0.002)
    if len(found) < len(side.workers):
        faulthandler.dump_traceback()  # into this process's log: what every thread waits for
    return {
        "received": [found.get(number, "never") for number in range(len(side.workers))],
        "failed_blocks": sorted(failed),
        "seconds": time.monotonic() - started,
        "stats": side.stats(),
    }


def compare(side: Side, command: dict[str, Any], before: list[np.ndarray]) -> dict[str, Any]:
    """Count bytes that differ from what each rank should hold: the range filled in, all else as it was."""
    different = []
    for rank, old in zip(side.ranks, before, strict=True):
        expected = old.copy()
        if not command.get("expect_untouched"):
            rank.fill(expected, command["table"], command["start"], command["end"])
        if command.get("whole_pages"):
            # Opaque pages are copied whole: rows behind the prompt may change too, so only the range is compared.
            written = np.zeros_like(old)
            rank.fill(written, command["table"], command["start"], command["end"])
            mask = written != 0
            different.append(int((rank.memory[mask] != expected[mask]).sum()))
            continue
        different.append(int((rank.memory != expected).sum()))
    return {"different": different}


def release(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    for worker in side.workers:
        worker.start(StepWork(releases=[(command["transfer_id"], command["origin"], command["engine_id"])]))
    return {}


def clear(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    for rank in side.ranks:
        rank.memory[:] = 0
    return {}


def verify(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    """Count the bytes that a transfer into cleared memory, from memory that was never filled, left wrong."""
    page, table, peer_table = side.ranks[0].pages[0], command["table"], command["peer_table"]
    sources = prefill_arenas(
        Sizes(*command["peer_sizes"]), command["peer_blocks"], len(side.ranks[0].pages), page.entry_bytes
    )
    return {"different": [differing_bytes(rank, table, sources, peer_table, command["end"]) for rank in side.ranks]}


def raw(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    """Time plain transfers of `length` bytes each, to or from a decode rank: what the TransferEngine can do at most.

    On a thread that yields to all others, as the connector's do: on a busy machine that is the faster way.
    """
    wire = Wire(1)
    try:
        return wire.pool.submit(_raw, side, command).result()
    finally:
        wire.close()


def _raw(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    transport, source = side.workers[0]._transport, int(side.ranks[0].memory.ctypes.data)
    write, read = transport.write, transport._engine.batch_transfer_sync_read
    offsets = range(0, command["num_bytes"] - command["length"] + 1, command["length"])
    started = time.monotonic()
    for first in range(0, len(offsets), 256):
        part = offsets[first : first + 256]
        arguments = (
            command["segment"],
            [source + offset for offset in part],
            [command["address"] + offset for offset in part],
            [command["length"]] * len(part),
        )
        assert not (read if command.get("read") else write)(*arguments), "the TransferEngine refused"
    return {"seconds": time.monotonic() - started, "num_bytes": len(offsets) * command["length"]}


def main(role: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like; the answers keep their own channel
    side: Side | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            match command["do"]:
                case "open":
                    side, answer = open_side(role, command)
                case "close":
                    if side:
                        side.close()
                    side, answer = None, {}
                case "hold" | "drop" | "sent" | "load" | "release" | "raw" | "clear" | "verify" as name:
                    answer = globals()[name](side, command)
                case other:
                    answer = {"error": f"no such command: {other}"}
            answers.write(json.dumps({"ok": True, **answer}) + "\n")
        except Exception:
            answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
