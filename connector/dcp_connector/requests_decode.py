"""The life of a load on a decode rank: events in, actions out. No clock, no I/O, no threads.

    Load ─> Resolve ─> resolved ─> Send(Pull) to every source ─> Done from all ─> Finished (good)
                  └─> unresolved ───────────────────────────────────────────────> Finished (failed)
    Failed from one, deadline, abort, peer lost ─> Send(Cancel) to the others
        ├─> each confirms that it has stopped ──────────────> Finished (failed or aborted, confirmed)
        └─> the grace is over ─> Finished (unconfirmed) ─> Cancel and Probe again and again ─> Cleared

A writer begins no batch after its own deadline, but one that doesn't answer may be in the middle of a batch. The
request doesn't wait for it longer than the grace. Its blocks do: after an unconfirmed Finished they must stay out of
use until Cleared, which comes when every writer has answered or is known to have ended, and at the latest

    load + request_timeout_s + longest_write_s

A request is reported finished exactly once, and only if it was loaded here. Cleared follows an unconfirmed Finished
exactly once.
"""

import heapq
from dataclasses import dataclass, field

import msgspec

from dcp_connector.errors import PeerError, Reason
from dcp_connector.wire import Cancel, Done, Failed, Pull, Settled


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [start, end) of a request are to come from prefill into `block_ids` (the whole block table).

    `digest` is that of the prompt's first `end` tokens (`wire.token_digest`).
    """

    request_id: str
    transfer_id: str
    bootstrap_addr: str
    engine_id: str | None
    block_ids: tuple[int, ...]
    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Resolve:
    """Find out who is behind the load's bootstrap address and which ranks to ask; answer with `resolved`."""

    load: Load


@dataclass(frozen=True, slots=True)
class Ask:
    """One pull and the control address that it goes to. `budget_s` is filled in when it is sent."""

    address: str
    pull: Pull


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a prefill rank's control address."""

    address: str
    message: Pull | Cancel


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether the process behind a control address has ended; if so, answer with `gone`."""

    address: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """The load ended before anything was asked for: prefill should learn that it need not keep the blocks."""

    load: Load


@dataclass(frozen=True, slots=True)
class Finished:
    """The load is over.

    `reason` is None when all KV arrived. `aborted` loads failed on request. Unless it is `confirmed` that nobody writes
    any more, the blocks must not be used by anyone before `Cleared`.
    """

    load: Load
    reason: Reason | None
    detail: str
    aborted: bool
    confirmed: bool


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nobody writes into the blocks of an unconfirmed load any more. Not `confirmed`: time alone says so."""

    load: Load
    confirmed: bool


Action = Resolve | Send | Probe | Abandon | Finished | Cleared


@dataclass(slots=True)
class _State:
    load: Load
    #: when `tick` has something to do: the deadline, the end of the grace, the next Cancel
    wake: float
    #: when the blocks are free whatever the writers say
    limit: float
    resolved: bool = False
    pending: dict[str, Ask] = field(default_factory=dict[str, Ask])
    failure: PeerError | None = None
    aborted: bool = False
    finished: bool = False
    #: parts of a failed batch may arrive until then
    quiet_at: float = float("-inf")


