"""The loop of tasks: it wakes on events, repairs, backs off and ends, with a simulated API server behind it."""

import asyncio
import copy
import itertools

import pytest

from dcp_operator.client import ApiError
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, SERVICE
from dcp_operator.observed import Key
from dcp_operator.reconciler import BACKOFF_MAX_S, Reconciler, backoff
from dcp_operator.target import Operator
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi

CHAT = Key("models", "chat")


class Loop:
    """A running reconciler, and the watch that tells it what happens."""

    def __init__(self) -> None:
        self.api = SimulatedApi()
        keys = itertools.count()
        self.reconciler = Reconciler(
            self.api,  # type: ignore[arg-type] - the simulated server has the same calls
            Operator("acme/operator:1"),
            now=lambda: "2026-01-01T00:00:00Z",
            fresh_key=lambda: f"a2V5{next(keys)}".ljust(8, "="),
        )

    def put(self, body: dict) -> dict:
        stored = self.api.put(body)
        self.tell("MODIFIED", stored)
        return stored

    def tell(self, event: str | None, body: dict) -> None:
        kind = next(kind for kind in WATCHED_KINDS if kind.kind == body["kind"])
        self.reconciler.on_event(kind, event, copy.deepcopy(body))

    async def until(self, condition, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_an_object_that_exists_at_the_start_is_looked_after(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        assert len(loop.api.children()) == 8
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_an_event_before_everything_is_listed_makes_nothing(loop: Loop):
    async def scenario() -> None:
        loop.tell("ADDED", loop.api.put(owner()))
        await asyncio.sleep(0.05)
        assert loop.api.writes == []

    asyncio.run(scenario())


def test_a_deleted_child_is_made_again(loop: Loop):
    async def scenario() -> None:
        await loop.reconciler.start()
        loop.put(owner())
        await loop.until(lambda: (SERVICE.kind, "chat") in loop.api.children())
        await loop.until(lambda: "status" in loop.api.owner())
        service = loop.api.objects[SERVICE.kind, "models", "chat"]
        loop.api.remove(SERVICE.kind, "models", "chat")
        loop.tell("DELETED", service)
        await loop.until(lambda: (SERVICE.kind, "chat") in loop.api.children())
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_a_deletion_that_no_event_told_is_found_when_the_watch_begins_anew(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        loop.api.remove(SERVICE.kind, "models", "chat")
        other = {"kind": "Service", "metadata": {"name": "x", "namespace": "models", "uid": "x"}, "spec": {}}
        loop.tell(None, loop.api.put(other))
        await loop.until(lambda: (SERVICE.kind, "chat") in loop.api.children())
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_many_events_are_few_passes(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        passes = 0
        real = loop.reconciler.reconcile

        async def counted(key: Key) -> bool:
            nonlocal passes
            passes += 1
            await asyncio.sleep(0.05)
            return await real(key)

        loop.reconciler.reconcile = counted  # type: ignore[method-assign]
        for _ in range(100):
            loop.reconciler.wake(CHAT)
        await asyncio.sleep(0.3)
        assert passes <= 2
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_an_edit_during_a_pass_is_not_reported_as_done(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        real = loop.api.apply

        def edited_meanwhile(*arguments, **keywords):
            loop.api.apply = real  # type: ignore[method-assign]
            edited = {**copy.deepcopy(loop.api.owner()), "spec": spec(image="acme/engine:2")}
            stored = loop.api.put(edited)
            loop.reconciler._cache.store(stored)
            return real(*arguments, **keywords)

        loop.api.apply = edited_meanwhile  # type: ignore[method-assign]
        await loop.until(lambda: loop.api.owner().get("status", {}).get("observedGeneration") == 2)
        assert all(condition["observedGeneration"] == 2 for condition in loop.api.owner()["status"]["conditions"])
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_the_task_ends_with_the_object(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        gone = loop.api.owner()
        loop.api.remove(DEPLOYMENT_OF_ENGINES.kind, "models", "chat")
        loop.tell("DELETED", gone)
        await loop.until(lambda: not loop.reconciler._tasks)
        assert not loop.reconciler._wakers
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_a_defect_in_one_pass_ends_neither_its_object_nor_the_others(loop: Loop, caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        loop.api.put(owner("chat"))
        loop.api.put(owner("other"))
        real = loop.reconciler.reconcile
        failed = []

        async def defective(key: Key) -> bool:
            if key.name == "chat" and not failed:
                failed.append(key)
                raise RuntimeError("a defect")
            return await real(key)

        loop.reconciler.reconcile = defective  # type: ignore[method-assign]
        await loop.reconciler.start()
        await loop.until(lambda: all("status" in loop.api.owner(name) for name in ("chat", "other")))
        await loop.reconciler.stop()

    asyncio.run(scenario())
    assert "pass failed object=models/chat" in caplog.text


def test_what_cannot_be_listed_keeps_the_loop_from_starting(loop: Loop):
    def refuse(*arguments) -> None:
        raise ApiError(403, "Forbidden", 'User "x" cannot list resource "secrets"')

    loop.api.list = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(ApiError, match="cannot list"):
        asyncio.run(loop.reconciler.start())


def test_pauses_grow_and_have_an_end():
    pauses = [backoff(failures) for failures in range(1, 12)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == backoff(10**6) == BACKOFF_MAX_S


def test_a_pass_that_does_not_end_is_reported_by_the_liveness_probe(loop: Loop, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        loop.api.put(owner())
        hanging = asyncio.Event()

        async def hangs(key: Key) -> bool:
            await hanging.wait()
            return True

        loop.reconciler.reconcile = hangs  # type: ignore[method-assign]
        await loop.reconciler.start()
        await asyncio.sleep(0.05)
        assert loop.reconciler.stuck() == []
        monkeypatch.setattr("dcp_operator.reconciler.STUCK_S", 0.01)
        assert loop.reconciler.stuck() == [CHAT]
        await loop.reconciler.stop()

    asyncio.run(scenario())
