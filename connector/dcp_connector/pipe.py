"""One write in flight while the next is prepared, on threads that yield to everybody else.

Mooncake's synchronous write waits by polling without a pause. On a machine whose cores are all busy that thread takes
the time of the very threads that move the bytes, its own I/O thread first. At a lower priority it polls only on time
that nobody else wants: on two cores this gained a factor of 1.2 to 1.5, and an engine that is busy loses nothing to it.
Gathering stays on the calling thread, at normal priority.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

logger = logging.getLogger(__name__)

#: Like `nice -n 10`; the engine itself normally runs at 0.
_NICENESS = 10


class Wire:
    """The threads that wait for the TransferEngine."""

    def __init__(self, num_threads: int) -> None:
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dcp-wire", initializer=_yield_to_others)

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


def _yield_to_others() -> None:
    thread = threading.get_native_id()
    try:
        # Not less than the process has: a superuser's thread could raise itself that way.
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
    except OSError as error:
        logger.info("dcp: can't lower the priority of a sending thread: %s; transfers may be slower", error)
