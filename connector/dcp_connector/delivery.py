"""One pull on its way out: what was asked, and what decode has said about it since. Thread-safe."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dcp_connector.errors import PeerError, Reason
from dcp_connector.flow import Outflow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from dcp_connector.paths import Path
    from dcp_connector.requests_prefill import Write
    from dcp_connector.tensors import Fence
    from dcp_connector.wire import Grant


class Delivery:
    """A job of its peer's lane (`lanes.Job`); `advance(delivery)` gives it a turn.

    `steps`, `started` and `path` belong to the thread that has the turn.
    """

    def __init__(self, write: Write, fence: Fence | None, advance: Callable[[Delivery], bool]) -> None:
        self.write = write
        self.fence = fence
        self.steps: Generator[None, None, int] | None = None
        self.started = 0.0
        self.path: Path = "direct"
        self._advance = advance
        self._lock = threading.Lock()
        self._halted = False
        self._grant: Grant | None = None
        self._flow: Outflow | None = None

    @property
    def lane(self) -> str:
        """The peer's TransferEngine segment."""
        return self.write.pull.segment

    @property
    def group(self) -> str:
        """The decode engine, whose ranks live and freeze together."""
        return self.write.pull.decode_engine

    def turn(self) -> bool:
        """Go on until the pull is over or waits for decode."""
        return self._advance(self)

    def halt(self) -> None:
        """Decode gave the pull up."""
        with self._lock:
            self._halted = True

    def check(self) -> None:
        """Raise PeerError if the pull must not go on: given up, or past its deadline."""
        with self._lock:
            halted = self._halted
        if halted:
            raise PeerError(Reason.CANCELLED, "decode gave the pull up")
        if time.monotonic() >= self.write.deadline:
            raise PeerError(Reason.DEADLINE, "decode's deadline passed before everything was written")

    @property
    def grant(self) -> Grant | None:
        """Decode's answer to Want."""
        with self._lock:
            return self._grant

    def granted(self, grant: Grant) -> bool:
        """Keep decode's answer and return True, if it is the first one."""
        with self._lock:
            if self._grant is not None:
                return False
            self._grant = grant
            return True

    def open(self, num_chunks: int, num_slots: int) -> None:
        """Start counting chunks."""
        with self._lock:
            self._flow = Outflow(num_chunks, num_slots)

    def taken(self, number: int) -> bool:
        """Decode has read a chunk. Return whether any are being counted."""
        with self._lock:
            if self._flow is None:
                return False
            self._flow.taken(number)
            return True

    def next_chunk(self) -> tuple[int, int] | None:
        """Return (number, slot) of the chunk to write next, as `Outflow.next_chunk`."""
        with self._lock:
            return self._opened().next_chunk()

    def wrote(self) -> None:
        """The chunk that `next_chunk` returned is on its way."""
        with self._lock:
            self._opened().wrote()

    @property
    def complete(self) -> bool:
        """Whether every chunk was written."""
        with self._lock:
            return self._opened().complete

    def _opened(self) -> Outflow:
        assert self._flow is not None, "open() comes before the first chunk"
        return self._flow
