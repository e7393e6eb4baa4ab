"""Work for many peers on a few threads: one job of a peer at a time, and jobs that wait hold no thread.

Each peer has a lane: its jobs run one after another, and peers take turns on the threads. A job that can't go on parks.
Its lane goes on with the next one, and `wake` puts it back behind the others.

A peer that is frozen or gone holds its thread until the TransferEngine gives up. So the lanes of one group, which are
the ranks of one engine and freeze together, never get all threads, and nor do all the groups together that were slow:

    running(group) < max(1, threads - 1);    a slow group also needs  running(all slow groups) < max(1, threads - 1)
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Job", "Lanes", "may_run"]

#: A group is slow while a turn of it takes longer than this, and until one takes less.
SLOW_S = 2.0
#: Slow groups that are remembered; beyond it the oldest counts as quick again.
_MAX_SLOW = 1024


class Job(Protocol):
    """Something that is done in one or more turns."""

    @property
    def lane(self) -> str:
        """The peer that it is for."""
        ...

    @property
    def group(self) -> str:
        """What shares the peer's fate: its engine."""
        ...

    def turn(self) -> bool:
        """Do as much as possible. Return whether the job is over; else it is parked until it is woken. Never raises."""
        ...


@dataclass(slots=True, eq=False)
class _Place:
    """Where a job stands: `parked`, or else queued or running; `woken` while it ran."""

    job: Job
    parked: bool = False
    woken: bool = False


@dataclass(slots=True)
class _Lane:
    waiting: deque[_Place] = field(default_factory=deque[_Place])
    running: bool = False


def may_run(group: str, running: Mapping[str, int], slow: Set[str], num_threads: int) -> bool:
    """Tell whether a lane of this group may take a free thread. `running`: threads that each group has."""
    limit = max(1, num_threads - 1)
    if running.get(group, 0) >= limit:
        return False
    return group not in slow or sum(running.get(other, 0) for other in slow) < limit


class Lanes:
    """Runs jobs on `num_threads` threads. Safe to call from any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._ready: deque[str] = deque()
        self._turns: dict[str, tuple[str, float]] = {}
        self._slow: dict[str, None] = {}
        self._lanes: dict[str, _Lane] = {}
        self._places: dict[Job, _Place] = {}

    def add(self, job: Job) -> None:
        """Queue a job behind the others of its lane. It has to be hashable by identity."""
        with self._lock:
            place = self._places[job] = _Place(job)
            self._queue(place)

    def wake(self, job: Job) -> None:
        """Give a parked job another turn; one that runs gets it when it parks. Ignored for a job that is over."""
        with self._lock:
            place = self._places.get(job)
            if place is None:
                return
            if place.parked:
                place.parked = False
                self._queue(place)
            else:
                place.woken = True

    def parked(self) -> list[Job]:
        """Return the jobs that wait to be woken."""
        with self._lock:
            return [place.job for place in self._places.values() if place.parked]

    def close(self) -> None:
        """Take no more turns; those that run are waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _queue(self, place: _Place) -> None:
        lane = self._lanes.setdefault(place.job.lane, _Lane())
        lane.waiting.append(place)
        if not lane.running:
            lane.running = True
            self._ready.append(place.job.lane)
            self._start()

    def _run(self, name: str) -> None:
        """Give the lane's first job a turn, then queue up again behind the other lanes."""
        with self._lock:
            lane = self._lanes[name]
            place = lane.waiting.popleft()
            place.woken = False
        over = place.job.turn()
        with self._lock:
            group, started = self._turns.pop(name)
            self._note(group, took_s=time.monotonic() - started)
            if over:
                del self._places[place.job]
            elif place.woken:
                lane.waiting.append(place)
            else:
                place.parked = True
            if lane.waiting:
                self._ready.append(name)
            else:
                del self._lanes[name]
            self._start()

    def _note(self, group: str, took_s: float) -> None:
        self._slow.pop(group, None)
        if took_s > SLOW_S:
            self._slow[group] = None
            while len(self._slow) > _MAX_SLOW:
                del self._slow[next(iter(self._slow))]

    def _start(self) -> None:
        """Give free threads to the lanes that wait the longest among those that may run."""
        now = time.monotonic()
        slow = self._slow.keys() | {group for group, started in self._turns.values() if now - started > SLOW_S}
        running = Counter(group for group, _ in self._turns.values())
        for name in list(self._ready):
            if len(self._turns) >= self._num_threads:
                return
            group = self._lanes[name].waiting[0].job.group
            if not may_run(group, running, slow, self._num_threads):
                continue
            self._ready.remove(name)
            self._turns[name] = group, now
            running[group] += 1
            try:
                self._pool.submit(self._run, name)
            except RuntimeError:
                return  # closed: nothing is begun any more
