"""Engines of `fault_process` ranks, and what a test does to them and wants to know of them."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dcp_connector.bootstrap import BootstrapServer
from dcp_connector.handshake import MAX_TOPOLOGY_BYTES, SIGNATURE_HEADER, RankFacts, assemble
from dcp_connector.httpd import Answer, HttpServer, get
from tests.support.command_process import CommandProcess
from tests.support.kv_oracle import Sizes

SECRET = b"the secret of the byte tests"
HOST = "127.0.0.1"
#: Far above what anything here takes on a loaded machine.
PATIENCE_S = 30.0
NUM_BLOCKS, ENTRY_BYTES = 40, 16

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Prompt:
    """A prompt of `end` tokens under a transfer id. `number` tells its tokens, and so its KV, from those of others."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    end: int
    number: int = field(default_factory=lambda: next(_numbers))
    id: str = field(default_factory=lambda: f"transfer-{next(_numbers)}")

    @property
    def held(self) -> dict[str, Any]:
        """What prefill needs to know of it."""
        return {"id": self.id, "number": self.number, "end": self.end, "table": self.source}

    @property
    def loaded(self) -> dict[str, Any]:
        """What decode needs to know of it."""
        return {**self.held, "table": self.target}


@dataclass(frozen=True)
class Ended:
    """How a load ended on a rank, and when it began and ended there, on the machine's monotonic clock."""

    reason: str | None
    began: float
    ended: float


