"""/healthz over real processes and sockets: true of an idle engine, false once a rank or one of its threads is gone."""

from __future__ import annotations

import errno
import http.client
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import pytest

from dcp_connector import health
from dcp_connector.bootstrap import BootstrapServer
from dcp_connector.errors import StartupError
from dcp_connector.handshake import RankFacts, SideFacts, assemble
from dcp_connector.health import RankHealth, RankWatch, thread_problem
from dcp_connector.wire import Layout, Page
from tests.support.kv_oracle import Sizes
from tests.support.transfer_memory import HOST, SECRET, engine, wait_for


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def a_rank(pipe: Connection) -> None:
    """One rank's process: says where it answers, and lives until its pipe closes."""
    served = RankHealth(HOST, list)
    pipe.send(served.address)
    try:
        pipe.recv()
    except EOFError:
        served.close()


@contextmanager
def rank_processes(count: int) -> Iterator[list[tuple[SpawnProcess, str]]]:
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    started: list[tuple[SpawnProcess, str]] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=a_rank, args=(theirs,))
            process.start()
            theirs.close()
            pipes.append(ours)
            started.append((process, ours.recv()))
        yield started
    finally:
        for pipe in pipes:
            pipe.close()
        for process, _ in started:
            process.kill()
            process.join()


def says(server: BootstrapServer, status: int, start: str) -> None:
    """Wait until /healthz answers this, in one line."""

    def holds() -> bool:
        found, words = get(server.port, "/healthz")
        return found == status and words.startswith(start) and words.count("\n") == 1

    wait_for(holds, 60.0, f"/healthz doesn't say {start}")


@contextmanager
def served(ranks: list[str]) -> Iterator[BootstrapServer]:
    """A bootstrap server whose ranks answer at these addresses."""
    side = SideFacts("engine", "kv_producer", "h", "tiny", "uint8", "rows", Layout(len(ranks), 1, 16, 16, 1), 1)
    page = {"layer": Page(4096, 8, 16, 512, 512, 32, 32)}
    facts = [RankFacts(side, tp, 0, f"tcp://{HOST}:1", page, health) for tp, health in enumerate(ranks)]
    server = BootstrapServer(0, 1, SECRET, serves_query=True)
    watch = RankWatch({f"rank tp {each.tp_rank} pp {each.pp_rank}": each.health for each in facts})
    server.publish(assemble("g", facts), watch.problems)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may take long to answer: only the test of a frozen rank gives up soon."""
    monkeypatch.setattr(health, "RANK_TIMEOUT_S", 60.0)


def test_a_rank_that_froze_or_died_is_named_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LASTS_S", 0.0)
    monkeypatch.setattr(health, "RANK_TIMEOUT_S", 1.0)
    with rank_processes(2) as ranks, served([address for _, address in ranks]) as server:
        says(server, 200, "ok")
        (frozen, _), (dead, _) = ranks
        assert frozen.pid is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        says(server, 503, f"rank tp 0 pp 0: doesn't answer at {ranks[0][1]}: timed out")
        os.kill(frozen.pid, signal.SIGCONT)
        says(server, 200, "ok")
        dead.kill()
        dead.join()
        says(server, 503, f"rank tp 1 pp 0: doesn't answer at {ranks[1][1]}: [Errno {errno.ECONNREFUSED}]")


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_idle_engine_stays_healthy_until_a_thread_of_it_dies(role: str) -> None:
    with engine(role, Sizes(2, 2, 1, 16, 1)) as made:
        addresses = {f"rank {number}": each.facts.health for number, each in enumerate(made.workers) if each.facts}
        assert RankWatch(addresses).problems() == ()
        half = made.workers[1]._prefill or made.workers[1]._decode
        assert half is not None
        half._loop.close()
        name = "prefill" if role == "kv_producer" else "decode"
        assert RankWatch(addresses).problems() == (f"rank 1: the {name} thread has died",)


def test_a_thread_that_is_held_up_for_a_minute_is_stuck_and_one_that_sleeps_is_not() -> None:
    assert thread_problem("decode", alive=True, idle_s=10.0) is None
    assert thread_problem("decode", alive=True, idle_s=61.2) == "the decode thread is stuck for 61 s"
    assert thread_problem("decode", alive=False, idle_s=0.0) == "the decode thread has died"


def test_a_loop_says_for_how_long_something_has_held_it() -> None:
    with engine("kv_consumer", Sizes(1, 1, 16, 16, 1)) as made:
        half = made.workers[0]._decode
        assert half is not None
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            entered.set()
            leave.wait(120)

        def came_round() -> bool:
            half._loop.call(lambda: None)
            return half.idle_s < 0.1

        half._loop.call(hold)
        assert entered.wait(60)
        wait_for(lambda: half.idle_s > 0.3, 60.0, "the loop seems to go on")
        leave.set()
        wait_for(came_round, 60.0, "the loop doesn't go on")


def test_many_probes_ask_each_rank_once() -> None:
    asked: list[float] = []

    def problems() -> list[str]:
        asked.append(time.monotonic())
        return []

    rank = RankHealth(HOST, problems)
    watch = RankWatch({"rank": rank.address})
    with ThreadPoolExecutor(8) as pool:
        started = time.monotonic()
        assert set(pool.map(lambda _: watch.problems(), range(200))) == {()}
        took = time.monotonic() - started
    rank.close()
    assert len(asked) <= 1 + took / health.LASTS_S


def test_what_is_no_rank_is_no_healthy_rank() -> None:
    with socket.create_server((HOST, 0)) as listener:
        free = listener.getsockname()[1]
    found = RankWatch({"a": f"{HOST}:{free}", "b": "", "c": f"{HOST}:notaport"}).problems()
    assert [each.partition(" at ")[0] for each in found] == [f"{name}: doesn't answer" for name in "abc"]
    assert RankWatch({}).problems() == ()


def test_the_first_data_parallel_rank_answers_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LASTS_S", 0.0)
    rank = RankHealth(HOST, list)
    with served([rank.address]) as other:
        watch = RankWatch({"rank tp 0 pp 0": rank.address, "data-parallel rank 1": f"{HOST}:{other.port}"})
        assert watch.problems() == ()
        rank.close()
        first, second = watch.problems()
        assert first.startswith("rank tp 0 pp 0: doesn't answer")
        assert second.startswith("data-parallel rank 1: rank tp 0 pp 0: doesn't answer")


def test_only_health_is_served() -> None:
    rank = RankHealth(HOST, lambda: ["one thing", "another"])
    port = int(rank.address.rpartition(":")[2])
    assert get(port, "/healthz") == (503, "one thing; another\n")
    assert get(port, "/query")[0] == 404
    rank.close()


def test_an_address_of_another_machine_is_a_sentence() -> None:
    with pytest.raises(StartupError, match=r"can't serve this rank's health on 203\.0\.113\.7: .*set VLLM_HOST_IP"):
        RankHealth("203.0.113.7", list)
