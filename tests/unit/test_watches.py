"""What follows one kind in one namespace: how a watch goes on, begins anew, ends, and how its news is delivered."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_operator import metrics, watches
from dcp_operator.client import ApiError
from dcp_operator.kinds import POD
from dcp_operator.watches import Watch, Watches
from tests.support.watch_source import Listener, Server, bookmark, named, until, watch_threads

EXPIRED = ApiError(410, "Expired", "too old resource version")
CUT = ApiError(0, "Unreachable", "the watch of pods was cut")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGAIN_S", "RETRY_S"):
        monkeypatch.setattr(watches, name, 0.01)


def restarts() -> float:
    return metrics.CONTROLLER.get_sample_value("dcp_operator_watch_restarts_total", {"resource": "pods"}) or 0.0


def begun(server: Server, told: Listener) -> Watch:
    return Watch(server, told, POD, None, "5")


def wait_here(condition: Any) -> None:
    """Wait without letting the loop run."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.005)


def test_a_watch_that_ends_goes_on_from_what_it_told_last_without_a_list():
    async def scenario() -> None:
        server, told = Server(), Listener()
        watch = begun(server, told)
        server.changes.put(("ADDED", named("a", "12")))
        await until(lambda: server.asked_from[-1:] == ["12"])
        assert told.events == [("ADDED", "a")]
        assert server.asked_from[0] == "5"
        assert (server.num_lists, told.lists) == (0, [])
        watch.end()

    asyncio.run(scenario())


def test_a_bookmark_moves_the_version_and_is_told_to_nobody():
    async def scenario() -> None:
        server, told = Server(), Listener()
        watch = begun(server, told)
        server.changes.put(bookmark("50"))
        await until(lambda: server.asked_from[-1:] == ["50"])
        server.changes.put(("ADDED", named("a", "51")))
        await until(lambda: told.events)
        assert told.events == [("ADDED", "a")]
        watch.end()

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [EXPIRED, CUT], ids=["too old", "cut"])
def test_a_watch_that_fails_begins_anew_with_a_list_and_that_is_counted(failure: ApiError):
    async def scenario() -> None:
        server, told = Server(), Listener()
        server.items = [named("b", "9")]
        before = restarts()
        watch = begun(server, told)
        server.changes.put(("ADDED", named("a", "12")))
        server.changes.put(failure)
        server.changes.put(("ADDED", named("c", "13")))
        await until(lambda: len(told.events) == 2)
        assert told.all == ["a", "list", "c"]
        assert told.lists == [["b"]]
        assert server.asked_from[:2] == ["5", "10"], "from the version of the list"
        assert restarts() == before + 1
        watch.end()

    asyncio.run(scenario())


def test_no_watch_is_begun_before_the_list_after_a_failure_has_succeeded(caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        server, told = Server(), Listener()
        server.refusal = ApiError(500, "InternalError", "etcd is away")
        watch = begun(server, told)
        server.changes.put(CUT)
        await until(lambda: server.num_lists >= 5)
        assert len(server.asked_from) == 1
        assert told.lists == []
        server.refusal = None
        await until(lambda: told.lists == [[]])
        await until(lambda: len(server.asked_from) >= 2)
        watch.end()

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "why, once for as long as it is the same"
    assert "was cut" in said[0]
    assert "etcd is away" in said[1]


def test_a_watch_that_fails_again_and_again_lists_less_and_less_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watches, "RETRY_S", 0.02)
    monkeypatch.setattr(watches, "RETRY_MAX_S", 30.0)

    async def scenario() -> None:
        server, told = Server(), Listener()
        for _ in range(50):
            server.changes.put(CUT)
        watch = begun(server, told)
        await until(lambda: server.num_lists >= 5)
        # 0.02, 0.04, ... 0.64 s: a pause that stayed the same would have allowed for dozens.
        before = server.num_lists
        await asyncio.sleep(0.3)
        assert server.num_lists - before <= 2
        watch.end()

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [403, 404])
def test_a_watch_ends_where_its_kind_is_refused_or_gone_and_can_be_begun_anew(status: int):
    async def scenario() -> None:
        server, told = Server(), Listener()
        following = Watches(server, told)
        following.begin(POD, None, "10")
        assert following.follows(POD, None)
        server.refusal = ApiError(status, "Refused", "no")
        server.changes.put(CUT)
        await until(lambda: not following.follows(POD, None))
        assert following.problems() == [], "an end that is known of is no death"
        await until(lambda: not watch_threads())
        following.begin(POD, None, "20")
        server.changes.put(("ADDED", named("a", "21")))
        await until(lambda: told.events == [("ADDED", "a")])
        following.end()
        assert not following.follows(POD, None)

    asyncio.run(scenario())


