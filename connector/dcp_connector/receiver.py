"""Decode's side of the scatter path: staging memory for writers, and the rows that they put there into the pages.

    Want  ─> plan ─> slots of staging memory are free ─> Grant ─> Chunk ─> scatter ─> Taken ─> ... ─> Done
                └─> no staging memory for this pull ───> Grant of no slots: prefill takes another path

A pull that wants slots while all are in use waits for them and holds nothing meanwhile. Slots stay a pull's own until
nothing of it can be in flight: a late write may land in staging memory, but never in a slot that is another pull's by
then. So a prefill engine that froze may keep slots for long. One engine can't have them all, and when only pulls that
were given up hold what a pull waits for, it is told to take another path.

The answer that ends a pull (Done, Failed, Settled) is held back until this rank is done with it too: until every chunk
was scattered, or, when the pull ends without all of them, until no thread works on one. So the request's state machine
sees one kind of pull, whatever its path.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dcp_connector.chunks import staged
from dcp_connector.errors import PeerError, Reason
from dcp_connector.flow import Inflow
from dcp_connector.pulls import LandingPlan, plan_landing
from dcp_connector.units import LayoutError
from dcp_connector.wire import Cancel, Chunk, Done, Failed, Grant, Pull, Settled, Taken, Want

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcp_connector.geometry import SideLayout
    from dcp_connector.staging import Staging
    from dcp_connector.stats import Counters

logger = logging.getLogger(__name__)

#: Slots of one pull at most: one is written while another is emptied, and two are under way in messages.
MAX_SLOTS_PER_PULL = 4

Answer = Done | Failed | Settled


def slots_of_one_engine(num_slots: int) -> int:
    """Return how many slots the pulls from one prefill engine may hold together: all but those of one more pull."""
    return num_slots - min(MAX_SLOTS_PER_PULL, num_slots // 2)


@dataclass(slots=True, eq=False)
class _Landing:
    """One pull that may come by the scatter path."""

    request_id: str
    address: str
    pull: Pull
    prefill: SideLayout
    asked: bool = False
    chunk_bytes: int = 0
    plan: LandingPlan | None = None
    slots: tuple[int, ...] = ()
    flow: Inflow | None = None
    halted: bool = False
    answer: Answer | None = None
    #: why a chunk could not be scattered
    broken: str = ""

    @property
    def quiet(self) -> bool:
        """Whether no thread works on a chunk."""
        return self.flow is None or self.flow.quiet

    def halt(self) -> None:
        """Scatter nothing more."""
        self.halted = True
        if self.flow is not None:
            self.flow.halt()


@dataclass(slots=True)
class _Leaving:
    """A request that is over and waits until no thread works on its chunks."""

    landings: list[_Landing]
    then: Callable[[], None]


@dataclass(slots=True)
class _Requests:
    by_pull: dict[str, _Landing] = field(default_factory=dict[str, _Landing])
    by_request: dict[str, list[_Landing]] = field(default_factory=dict[str, list[_Landing]])


class Receiver:
    """All scattering of one decode rank. Every method is for the loop's thread.

    `call` runs work on the loop's thread, `send(address, message)` reaches a prefill rank, `deliver` takes an answer
    that was held back. Without `staging` every writer is told to take another path.
    """

    def __init__(
        self,
        staging: Staging | None,
        num_threads: int,
        counters: Counters,
        call: Callable[[Callable[[], None]], None],
        send: Callable[[str, Grant | Taken | Cancel], None],
        deliver: Callable[[Answer], None],
    ) -> None:
        self._staging = staging
        self._counters = counters
        self._call = call
        self._send = send
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="dcp-scatter")
        # A stack: memory that was used last is in a cache, and memory that was never needed is never touched.
        self._free = list(range(staging.num_slots if staging else 0))
        self._holders: list[_Landing] = []
        self._waiting: list[_Landing] = []
        self._known = _Requests()
        self._leaving: list[_Leaving] = []

    @property
    def num_free_slots(self) -> int:
        """Slots that no pull holds."""
        return len(self._free)

    def expect(self, request_id: str, address: str, pull: Pull, prefill: SideLayout) -> None:
        """A pull is about to be sent to a prefill rank; it may come by the scatter path."""
        if self._staging is not None:
            landing = _Landing(request_id, address, pull, prefill)
            self._known.by_pull[pull.pull_id] = landing
            self._known.by_request.setdefault(request_id, []).append(landing)

    def wanted(self, address: str, message: Want) -> None:
        """A writer would use staging memory. Ignored for a pull that is over, or that asked already."""
        landing = self._known.by_pull.get(message.pull_id)
        if self._staging is None:
            self._send(address, Grant(message.pull_id, (), 1))
        elif landing is not None and not landing.asked and not landing.halted:
            landing.asked = True
            landing.chunk_bytes = min(message.chunk_bytes, self._staging.slot_bytes)
            self._pool.submit(self._plan, landing)

    def chunk(self, message: Chunk) -> bool:
        """A chunk lies in its slot. Return False if it can't be: a wrong number, or a pull that is over."""
        landing = self._known.by_pull.get(message.pull_id)
        slot = landing.flow.begin(message.number) if landing and landing.flow else None
        if landing is None or slot is None:
            return False
        self._pool.submit(self._scatter, landing, message.number, landing.slots[slot])
        return True

    def holds_back(self, answer: Answer) -> bool:
        """Take an answer that ends a pull, if it has to wait; `deliver` gets it later."""
        landing = self._known.by_pull.get(answer.pull_id)
        if landing is None or landing.flow is None:
            return False
        landing.answer = answer
        if not isinstance(answer, Done):
            landing.halt()
        self._settle(landing)
        self._grant()
        return True

    def halt(self, pull_id: str) -> None:
        """The pull is given up: nothing of it is scattered any more."""
        landing = self._known.by_pull.get(pull_id)
        if landing is not None:
            landing.halt()
            self._settle(landing)
            self._grant()

    def when_quiet(self, request_id: str, then: Callable[[], None]) -> None:
        """Scatter nothing more for a request that ends, and call `then` once no thread writes into its blocks."""
        landings = self._known.by_request.get(request_id, [])
        for landing in landings:
            landing.halt()
        self._leaving.append(_Leaving(landings, then))
        self._let_go()
        self._grant()

    def forget(self, request_id: str) -> None:
        """No writer has anything in flight for a request any more, and no thread of this rank: its slots are free."""
        for landing in self._known.by_request.pop(request_id, []):
            self._known.by_pull.pop(landing.pull.pull_id, None)
            landing.halt()
            self._return_slots(landing)
        self._grant()

    def close(self) -> None:
        """Begin nothing more and wait for what runs."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _settle(self, landing: _Landing) -> None:
        """Pass a held answer on when nothing is left to do."""
        answer, flow = landing.answer, landing.flow
        if answer is None or flow is None or not (flow.complete or (landing.halted and flow.quiet)):
            return
        del self._known.by_pull[landing.pull.pull_id]
        if landing.broken:
            quiet_s = answer.quiet_s if isinstance(answer, Failed) else 0.0
            answer = Failed(answer.pull_id, Reason.INTERNAL, landing.broken, quiet_s)
        elif isinstance(answer, Done):
            # Prefill has written everything: nothing can be in flight.
            self._return_slots(landing)
        self._deliver(answer)

    def _let_go(self) -> None:
        over = [request for request in self._leaving if all(landing.quiet for landing in request.landings)]
        for request in over:
            self._leaving.remove(request)
            request.then()

    def _return_slots(self, landing: _Landing) -> None:
        if landing.slots and self._staging is not None:
            self._free.extend(landing.slots)
            self._holders.remove(landing)
            self._counters.change("staging_bytes", -len(landing.slots) * self._staging.slot_bytes)
            landing.slots = ()

    def _planned(self, landing: _Landing, plan: LandingPlan | None) -> None:
        if landing.halted:
            return
        if plan is None or not plan.chunks:
            self._send(landing.address, Grant(landing.pull.pull_id, (), 1))
            return
        landing.plan = plan
        self._waiting.append(landing)
        self._grant()

    def _grant(self) -> None:
        """Give free slots to whoever waits for them, in order; what can't get any soon is told so."""
        waiting, self._waiting = self._waiting, []
        for landing in waiting:
            if landing.halted or landing.plan is None or self._staging is None:
                continue
            engine = landing.pull.prefill_engine
            share = [holder for holder in self._holders if holder.pull.prefill_engine == engine]
            room = slots_of_one_engine(self._staging.num_slots) - sum(len(holder.slots) for holder in share)
            count = min(MAX_SLOTS_PER_PULL, len(landing.plan.chunks), len(self._free), room)
            if count > 0:
                self._lease(landing, self._staging, landing.plan, count)
            elif all(holder.halted for holder in (share if self._free else self._holders)):
                self._send(landing.address, Grant(landing.pull.pull_id, (), 1))
            else:
                self._waiting.append(landing)

    def _lease(self, landing: _Landing, staging: Staging, plan: LandingPlan, count: int) -> None:
        landing.slots = tuple(self._free.pop() for _ in range(count))
        landing.flow = Inflow(len(plan.chunks), count)
        self._holders.append(landing)
        self._counters.change("staging_bytes", count * staging.slot_bytes)
        addresses = tuple(staging.address(slot) for slot in landing.slots)
        self._send(landing.address, Grant(landing.pull.pull_id, addresses, landing.chunk_bytes))

    def _scattered(self, landing: _Landing, number: int, problem: str) -> None:
        assert landing.flow is not None, "a chunk is scattered after a grant"
        landing.flow.scattered(number)
        if problem:
            landing.broken = problem
            landing.halt()
            pull = landing.pull
            self._send(landing.address, Cancel(pull.pull_id, pull.transfer_id, pull.prefill_engine, pull.prefill_rank))
        elif not landing.halted and landing.answer is None:
            self._send(landing.address, Taken(landing.pull.pull_id, number))
        self._settle(landing)
        self._let_go()
        self._grant()

    # What is below runs on threads of the pool.

    def _plan(self, landing: _Landing) -> None:
        plan = None
        try:
            plan = plan_landing(landing.pull, landing.prefill, landing.chunk_bytes)
        except (PeerError, LayoutError) as error:
            logger.info("dcp: no staging memory for pull %s: %s", landing.pull.pull_id, error)
        except Exception:
            logger.exception("dcp: planning where pull %s goes failed unexpectedly", landing.pull.pull_id)
        self._call(partial(self._planned, landing, plan))

    def _scatter(self, landing: _Landing, number: int, slot: int) -> None:
        problem = ""
        try:
            assert landing.plan is not None, "a chunk comes after a grant"
            assert self._staging is not None, "a chunk comes after a grant"
            items = staged(landing.plan.chunks[number], landing.plan.entries)
            self._staging.scatter(slot, items, landing.plan.pages)
        except Exception as error:
            logger.exception("dcp: scattering chunk %d of pull %s failed unexpectedly", number, landing.pull.pull_id)
            problem = f"{type(error).__name__}: {error}"
        self._call(partial(self._scattered, landing, number, problem))