class DecodeRequests:
    """All loads of one decode rank. Times are seconds of any monotonic clock, given to every call.

    `longest_write_s`: how long after the deadline a writer may write at most, see `transfer.LONGEST_WRITE_S`.
    """

    def __init__(self, request_timeout_s: float, cancel_grace_s: float, longest_write_s: float) -> None:
        self._timeout_s = request_timeout_s
        self._grace_s = cancel_grace_s
        self._longest_write_s = longest_write_s
        self._states: dict[str, _State] = {}
        self._unclear: dict[str, _State] = {}
        self._pulls: dict[str, _State] = {}
        self._timers: list[tuple[float, str]] = []

    @property
    def num_loading(self) -> int:
        """Loads that are not finished."""
        return len(self._states)

    @property
    def num_unclear(self) -> int:
        """Finished loads whose blocks a writer may still write into."""
        return len(self._unclear)

    def next_timer(self) -> float | None:
        """Return when `tick` has something to do at the earliest, or None."""
        return self._timers[0][0] if self._timers else None

    def load(self, load: Load, now: float) -> list[Action]:
        """vLLM has allocated the blocks and waits. A second load of a request that is still known is ignored."""
        if load.request_id in self._states or load.request_id in self._unclear:
            return []
        deadline = now + self._timeout_s
        state = self._states[load.request_id] = _State(load, deadline, deadline + self._longest_write_s)
        self._wake(state, deadline)
        return [Resolve(load)]

    def resolved(self, request_id: str, asks: tuple[Ask, ...], now: float) -> list[Action]:
        """The sources are known. With none of them the load is complete: this rank has no token of the range."""
        state = self._states.get(request_id)
        if state is None or state.resolved:
            return []
        state.resolved = True
        actions: list[Action] = []
        for ask in asks:
            state.pending[ask.pull.pull_id] = ask
            self._pulls[ask.pull.pull_id] = state
            actions.append(Send(ask.address, with_budget(ask.pull, state.wake - now)))
        return actions + self._advance(state, now)

    def unresolved(self, request_id: str, error: PeerError, now: float) -> list[Action]:
        """The sources can't be found or don't fit."""
        state = self._states.get(request_id)
        if state is None or state.resolved:
            return []
        state.failure = error
        actions = self._advance(state, now)
        # Only a peer that was reached can be told; the others' lease ends it.
        return [*actions, Abandon(state.load)] if error.reason is Reason.INCOMPATIBLE else actions

    def done(self, message: Done, now: float) -> list[Action]:
        """A source has written everything."""
        state = self._settle(message.pull_id)
        return self._advance(state, now) if state else []

    def settled(self, message: Settled, now: float) -> list[Action]:
        """A source confirms that nothing of a cancelled pull is in flight."""
        state = self._settle(message.pull_id)
        if state is None:
            return []
        # A source that stopped without being asked to has not delivered either.
        return self._give_up(state, PeerError(Reason.CANCELLED, "prefill gave the pull up"), now)

    def failed(self, message: Failed, now: float) -> list[Action]:
        """A source could not deliver; the others are told to stop."""
        state = self._settle(message.pull_id)
        if state is None:
            return []
        if message.quiet_s > 0:
            state.quiet_at = max(state.quiet_at, now + message.quiet_s)
        return self._give_up(state, PeerError(message.reason, message.detail), now)

    def abort(self, request_id: str, now: float) -> list[Action]:
        """The client is gone. Unknown requests are ignored: they finished, or were never loaded."""
        state = self._states.get(request_id)
        if state is None or state.aborted:
            return []
        state.aborted = True
        gone = PeerError(Reason.CANCELLED, "decode gave the request up")
        if not state.resolved:
            return [*self._give_up(state, gone, now), Abandon(state.load)]
        return self._give_up(state, gone, now)

    def peer_lost(self, address: str, detail: str, now: float) -> list[Action]:
        """The control connection to a prefill rank broke: its pulls won't be answered."""
        actions: list[Action] = []
        for state in self._waiting_on(address):
            if state.failure is None:
                actions += [*self._give_up(state, PeerError(Reason.PEER_LOST, detail), now), Probe(address)]
        return actions

    def gone(self, address: str, now: float) -> list[Action]:
        """The process behind a prefill rank's address has ended. What it sent before arrives within the grace."""
        actions: list[Action] = []
        for state in self._waiting_on(address):
            for pull_id in [pull_id for pull_id, ask in state.pending.items() if ask.address == address]:
                self._settle(pull_id)
            state.quiet_at = max(state.quiet_at, now + self._grace_s)
            actions += self._give_up(state, PeerError(Reason.PEER_LOST, f"the process at {address} has ended"), now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Let deadlines and graces run out. Call at `next_timer` or later."""
        actions: list[Action] = []
        while self._timers and self._timers[0][0] <= now:
            _, request_id = heapq.heappop(self._timers)
            state = self._states.get(request_id) or self._unclear.get(request_id)
            if state is not None and state.wake <= now:
                actions += self._run_out(state, now)
        return actions

    def _run_out(self, state: _State, now: float) -> list[Action]:
        if state.finished:
            return self._chase(state, now)
        if state.failure is not None:
            return self._finish(state, now)
        late = PeerError(Reason.DEADLINE, f"the KV did not arrive within {self._timeout_s:g} s")
        actions = self._give_up(state, late, now)
        return actions if state.resolved else [*actions, Abandon(state.load)]

    def _give_up(self, state: _State, error: PeerError, now: float) -> list[Action]:
        """Cancel what is pending and wait for the confirmations, but no longer than the grace."""
        if state.failure is not None:
            return self._advance(state, now)
        state.failure = error
        if state.pending:
            self._wake(state, now + self._grace_s)
        return [*_cancels(state), *self._advance(state, now)]

    def _advance(self, state: _State, now: float) -> list[Action]:
        """Finish or clear a load that waits for nobody any more."""
        if state.pending:
            return []
        if not state.finished:
            return self._finish(state, now)
        return self._chase(state, now) if state.quiet_at <= now else []

    def _finish(self, state: _State, now: float) -> list[Action]:
        """Report the load; its blocks are followed further if someone may still write into them."""
        state.finished = True
        confirmed = not state.pending and state.quiet_at <= now
        del self._states[state.load.request_id]
        failure = state.failure
        reason, detail = (failure.reason, failure.detail) if failure else (None, "")
        over = Finished(state.load, reason, detail, state.aborted, confirmed)
        if confirmed:
            return [over]
        self._unclear[state.load.request_id] = state
        return [over, *self._chase(state, now)]

    def _chase(self, state: _State, now: float) -> list[Action]:
        """Ask the writers of a finished load again whether they have stopped, or clear its blocks."""
        confirmed = not state.pending and state.quiet_at <= now
        if confirmed or now >= state.limit:
            for pull_id in list(state.pending):
                self._settle(pull_id)
            del self._unclear[state.load.request_id]
            return [Cleared(state.load, confirmed)]
        again = now + self._grace_s if state.pending else state.quiet_at
        self._wake(state, min(again, state.limit))
        addresses = dict.fromkeys(ask.address for ask in state.pending.values())
        return [*_cancels(state), *(Probe(address) for address in addresses)]

    def _settle(self, pull_id: str) -> _State | None:
        state = self._pulls.pop(pull_id, None)
        if state is not None:
            del state.pending[pull_id]
        return state

    def _waiting_on(self, address: str) -> list[_State]:
        every = [*self._states.values(), *self._unclear.values()]
        return [state for state in every if any(ask.address == address for ask in state.pending.values())]

    def _wake(self, state: _State, when: float) -> None:
        state.wake = when
        heapq.heappush(self._timers, (when, state.load.request_id))


def _cancels(state: _State) -> list[Action]:
    return [
        Send(ask.address, Cancel(pull_id, ask.pull.transfer_id, ask.pull.prefill_engine, ask.pull.prefill_rank))
        for pull_id, ask in state.pending.items()
    ]


def with_budget(pull: Pull, budget_s: float) -> Pull:
    """Return the pull with its budget."""
    return msgspec.structs.replace(pull, budget_s=max(0.0, budget_s))
