"""One write in flight while the next is prepared.

The calling thread gathers, a thread of the wire waits for the TransferEngine.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class Wire:
    """The threads that wait for the TransferEngine."""

    def __init__(self, num_threads: int) -> None:
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dcp-wire")

    def close(self) -> None:
        """Wait for the writes in flight."""
        self.pool.shutdown(wait=True, cancel_futures=True)


class Pipe:
    """Context within which at most one write is in flight, and after which none is."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._pending: Future[None] | None = None

    def push(self, write: Callable[[], None]) -> None:
        """Wait for the write before, raise what it raised, and start this one."""
        self.drain()
        self._pending = self._wire.pool.submit(write)

    def drain(self) -> None:
        """Wait for the write in flight and raise what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Whatever the caller raised: nothing is in flight afterwards, and a failed write, of which parts may still be
        # under way, is never hidden behind it.
        self.drain()