def test_a_defect_ends_no_watch_and_is_said_once(caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        server, told = Server(), Listener()
        watch = begun(server, told)
        for _ in range(3):
            server.changes.put(("ADDED", {"metadata": {}}))
        await until(lambda: len(told.lists) == 3)
        server.refusal = RuntimeError("a list that no one expected")
        server.changes.put(CUT)
        await until(lambda: "a list that no one expected" in caplog.text)
        server.refusal = None
        server.changes.put(("ADDED", named("b", "12")))
        await until(lambda: told.events == [("ADDED", "b")])
        assert not watch.has_died
        watch.end()

    asyncio.run(scenario())
    assert caplog.text.count("watch failed kind=pods where=None error=KeyError") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_whose_thread_has_died_is_a_problem_until_it_is_begun_anew(caplog: pytest.LogCaptureFixture):
    class Fatal(BaseException):
        pass

    async def scenario() -> None:
        server, told = Server(), Listener()
        server.fatal = Fatal()
        following = Watches(server, told)
        following.begin(POD, None, "10")
        await until(following.problems)
        assert following.problems() == ["the watch of pods in all namespaces has died"]
        assert not following.follows(POD, None)
        server.fatal = None
        following.begin(POD, None, "10")
        assert (following.problems(), following.follows(POD, None)) == ([], True)
        following.end()

    asyncio.run(scenario())
    assert "watch has died and is begun anew kind=pods" in caplog.text


def test_a_watch_that_is_begun_again_takes_the_place_of_the_one_before():
    async def scenario() -> None:
        server, told = Server(), Listener()
        following = Watches(server, told)
        for _ in range(3):
            following.begin(POD, None, "10")
        await until(lambda: len(watch_threads()) == 1)
        server.changes.put(("ADDED", named("a", "12")))
        await until(lambda: told.events)
        assert told.events == [("ADDED", "a")]
        following.end()
        await until(lambda: not watch_threads())

    asyncio.run(scenario())


def test_what_is_on_its_way_when_a_watch_is_ended_is_not_told():
    async def scenario() -> None:
        server, told = Server(), Listener()
        watch = begun(server, told)
        server.changes.put(("ADDED", named("a", "12")))
        # The thread has told the loop of it when it asks for the next one, and the loop has not run.
        wait_here(lambda: server.asked_from[-1:] == ["12"])
        watch.end()
        await until(lambda: not watch_threads())
        assert told.events == []

    asyncio.run(scenario())


def test_what_comes_while_the_loop_is_busy_is_delivered_together_and_in_order(monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        server, told, calls = Server(), Listener(), 0
        loop = asyncio.get_running_loop()
        real = loop.call_soon_threadsafe

        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            return real(*arguments, **keywords)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        watch = begun(server, told)
        names = [f"pod-{number}" for number in range(200)]
        for number, name in enumerate(names):
            server.changes.put(("ADDED", named(name, str(100 + number))))
        wait_here(lambda: server.asked_from[-1:] == ["299"])
        assert (calls, told.events) == (1, [])
        await until(lambda: told.all == names)
        server.changes.put(("ADDED", named("late", "300")))
        await until(lambda: told.all == [*names, "late"])
        assert calls == 2
        watch.end()

    asyncio.run(scenario())


def test_news_that_can_not_be_taken_in_takes_none_of_the_rest_with_it(caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        server, told = Server(), Listener()
        told.indigestible = {"b"}
        watch = begun(server, told)
        for name, version in (("a", "11"), ("b", "12"), ("c", "13")):
            server.changes.put(("ADDED", named(name, version)))
        wait_here(lambda: server.asked_from[-1:] == ["13"])
        await until(lambda: told.all == ["a", "c"])
        assert server.num_lists == 0
        watch.end()

    asyncio.run(scenario())
    assert "a defect at b" in caplog.text


def test_a_loop_that_has_ended_ends_its_watches():
    server, told = Server(), Listener()

    async def scenario() -> None:
        begun(server, told)
        # One whose watch tells nothing any more, and one that has something to tell.
        begun(Silent(), told)

    asyncio.run(scenario())
    server.changes.put(("ADDED", named("a", "12")))
    wait_here(lambda: not watch_threads())
    assert told.events == []


class Silent(Server):
    """Tells nothing."""

    def watch(self, _kind: Any, _namespace: Any, _label: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        return iter(())
