"""One rank of one engine as a process, to be killed, frozen and held up: the product's worker over real Mooncake.

Run with the engine environment's interpreter, as `python -m tests.support.fault_process`. It reads one JSON command per
line and answers each with one JSON line that has "ok", or "error" with a traceback. A prompt is {"id", "number",
"table", "end"}: its tokens and their KV follow from its number, and the table is this side's.

    {"do": "open", "role", "engine_id", "sizes", "tp_rank", "entry_bytes", "num_blocks", "config"}
                            answers {"facts": hex of the rank's facts, "segment", "address"}
    {"do": "work", "holds", "loads", "aborts", "drops", "releases"}     what the scheduler would send in one step; the
                            blocks of a load hold another owner's bytes before
    {"do": "poll"}          what the rank reported since the last poll and when, its counters, how full its staging
                            memory was, and what was written
    {"do": "gate", "after"} let so many more batches pass and hold up the next ones; {"do": "ungate"} lets them go
    {"do": "freeze_at", "batch"}  stop this process while it writes that batch, counted from now
    {"do": "compare", "right", "open"}  count bytes that aren't those of the last comparison with all prompts of `right`
                            filled in; in the blocks of `open` there may be anything
    {"do": "reuse", "table"} fill these blocks with bytes of another owner
    {"do": "write_raw", "segment", "address"}  write some bytes with Mooncake alone, without any message of ours

A thread takes the engine's part and asks the worker all the time what is over, so that times are the rank's own. What
Mooncake waits for is cut short, so that a frozen peer costs seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
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

NUM_LAYERS = 2
#: Numbers of neighbouring prompts lie so far apart, more than any prompt here has tokens.
PROMPT_STRIDE = 1000
#: What another owner of a block writes into it.
OTHERS_BYTE = 0x5A
RAW_BYTES = 256
#: Pause between two steps of the engine's thread.
STEP_S = 0.004
STRAGGLERS_S = 2.0
sender.STRAGGLERS_S = STRAGGLERS_S
transfer._TIMEOUTS.update(dict.fromkeys(("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"), "4"))


class GatedTransport(MooncakeTransport):
    """Mooncake, which can be held up before its next batch, and in which this process can stop."""

    def __init__(self) -> None:
        super().__init__(HOST, "tcp", "")
        self.lock = threading.Lock()
        self.held_up = 0
        self.left: int | None = None
        self.until_frozen = 0
        self.go = threading.Event()

    def write(self, segment: str, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> None:
        with self.lock:
            held = self.left == 0
            if self.left:
                self.left -= 1
            freezes = self.until_frozen == 1
            self.until_frozen = max(0, self.until_frozen - 1)
        if held:
            # A writer is held up between meeting its peer and the first byte, too.
            self._meet(segment)
            with self.lock:
                self.held_up += 1
            self.go.wait()
            with self.lock:
                self.held_up -= 1
        if freezes:
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGSTOP)).start()
        super().write(segment, src, dst, length)

    def gate(self, after: int | None) -> None:
        with self.lock:
            self.left = after
        self.go.clear() if after is not None else self.go.set()


class PeakCounters(Counters):
    """Counters that also know how high each gauge by rank was."""

    def __init__(self) -> None:
        super().__init__()
        self._changing = threading.Lock()
        self._now: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()

    def change(self, key: str, by: int) -> None:
        with self._changing:
            super().change(key, by)
            self._now[key] += by
            self._peaks[key] = max(self._peaks[key], self._now[key])

    def take_peak(self, key: str) -> int:
        """Return how high a gauge was since the last call."""
        with self._changing:
            peak, self._peaks[key] = self._peaks[key], self._now[key]
        return peak


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
        blocks, entry_bytes = command["num_blocks"], command["entry_bytes"]
        self.rank = Rank(sizes, command["tp_rank"], 0, blocks, NUM_LAYERS, entry_bytes, HEAD_MAJOR)
        self.before = self.rank.memory.copy()
        self.counters = PeakCounters()
        self.transport = GatedTransport()
        self.worker = WorkerSide(
            host=HOST,
            tp_rank=command["tp_rank"],
            pp_rank=0,
            num_blocks=blocks,
            read_facts=lambda _names: side,
            open_transport=lambda: self.transport,
            config=ConnectorConfig(mooncake_protocol="tcp", **command["config"]),
            secret=SECRET,
            counters=self.counters,
        )
        self.worker.register(tensors_of(self.rank))
        self.engine = EngineThread(self.worker)

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
            self._fill(self.rank.memory, item)
            held = Hold(item["id"], item["id"], tuple(item["table"]), item["end"], _tokens(item), "")
            work.holds.append(held)
        for item in command.get("loads", []):
            self.reuse(item)
            table, digest = tuple(item["table"]), token_digest(_tokens(item), "")
            load = Load(item["id"], item["id"], item["origin"], item["engine"], table, 0, item["end"], digest)
            work.loads.append(load)
        self.engine.start(work)
        return {}

    def poll(self, _command: dict[str, Any]) -> dict[str, Any]:
        found = self.engine.take()
        with self.transport.lock:
            held_up = self.transport.held_up
        return {**found, "held_up": held_up, "peak": self.counters.take_peak("staging_bytes")}

    def gate(self, command: dict[str, Any]) -> dict[str, Any]:
        self.transport.gate(command["after"])
        return {}

    def ungate(self, _command: dict[str, Any]) -> dict[str, Any]:
        self.transport.gate(None)
        return {}

    def freeze_at(self, command: dict[str, Any]) -> dict[str, Any]:
        with self.transport.lock:
            self.transport.until_frozen = command["batch"]
        return {}

    def compare(self, command: dict[str, Any]) -> dict[str, Any]:
        expected = self.before
        for item in command["right"]:
            self._fill(expected, item)
        for part in (part for item in command["open"] for part in self._blocks(item["table"])):
            expected[part] = self.rank.memory[part]
        differing = int((self.rank.memory != expected).sum())
        self.before = self.rank.memory.copy()
        return {"bytes": differing}

    def reuse(self, command: dict[str, Any]) -> dict[str, Any]:
        for part in self._blocks(command["table"]):
            self.rank.memory[part] = self.before[part] = OTHERS_BYTE
        return {}

    def write_raw(self, command: dict[str, Any]) -> dict[str, Any]:
        self.rank.memory[:RAW_BYTES] ^= 0xFF  # both sides' memory begins alike
        source = int(self.rank.memory.ctypes.data)
        MooncakeTransport.write(self.transport, command["segment"], [source], [command["address"]], [RAW_BYTES])
        return {}

    def _fill(self, memory: np.ndarray, item: dict[str, Any]) -> None:
        self.rank.fill(memory, item["table"], 0, item["end"], item["number"] * PROMPT_STRIDE)

    def _blocks(self, table: Sequence[int]) -> Iterator[slice]:
        """Where these blocks lie in memory, in every layer: each is consecutive bytes."""
        for page in self.rank.pages:
            for block in table:
                start = page.base - self.rank.address + block * page.block_stride
                yield slice(start, start + page.block_stride)


class EngineThread:
    """Asks a worker for what is over, as an engine does in each step, and notes when it said so."""

    def __init__(self, worker: WorkerSide) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._loaded: dict[str, float] = {}
        self._totals: Data = {}
        self._found = _nothing()
        self._broken = ""
        threading.Thread(target=self._run, daemon=True, name="engine").start()

    def start(self, work: StepWork) -> None:
        with self._lock:
            self._loaded.update((load.request_id, time.monotonic()) for load in work.loads)
            self._worker.start(work)

    def take(self) -> dict[str, Any]:
        """Return what was found since the last call; "received" has when each load began and ended."""
        with self._lock:
            self._step()
            assert not self._broken, self._broken
            found, self._found = self._found, _nothing()
            return {**found, "stats": self._totals}

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._step()
                time.sleep(STEP_S)
        except Exception:
            self._broken = traceback.format_exc()

    def _step(self) -> None:
        sent, received = self._worker.finished()
        failed, report = self._worker.take_failed_requests(), self._worker.take_report()
        now, found = time.monotonic(), self._found
        if report:
            found["sent"] += [(key, report.sent[key]) for key in sent]
            found["received"] += [(key, report.received[key], self._loaded[key], now) for key in received]
            found["unclear"] += report.unclear
            found["cleared"] += report.cleared
        found["failed_requests"] += failed
        self._totals = merge(self._totals, self._worker.take_stats() or {})


def _nothing() -> dict[str, list[Any]]:
    return {name: [] for name in ("sent", "received", "unclear", "cleared", "failed_requests")}


def _tokens(item: dict[str, Any]) -> bytes:
    return prompt(item["end"], item["number"] * PROMPT_STRIDE)


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
