"""Progress lines: what happens, and how long the command has been running."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator

Log = Callable[[str], None]


class Progress:
    """Prints one line per step to standard error, led by the seconds since the command's start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()

    def elapsed_s(self) -> float:
        """Seconds since the command's start."""
        return self._clock() - self._start

    def __call__(self, message: str) -> None:
        """Print one line."""
        # Standard error, so that `env` and `kubectl` keep their standard output for themselves.
        print(f"[{self.elapsed_s():6.1f} s] {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def heartbeat(log: Log, what: str, every_s: float = 20) -> Generator[None]:
    """Say every so often that a long step is still running."""
    start, done = time.monotonic(), threading.Event()

    def beat() -> None:
        while not done.wait(every_s):
            log(f"{what}: {time.monotonic() - start:.0f} s so far")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
