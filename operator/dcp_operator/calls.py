"""The blocking calls of the passes, made in threads, and whether a pass gets on that is made of them."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from dcp_operator.observed import Key

#: A pass that takes longer, while no call of any pass has ended either, is stuck: the liveness probe fails.
STUCK_S: Final = 180.0
#: Calls that are made at the same time.
THREADS: Final = 8


class Calls:
    """Makes calls in a few threads. While calls of passes end, a pass that is old waits for its turn."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="api")
        self._busy_since: dict[Key, float] = {}
        #: When a call of a pass ended last, well or not.
        self._ended = -math.inf

    def begin(self, key: Key) -> None:
        """Take in that a pass over an object begins."""
        self._busy_since[key] = time.monotonic()

    def end(self, key: Key) -> None:
        """Take in that no pass is made over an object."""
        self._busy_since.pop(key, None)

    def stuck(self) -> list[str]:
        """Return the objects whose pass does not get on. Safe from every thread."""
        before = time.monotonic() - STUCK_S
        if self._ended >= before:
            return []
        return sorted(str(key) for key, since in list(self._busy_since.items()) if since < before)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call of a pass."""
        try:
            return await self.ask(function, *arguments)
        finally:
            self._ended = time.monotonic()

    async def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call beside the passes, which says nothing about how they get on."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def give_way(self, seconds: float) -> None:
        """Leave the API server to others for a while, in the middle of a pass."""
        await asyncio.sleep(seconds)

    def close(self) -> None:
        """End the threads; a call that has begun is finished."""
        self._pool.shutdown(wait=True)
