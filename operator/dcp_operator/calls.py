"""The blocking calls of the passes, made in threads, and whether the passes get on that are made of them."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final

from dcp_operator.observed import Key

#: A pass that does nothing for longer is stuck: the liveness probe fails. A call that is not answered ends much sooner.
STUCK_S: Final = 180.0
#: Calls that are made at the same time.
THREADS: Final = 8


class _Pass:
    """How one pass over an object gets on."""

    def __init__(self, now: float) -> None:
        #: When it began, or a call of it did or ended.
        self.moved = now
        #: Its calls that no thread has taken yet.
        self.queued: set[object] = set()


_PRESENT: ContextVar[_Pass | None] = ContextVar("pass", default=None)


class Calls:
    """Makes calls in a few threads. A pass whose call waits for one is not stuck while calls of others end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="api")
        self._clock = clock
        self._passes: dict[Key, _Pass] = {}
        #: When a call of any pass ended last, well or not.
        self._ended = -math.inf

    def begin(self, key: Key) -> None:
        """Take in that a pass over an object begins. The calls of this task, and of its own tasks, are that pass's."""
        present = self._passes[key] = _Pass(self._clock())
        _PRESENT.set(present)

    def end(self, key: Key) -> None:
        """Take in that no pass is made over an object."""
        self._passes.pop(key, None)

    def stuck(self) -> list[str]:
        """Return the objects whose pass does not get on. Safe from every thread."""
        before = self._clock() - STUCK_S
        return sorted(
            str(key)
            for key, present in list(self._passes.items())
            if present.moved < before and (not present.queued or self._ended < before)
        )

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call of a pass."""
        present, turn = _PRESENT.get() or _Pass(self._clock()), object()

        def call() -> Any:
            present.queued.discard(turn)
            present.moved = self._clock()
            return function(*arguments)

        present.queued.add(turn)
        try:
            return await self.ask(call)
        finally:
            present.queued.discard(turn)
            present.moved = self._ended = self._clock()

    async def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call beside the passes, which says nothing about how they get on."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def give_way(self, seconds: float) -> None:
        """Leave the API server to others for a while, in the middle of a pass."""
        await asyncio.sleep(seconds)

    def close(self) -> None:
        """End the threads; a call that has begun is finished."""
        self._pool.shutdown(wait=True)