class RankProcess(CommandProcess):
    """One rank's process."""

    def __init__(self, log: Path) -> None:
        super().__init__("tests.support.fault_process", log=log)
        self.facts: RankFacts
        self.segment = ""
        self.address = 0

    def open(self, **command: Any) -> None:
        """Begin to open; `opened` waits for it, so that ranks start side by side."""
        self.send(do="open", **command)

    def opened(self) -> None:
        answer = self.answer()
        self.facts = msgspec.msgpack.decode(bytes.fromhex(answer["facts"]), type=RankFacts)
        self.segment, self.address = answer["segment"], answer["address"]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether the process stopped itself since the last time that this was so."""
        return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is not None


@dataclass
class FaultEngine:
    """All ranks of one engine. What they reported is by rank: each id comes at most once from one."""

    role: str
    sizes: Sizes
    engine_id: str
    path: str
    ranks: list[RankProcess]
    bootstrap: BootstrapServer | None = None
    sent: dict[int, dict[str, str | None]] = field(default_factory=dict)
    received: dict[int, dict[str, Ended]] = field(default_factory=dict)
    unclear: set[tuple[int, str]] = field(default_factory=set)
    last: dict[int, dict[str, Any]] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    frozen: set[int] = field(default_factory=set)

    @property
    def origin(self) -> str:
        assert self.bootstrap
        return f"http://{HOST}:{self.bootstrap.port}"

    def publish(self, port: int = 0) -> None:
        """Serve the topology."""
        self.bootstrap = BootstrapServer(port, 1, SECRET, serves_query=True)
        self.bootstrap.publish(assemble(uuid.uuid4().hex, [rank.facts for rank in self.ranks]))

    @contextmanager
    def also_behind(self, controls: Sequence[str]) -> Iterator[str]:
        """Serve the topology with other control addresses, those of proxies, at another address, which this yields."""
        ranks = zip(self.ranks, controls, strict=True)
        facts = [msgspec.structs.replace(rank.facts, control=control) for rank, control in ranks]
        server = BootstrapServer(0, 1, SECRET, serves_query=True)
        try:
            server.publish(assemble(uuid.uuid4().hex, facts))
            yield f"http://{HOST}:{server.port}"
        finally:
            server.close()

    @contextmanager
    def behind_held_answers(self) -> Iterator[HeldAnswers]:
        """Serve the topology at another address too, where answers are held."""
        assert self.bootstrap
        held = HeldAnswers(self.bootstrap.port)
        try:
            yield held
        finally:
            held.close()

    def work(self, **work: Any) -> None:
        """Give all ranks work that run."""
        self.all("work", **work)

    def hold(self, *prompts: Prompt) -> None:
        self.work(holds=[prompt.held for prompt in prompts])

    def load(self, prefill: FaultEngine, *prompts: Prompt, origin: str | None = None) -> None:
        source = {"origin": origin or prefill.origin, "engine": prefill.engine_id}
        self.work(loads=[{**prompt.loaded, **source} for prompt in prompts])

    def running(self) -> dict[int, RankProcess]:
        """The ranks that are neither dead nor frozen."""
        return {n: rank for n, rank in enumerate(self.ranks) if rank.alive and n not in self.frozen}

    def poll(self) -> None:
        """Take what the ranks report. An id that comes twice from a rank fails the test: it would kill EngineCore."""
        assert len(self.frozen) < len(self.ranks), "a frozen engine answers nothing"
        for number, rank in self.running().items():
            found = self.last[number] = rank.ask(do="poll")
            self.peaks[number] = max(self.peaks.get(number, 0), found["peak"])
            sent, received = self.sent.setdefault(number, {}), self.received.setdefault(number, {})
            for request_id, reason in found["sent"]:
                assert request_id not in sent, f"{request_id} was reported sent twice by rank {number}"
                sent[request_id] = reason
            for request_id, *ended in found["received"]:
                assert request_id not in received, f"{request_id} was reported received twice by rank {number}"
                received[request_id] = Ended(*ended)
            assert sorted(found["failed_requests"]) == sorted(found["unclear"])
            for request_id in found["unclear"]:
                assert request_id in received
                self.unclear.add((number, request_id))
            for request_id in found["cleared"]:
                self.unclear.remove((number, request_id))

    def all_sent(self, *prompts: Prompt) -> set[str | None]:
        """Wait until the blocks of prompts are no longer needed on any running rank; return why."""
        return {reason for prompt in prompts for reason in self._reported(self.sent, prompt.id)}

    def all_received(self, prompt: Prompt) -> list[Ended]:
        """Wait until all running ranks have reported a load; return how it ended on each."""
        return self._reported(self.received, prompt.id)

    def _reported(self, store: dict[int, dict[str, Any]], request_id: str) -> list[Any]:
        def there() -> bool:
            self.poll()
            return all(request_id in store.get(number, {}) for number in self.running())

        wait_until(there, PATIENCE_S, lambda: f"not all ranks of {self.engine_id} reported {request_id}: {store}")
        return [store[number][request_id] for number in self.running()]

    def clear(self) -> None:
        """Wait until no block of a running rank may be written to by a request that is over."""

        def there() -> bool:
            self.poll()
            return not [n for n, _ in self.unclear if n in self.running()]

        wait_until(there, PATIENCE_S, lambda: f"blocks stay out of use: {self.unclear}")

    def held_up(self, writers: int = 1) -> None:
        """Wait until so many writers stand before a batch that the gate holds up."""

        def there() -> bool:
            self.poll()
            return sum(found["held_up"] for found in self.last.values()) >= writers

        wait_until(there, PATIENCE_S, lambda: f"no batch was held up: {self.last}")

    def staging(self) -> list[int]:
        """Bytes of staging memory in use on each running rank, by the gauge that Prometheus would show."""
        self.poll()
        return [sum(self.last[n]["stats"].get("staging_bytes", {}).values()) for n in self.running()]

    def written(self) -> dict[str, int]:
        """Pulls that were served so far, by path, over all running ranks."""
        self.poll()
        every = [self.last[n]["stats"].get("paths", {}) for n in self.running()]
        return {path: sum(paths.get(path, 0) for paths in every) for path in ("direct", "pack", "scatter")}

    def all(self, do: str, **command: Any) -> list[dict[str, Any]]:
        return [rank.ask(do=do, **command) for rank in self.running().values()]

    def wrong_bytes(self, *prompts: Prompt) -> list[int]:
        """Bytes on each running rank that aren't as these loads say, since they began.

        What a rank reported as good has to be there. In the blocks of the others anything may be, but nowhere else.
        """
        found: list[int] = []
        for number, rank in self.running().items():
            reported = self.received.get(number, {})
            good = [prompt for prompt in prompts if prompt.id in reported and reported[prompt.id].reason is None]
            rest = [prompt for prompt in prompts if prompt not in good]
            right, others = [prompt.loaded for prompt in good], [prompt.loaded for prompt in rest]
            found.append(rank.ask(do="compare", right=right, open=others)["bytes"])
        return found

    def kill(self, *numbers: int) -> None:
        """SIGKILL these ranks, or all; an engine's bootstrap server dies with its scheduler, so with all of them."""
        for rank in [self.ranks[n] for n in numbers] or self.ranks:
            rank.signal(signal.SIGKILL)
            rank.process.wait()
        if self.bootstrap and not any(rank.alive for rank in self.ranks):
            self.bootstrap.close()
            self.bootstrap = None

    def freeze(self, *numbers: int) -> None:
        """SIGSTOP these ranks, or all."""
        for number in numbers or range(len(self.ranks)):
            self.frozen.add(number)
            self.ranks[number].signal(signal.SIGSTOP)

    def freezes(self, number: int = 0) -> None:
        """Wait until a rank that was told to `freeze_at` a batch has come there."""
        self.frozen.add(number)
        wait_until(lambda: self.ranks[number].stopped, PATIENCE_S, lambda: "the rank has not stopped")

    def thaw(self) -> float:
        """SIGCONT; return when."""
        now = time.monotonic()
        for number in self.frozen:
            self.ranks[number].signal(signal.SIGCONT)
        self.frozen.clear()
        return now

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()
        if self.bootstrap:
            self.bootstrap.close()


