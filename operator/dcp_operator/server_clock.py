"""The API server's clock, which writes the times that the operator's decisions compare with.

Deletion times, for one, are the API server's. Compared with the clock of the operator's own node they would be wrong by
as much as the two clocks differ, and all at once when that node's clock is set.
"""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from dcp_operator.times import written


class ServerClock:
    """Tells the time of the last answer's Date (RFC 9110, 6.6.1), carried on by a clock that is never set.

    Behind the API server by less than a second, as Date has no fractions, and never going back while its clock doesn't.
    Until an answer has told a time, the machine's own clock is believed. Safe from several threads.
    """

    def __init__(
        self,
        own: Callable[[], datetime] = lambda: datetime.now(UTC),
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._steady_s = steady_s
        self._lock = threading.Lock()
        #: What the API server said last, and when by the steady clock.
        self._heard: tuple[datetime, float] | None = None

    def hear(self, date: str | None) -> None:
        """Take in the Date of an answer that has just come; one that is none is left out."""
        try:
            told = parsedate_to_datetime(date or "").astimezone(UTC)
        except ValueError:
            return
        with self._lock:
            self._heard = told, self._steady_s()

    def now(self) -> str:
        """Return the time as RFC 3339, in whole seconds."""
        with self._lock:
            heard = self._heard
        if heard is None:
            return written(self._own())
        told, at_s = heard
        return written(told + timedelta(seconds=self._steady_s() - at_s))
