"""One rank of one engine as a process, to be killed, frozen and held up: the product's worker over real Mooncake.

Run with the engine environment's interpreter, as `python -m tests.support.fault_process`. It reads one JSON command per
line and answers each with one JSON line that has "ok", or "error" with a traceback:

    {"do": "open", "role", "engine_id", "sizes", "tp_rank", "config"}   answers {"facts": hex of the rank's facts}
    {"do": "work", "holds", "loads", "aborts", "drops", "releases"}     what the scheduler would send in one step
    {"do": "poll"}          what the rank reports since the last poll, its gauges, and how many batches were begun
    {"do": "gate", "after"} let so many more batches pass and hold up the next ones; {"do": "ungate"} lets them go
    {"do": "remember"}      keep a copy of the memory; {"do": "differing", "table", "start", "end"} counts bytes that
                            aren't those of the copy with tokens [start, end) filled in
    {"do": "reuse", "table"} fill these blocks with bytes of another owner
    {"do": "write_raw", "segment", "address"}  write some bytes with Mooncake alone, without any message of ours

What Mooncake waits for is cut short, so that a frozen peer costs seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dcp_connector import sender, transfer
from dcp_connector.config import ConnectorConfig
from dcp_connector.errors import Reason
from dcp_connector.handshake import SideFacts, wire_layout
from dcp_connector.requests_decode import Load
from dcp_connector.requests_prefill import Hold
from dcp_connector.stats import Counters, Data, merge
from dcp_connector.transfer import MooncakeTransport
from dcp_connector.wire import token_digest
from dcp_connector.work import StepWork
from dcp_connector.worker import WorkerSide
from tests.support.kv_oracle import HEAD_MAJOR, Rank, Sizes
from tests.support.transfer_ranks import HOST, SECRET, prompt, tensors_of

NUM_BLOCKS, NUM_LAYERS, ENTRY_BYTES = 40, 2, 16
#: What another owner of a block writes into it.
OTHERS_BYTE = 0x5A
RAW_BYTES = 256
STRAGGLERS_S = 2.0
sender.STRAGGLERS_S = STRAGGLERS_S
transfer._TIMEOUTS.update(dict.fromkeys(("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"), "4"))


class GatedTransport(MooncakeTransport):
    """Mooncake, which can be held up before its next batch."""

    def __init__(self) -> None:
        super().__init__(HOST, "tcp", "")
        self.lock = threading.Lock()
        self.begun = 0
        self.left: int | None = None
        self.go = threading.Event()

    def write(self, segment: str, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> None:
        with self.lock:
            self.begun += 1
            held = self.left == 0
            if self.left:
                self.left -= 1
        if held:
            self.go.wait()
        super().write(segment, src, dst, length)

    def gate(self, after: int | None) -> None:
        with self.lock:
            self.begun, self.left = 0, after
        self.go.clear() if after is not None else self.go.set()


class Process:
    """This rank."""

    def __init__(self, command: dict[str, Any]) -> None:
        sizes = Sizes(*command["sizes"])
        side = SideFacts(
            engine_id=command["engine_id"],
            role=f"kv_{'producer' if command['role'] == 'prefill' else 'consumer'}",
            model_hash="same",
            model="tiny",
            kv_dtype="uint8",
            page_format="rows",
            layout=wire_layout(sizes.layout()),
            pipeline_parallel_size=1,
        )
        self.rank = Rank(sizes, command["tp_rank"], 0, NUM_BLOCKS, NUM_LAYERS, ENTRY_BYTES, HEAD_MAJOR)
        self.before = self.rank.memory.copy()
        self.counters = Counters()
        self.totals: Data = {}
        self.transport = GatedTransport()
        self.worker = WorkerSide(
            host=HOST,
            tp_rank=command["tp_rank"],
            pp_rank=0,
            num_blocks=NUM_BLOCKS,
            read_facts=lambda _names: side,
            open_transport=lambda: self.transport,
            config=ConnectorConfig(mooncake_protocol="tcp", **command["config"]),
            secret=SECRET,
            counters=self.counters,
        )
        self.worker.register(tensors_of(self.rank))

    def facts(self) -> dict[str, Any]:
        facts = msgspec.msgpack.encode(self.worker.facts).hex()
        return {"facts": facts, "segment": self.transport.segment, "address": int(self.rank.memory.ctypes.data)}

    def work(self, command: dict[str, Any]) -> dict[str, Any]:
        work = StepWork(
            aborts=command.get("aborts", []),
            drops=[(transfer_id, Reason.PREFILL_ABORTED) for transfer_id in command.get("drops", [])],
            releases=[tuple(release) for release in command.get("releases", [])],
        )
        for item in command.get("holds", []):
            self.rank.fill(self.rank.memory, item["table"], 0, item["end"])
            held = Hold(item["id"], item["id"], tuple(item["table"]), item["end"], prompt(item["end"]), "")
            work.holds.append(held)
        for item in command.get("loads", []):
            digest = token_digest(prompt(item["end"]), "")
            table = tuple(item["table"])
            load = Load(item["id"], item["id"], item["origin"], item["engine"], table, 0, item["end"], digest)
            work.loads.append(load)
        self.worker.start(work)
        return {}

    def poll(self, _command: dict[str, Any]) -> dict[str, Any]:
        sent, received = self.worker.finished()
        failed, report = self.worker.take_failed_requests(), self.worker.take_report()
        self.totals = merge(self.totals, self.counters.take() or {})
        with self.transport.lock:
            held_up = self.transport.begun if self.transport.left == 0 else 0
        return {
            "sent": {key: report.sent[key] for key in sent} if report else {},
            "received": {key: report.received[key] for key in received} if report else {},
            "unclear": list(report.unclear) if report else [],
            "cleared": list(report.cleared) if report else [],
            "failed_requests": list(failed),
            "failed_blocks": list(self.worker.take_failed_blocks()),
            "stats": self.totals,
            "batches": self.transport.begun,
            "held_up": held_up,
            "threads": threading.active_count(),
        }

    def gate(self, command: dict[str, Any]) -> dict[str, Any]:
        self.transport.gate(command["after"])
        return {}

    def ungate(self, _command: dict[str, Any]) -> dict[str, Any]:
        self.transport.gate(None)
        return {}

    def remember(self, _command: dict[str, Any]) -> dict[str, Any]:
        self.before = self.rank.memory.copy()
        return {}

    def differing(self, command: dict[str, Any]) -> dict[str, Any]:
        expected = self.before.copy()
        if command["end"]:
            self.rank.fill(expected, command["table"], 0, command["end"])
        return {"bytes": int((self.rank.memory != expected).sum())}

    def reuse(self, command: dict[str, Any]) -> dict[str, Any]:
        touched = np.zeros_like(self.rank.memory)
        sizes = self.rank.sizes
        self.rank.fill(touched, command["table"], 0, len(command["table"]) * sizes.b * sizes.w)
        self.rank.memory[touched != 0] = OTHERS_BYTE
        return self.remember(command)

    def write_raw(self, command: dict[str, Any]) -> dict[str, Any]:
        self.rank.memory[:RAW_BYTES] ^= 0xFF  # both sides' memory begins alike
        source = int(self.rank.memory.ctypes.data)
        MooncakeTransport.write(self.transport, command["segment"], [source], [command["address"]], [RAW_BYTES])
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like; the answers keep their own channel
    process: Process | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "open":
                process = Process(command)
                answer = process.facts()
            else:
                assert process
                answer = getattr(process, command["do"])(command)
            answers.write(json.dumps({"ok": True, **answer}) + "\n")
        except Exception:
            answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")


if __name__ == "__main__":
    main()
