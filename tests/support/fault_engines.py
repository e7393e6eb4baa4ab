"""Engines of `fault_process` ranks, and what a test does to them and wants to know of them."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dcp_connector.bootstrap import BootstrapServer
from dcp_connector.handshake import RankFacts, assemble
from tests.support.command_process import CommandProcess
from tests.support.kv_oracle import Sizes

SECRET = b"the secret of the byte tests"
HOST = "127.0.0.1"
#: Far above what anything here takes on a loaded machine.
PATIENCE_S = 30.0


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


@dataclass
class FaultEngine:
    """All ranks of one engine. `seen` holds what they reported, each id at most once per rank."""

    role: str
    sizes: Sizes
    engine_id: str
    ranks: list[RankProcess]
    bootstrap: BootstrapServer | None = None
    sent: dict[int, dict[str, str | None]] = field(default_factory=dict)
    received: dict[int, dict[str, str | None]] = field(default_factory=dict)
    unclear: set[tuple[int, str]] = field(default_factory=set)
    last: dict[int, dict[str, Any]] = field(default_factory=dict)
    frozen: bool = False

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

    def work(self, **work: Any) -> None:
        """Give all living ranks work."""
        for rank in self.living():
            rank.ask(do="work", **work)

    def hold(self, transfer_id: str, table: Sequence[int], end: int) -> None:
        self.work(holds=[{"id": transfer_id, "table": list(table), "end": end}])

    def load(
        self, transfer_id: str, table: Sequence[int], end: int, prefill: FaultEngine, origin: str | None = None
    ) -> None:
        item = {"id": transfer_id, "table": list(table), "end": end}
        self.work(loads=[{**item, "origin": origin or prefill.origin, "engine": prefill.engine_id}])

    def living(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.alive]

    def poll(self) -> None:
        """Take what the ranks report. An id that comes twice from a rank fails the test: it would kill EngineCore."""
        assert not self.frozen, "a frozen engine answers nothing"
        for number, rank in enumerate(self.ranks):
            if not rank.alive:
                continue
            found = self.last[number] = rank.ask(do="poll")
            for name, store in (("sent", self.sent), ("received", self.received)):
                known = store.setdefault(number, {})
                for request_id, reason in found[name].items():
                    assert request_id not in known, f"{request_id} was reported {name} twice by rank {number}"
                    known[request_id] = reason
            assert set(found["failed_requests"]) == set(found["unclear"])
            for request_id in found["unclear"]:
                assert request_id in self.received[number]
                self.unclear.add((number, request_id))
            for request_id in found["cleared"]:
                self.unclear.remove((number, request_id))

    def outcomes(self, name: str, request_id: str, timeout_s: float = PATIENCE_S) -> list[str | None]:
        """Wait until all living ranks have reported a request; return each one's reason."""
        store = self.sent if name == "sent" else self.received

        def there() -> bool:
            self.poll()
            return all(request_id in store.get(n, {}) for n, rank in enumerate(self.ranks) if rank.alive)

        wait_until(there, timeout_s, lambda: f"{request_id} was not {name} by all ranks: {store}")
        return [store[n][request_id] for n, rank in enumerate(self.ranks) if rank.alive]

    def clear(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no block of this engine may be written to by a request that is over."""

        def there() -> bool:
            self.poll()
            return not [n for n, _ in self.unclear if self.ranks[n].alive]

        wait_until(there, timeout_s, lambda: f"blocks stay out of use: {self.unclear}")

    def held_up(self, ranks: int = 1, timeout_s: float = PATIENCE_S) -> None:
        """Wait until writers of so many ranks stand before a batch that the gate holds up."""

        def there() -> bool:
            self.poll()
            return sum(bool(found["held_up"]) for found in self.last.values()) >= ranks

        wait_until(there, timeout_s, lambda: f"no batch was held up: {self.last}")

    def gauge(self, name: str) -> float:
        """A gauge summed over the living ranks; each rank reports its own under its number."""
        self.poll()
        return sum(sum(found["stats"].get(name, {}).values()) for n, found in self.last.items() if self.ranks[n].alive)

    def all(self, do: str, **command: Any) -> list[dict[str, Any]]:
        return [rank.ask(do=do, **command) for rank in self.living()]

    def differing(self, table: Sequence[int], end: int) -> list[int]:
        return [answer["bytes"] for answer in self.all("differing", table=list(table), end=end)]

    def kill(self, *numbers: int) -> None:
        """SIGKILL these ranks, or all; an engine's bootstrap server dies with its scheduler, so with all of them."""
        for rank in [self.ranks[n] for n in numbers] or self.ranks:
            rank.signal(signal.SIGKILL)
            rank.process.wait()
        if not numbers and self.bootstrap:
            self.bootstrap.close()

    def freeze(self) -> None:
        self.frozen = True
        for rank in self.ranks:
            rank.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.frozen = False
        for rank in self.ranks:
            rank.signal(signal.SIGCONT)

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()
        if self.bootstrap:
            self.bootstrap.close()


def start(role: str, sizes: Sizes, folder: Path, port: int = 0, **config: Any) -> FaultEngine:
    """Start an engine's ranks side by side; prefill serves its topology on `port`."""
    engine_id = f"{role}-{uuid.uuid4().hex[:8]}"
    ranks = [RankProcess(folder / f"{engine_id}-{number}.log") for number in range(sizes.t)]
    made = FaultEngine(role, sizes, engine_id, ranks)
    try:
        for number, rank in enumerate(ranks):
            values = [sizes.t, sizes.w, sizes.i, sizes.b, sizes.h]
            rank.open(role=role, engine_id=engine_id, sizes=values, tp_rank=number, config=config)
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
