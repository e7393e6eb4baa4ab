"""Which passes the liveness probe takes for stuck: real threads, and a clock that the test sets."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from dcp_operator.calls import STUCK_S, THREADS, Calls
from dcp_operator.client import ApiError
from dcp_operator.observed import Key
from tests.support.operator_process import wait_for

CHAT, OTHER = Key("models", "chat"), Key("models", "other")


class World:
    """Passes whose calls end when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.calls = Calls(clock=lambda: self.now)
        #: Calls that a thread has taken.
        self.taken: list[threading.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, key: Key, does: Callable[[], Awaitable[object]]) -> None:
        async def one_pass() -> None:
            self.calls.begin(key)
            await does()
            self.calls.end(key)

        self._tasks.append(asyncio.create_task(one_pass()))

    async def call(self) -> None:
        """Make a call of a pass that ends when its event in `taken` is set."""
        await self.calls.run(self.hang)

    def hang(self) -> None:
        released = threading.Event()
        self.taken.append(released)
        assert released.wait(60)

    async def has_taken(self, count: int) -> None:
        await asyncio.to_thread(wait_for, f"{count} calls are made", lambda: len(self.taken) == count, 30, 0.01)

    def release_all(self) -> None:
        for released in self.taken:
            released.set()

    async def finish(self) -> None:
        """End all calls, also those that begin meanwhile."""
        for _ in range(3000):
            self.release_all()
            if all(task.done() for task in self._tasks):
                break
            await asyncio.sleep(0.01)
        await asyncio.gather(*self._tasks)


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        world = World()
        try:
            await scenario(world)
        finally:
            await world.finish()
            world.calls.close()

    asyncio.run(whole())


def test_a_pass_whose_call_does_not_end_is_stuck_though_those_of_others_do():
    async def scenario(world: World) -> None:
        world.begin(CHAT, world.call)
        await world.has_taken(1)
        world.now += STUCK_S
        world.begin(OTHER, lambda: world.calls.run(lambda: None))
        await asyncio.gather(*world._tasks[1:])
        assert world.calls.stuck() == []
        world.now += 1
        assert world.calls.stuck() == ["models/chat"]

    run(scenario)


def test_a_pass_that_waits_for_a_thread_is_not_stuck_while_calls_of_others_end():
    async def scenario(world: World) -> None:
        for number in range(THREADS):
            world.begin(Key("models", f"busy-{number}"), world.call)
        await world.has_taken(THREADS)
        world.begin(CHAT, world.call)
        await asyncio.sleep(0)
        world.now += STUCK_S + 1
        assert "models/chat" in world.calls.stuck(), "nothing has ended for as long"
        world.begin(OTHER, world.call)
        world.taken[0].set()
        await world.has_taken(THREADS + 1)
        assert "models/chat" not in world.calls.stuck()
        assert "models/other" not in world.calls.stuck()
        assert "models/busy-1" in world.calls.stuck()

    run(scenario)


def test_a_pass_that_gets_on_is_never_stuck_however_long_it_takes():
    async def scenario(world: World) -> None:
        async def many() -> None:
            for _ in range(5):
                world.now += STUCK_S - 1
                assert world.calls.stuck() == []
                with pytest.raises(ApiError):
                    await world.calls.run(refused)

        def refused() -> None:
            raise ApiError(0, "Unreachable", "the API server does not answer")

        world.begin(CHAT, many)

    run(scenario)


def test_a_pass_that_makes_no_call_is_stuck_whatever_is_asked_beside_it():
    async def scenario(world: World) -> None:
        never = asyncio.Event()
        world.begin(CHAT, never.wait)
        await asyncio.sleep(0)
        world.now += STUCK_S + 1
        await world.calls.ask(lambda: None)
        assert world.calls.stuck() == ["models/chat"]
        never.set()

    run(scenario)


def test_what_a_task_of_a_pass_does_counts_for_that_pass():
    async def scenario(world: World) -> None:
        async def together() -> None:
            await asyncio.gather(world.call(), world.call())

        world.begin(CHAT, together)
        await world.has_taken(2)
        world.now += STUCK_S
        world.taken[0].set()
        await asyncio.to_thread(wait_for, "it has ended", lambda: world.calls._ended == world.now, 30, 0.01)
        world.now += 1
        assert world.calls.stuck() == []

    run(scenario)
