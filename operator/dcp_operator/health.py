"""Whether the controller is alive: judged from outside of its event loop, so that a loop that hangs can be seen.

A task in the loop says every second that it is there; who asks does so in another thread. What else makes a controller
useless while it runs: a pass that does not end, a watch that tells nothing although lists show that there is news, and
a task in the background that has ended.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

#: A loop that says nothing for so long is stuck, in seconds.
LOOP_STUCK_S: Final = 20.0
_BEAT_S: Final = 1.0


class Health:
    """What keeps a process from working. `checks` return what they find, in words."""

    def __init__(self, *checks: Callable[[], Iterable[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._checks = checks
        self._clock = clock
        #: When the loop was heard of last; None before it runs.
        self._heard: float | None = None

    async def keep_beating(self) -> None:
        """Say for ever that the loop runs."""
        while True:
            self._heard = self._clock()
            await asyncio.sleep(_BEAT_S)

    def lag_s(self) -> float:
        """Return for how long the loop has not been heard of beyond what is usual, in seconds."""
        heard = self._heard
        return max(0.0, self._clock() - heard - _BEAT_S) if heard is not None else 0.0

    def problems(self) -> list[str]:
        """Return what is wrong. Safe from every thread."""
        lag_s = self.lag_s()
        if lag_s > LOOP_STUCK_S:
            return [f"the event loop has not run for {lag_s:.0f} s"]
        return [words for check in self._checks for words in check()]