class HeldAnswers:
    """An engine's bootstrap server as it is seen through something that keeps its answers back until `release`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._asked, self._go = threading.Event(), threading.Event()
        self._server = HttpServer(HOST, 0, self._respond, "held-answers")
        self.origin = f"http://{HOST}:{self._server.port}"

    def asked(self) -> None:
        """Wait until somebody has asked."""
        assert self._asked.wait(PATIENCE_S), "nobody asked the bootstrap server"

    def release(self) -> None:
        self._go.set()

    def close(self) -> None:
        self.release()
        self._server.close()

    def _respond(self, path: str) -> Answer:
        self._asked.set()
        self._go.wait()
        status, headers, body = get(HOST, self._port, path, PATIENCE_S, MAX_TOPOLOGY_BYTES)
        return status, {SIGNATURE_HEADER: headers[SIGNATURE_HEADER.lower()]}, body


def start(
    role: str,
    sizes: Sizes,
    folder: Path,
    port: int = 0,
    entry_bytes: int = ENTRY_BYTES,
    num_blocks: int = NUM_BLOCKS,
    **config: Any,
) -> FaultEngine:
    """Start an engine's ranks side by side; prefill serves its topology on `port`."""
    engine_id = f"{role}-{uuid.uuid4().hex[:8]}"
    ranks = [RankProcess(folder / f"{engine_id}-{number}.log") for number in range(sizes.t)]
    made = FaultEngine(role, sizes, engine_id, config["path"], ranks)
    size = {"entry_bytes": entry_bytes, "num_blocks": num_blocks, "sizes": list(asdict(sizes).values())}
    try:
        for number, rank in enumerate(ranks):
            rank.open(role=role, engine_id=engine_id, tp_rank=number, config=config, **size)
        for rank in ranks:
            rank.opened()
        if role == "prefill":
            made.publish(port)
    except BaseException:
        made.stop()
        raise
    return made


@contextmanager
def running(role: str, sizes: Sizes, folder: Path, port: int = 0, **config: Any) -> Iterator[FaultEngine]:
    """Run an engine for the length of a block."""
    made = start(role, sizes, folder, port, **config)
    try:
        yield made
    finally:
        made.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float, words: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, words()
        time.sleep(0.01)
