"""The life of a load on a decode rank: events in, actions out. No clock, no I/O, no threads.

    Load ─> Resolve ─> resolved ─> Send(Pull) to every source ─> Done from all ─> Finished (good)
                  └─> unresolved ───────────────────────────────────────────────> Finished (failed)
    Failed from one, deadline, abort, peer lost ─> Send(Cancel) to the others ─> each settled, or the grace is over
                                                                               └─> Finished (failed or aborted)

The blocks belong to the writers from the first Pull until the last source is settled or the grace is over. So a late
write can only land in a block that vLLM gave to someone else if its writer didn't answer in time. A request is reported
finished exactly once, and only if it was loaded here.
"""

import heapq
from dataclasses import dataclass, field

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
class Abandon:
    """The load ended before anything was asked for: prefill should learn that it need not keep the blocks."""

    load: Load


@dataclass(frozen=True, slots=True)
class Finished:
    """The load is over; blocks may be used or freed.

    `reason` is None when all KV arrived. `aborted` loads failed on request. `confirmed` is False when a writer didn't
    say in time that it stopped.
    """

    load: Load
    reason: Reason | None
    detail: str
    aborted: bool
    confirmed: bool


Action = Resolve | Send | Abandon | Finished


@dataclass(slots=True)
class _State:
    load: Load
    deadline: float
    resolved: bool = False
    pending: dict[str, Ask] = field(default_factory=dict[str, Ask])
    failure: PeerError | None = None
    aborted: bool = False


class DecodeRequests:
    """All loads of one decode rank. Times are seconds of any monotonic clock, given to every call."""

    def __init__(self, request_timeout_s: float, cancel_grace_s: float) -> None:
        self._timeout_s = request_timeout_s
        self._grace_s = cancel_grace_s
        self._states: dict[str, _State] = {}
        self._pulls: dict[str, str] = {}
        self._timers: list[tuple[float, str]] = []

    @property
    def num_loading(self) -> int:
        """Loads that are not finished."""
        return len(self._states)

    def next_timer(self) -> float | None:
        """Return when `tick` has something to do at the earliest, or None."""
        return self._timers[0][0] if self._timers else None

    def load(self, load: Load, now: float) -> list[Action]:
        """vLLM has allocated the blocks and waits. A second load of a request that is still loading is ignored."""
        if load.request_id in self._states:
            return []
        self._states[load.request_id] = _State(load, now + self._timeout_s)
        self._timer(now + self._timeout_s, load.request_id)
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
            self._pulls[ask.pull.pull_id] = request_id
            actions.append(Send(ask.address, with_budget(ask.pull, state.deadline - now)))
        return actions + self._finish_if_settled(state)

    def unresolved(self, request_id: str, error: PeerError) -> list[Action]:
        """The sources can't be found or don't fit."""
        state = self._states.get(request_id)
        if state is None or state.resolved:
            return []
        state.failure = error
        actions = self._finish(state, confirmed=True)
        # Only a peer that was reached can be told; the others' lease ends it.
        return [*actions, Abandon(state.load)] if error.reason is Reason.INCOMPATIBLE else actions

    def done(self, message: Done) -> list[Action]:
        """A source has written everything."""
        state = self._settle(message.pull_id)
        return self._finish_if_settled(state) if state else []

    def settled(self, message: Settled) -> list[Action]:
        """A source confirms that nothing of a cancelled pull is in flight."""
        state = self._settle(message.pull_id)
        if state is None:
            return []
        # A source that stopped without being asked to has not delivered either.
        state.failure = state.failure or PeerError(Reason.CANCELLED, "prefill gave the pull up")
        return self._finish_if_settled(state)

    def failed(self, message: Failed, now: float) -> list[Action]:
        """A source could not deliver; the others are told to stop."""
        state = self._settle(message.pull_id)
        if state is None:
            return []
        return self._give_up(state, PeerError(message.reason, message.detail), now)

    def abort(self, request_id: str, now: float) -> list[Action]:
        """The client is gone. Unknown requests are ignored: they finished, or were never loaded."""
        state = self._states.get(request_id)
        if state is None or state.aborted:
            return []
        state.aborted = True
        gone = PeerError(Reason.CANCELLED, "decode gave the request up")
        if not state.resolved:
            state.failure = gone
            return [*self._finish(state, confirmed=True), Abandon(state.load)]
        return self._give_up(state, gone, now)

    def peer_lost(self, address: str, detail: str, now: float) -> list[Action]:
        """The control connection to a prefill rank broke: its pulls won't be answered."""
        hit = [state for state in self._states.values() if any(a.address == address for a in state.pending.values())]
        return [action for state in hit for action in self._give_up(state, PeerError(Reason.PEER_LOST, detail), now)]

    def tick(self, now: float) -> list[Action]:
        """Let deadlines and graces run out. Call at `next_timer` or later."""
        actions: list[Action] = []
        while self._timers and self._timers[0][0] <= now:
            _, request_id = heapq.heappop(self._timers)
            state = self._states.get(request_id)
            if state is None or state.deadline > now:
                continue
            late = PeerError(Reason.DEADLINE, f"the KV did not arrive within {self._timeout_s:g} s")
            if state.failure is not None:
                actions += self._finish(state, confirmed=False)
            elif not state.resolved:
                state.failure = late
                actions += [*self._finish(state, confirmed=True), Abandon(state.load)]
            else:
                actions += self._give_up(state, late, now)
        return actions

    def _give_up(self, state: _State, error: PeerError, now: float) -> list[Action]:
        """Cancel what is pending and wait for the confirmations, but no longer than the grace."""
        if state.failure is not None:
            return self._finish_if_settled(state)
        state.failure = error
        state.deadline = now + self._grace_s
        self._timer(state.deadline, state.load.request_id)
        actions: list[Action] = [
            Send(ask.address, Cancel(pull_id, ask.pull.transfer_id, ask.pull.prefill_engine))
            for pull_id, ask in state.pending.items()
        ]
        return actions + self._finish_if_settled(state)

    def _settle(self, pull_id: str) -> _State | None:
        state = self._states.get(self._pulls.pop(pull_id, ""))
        if state is not None:
            state.pending.pop(pull_id, None)
        return state

    def _finish_if_settled(self, state: _State) -> list[Action]:
        return [] if state.pending else self._finish(state, confirmed=True)

    def _finish(self, state: _State, *, confirmed: bool) -> list[Action]:
        for pull_id in state.pending:
            self._pulls.pop(pull_id, None)
        del self._states[state.load.request_id]
        failure = state.failure
        reason, detail = (failure.reason, failure.detail) if failure else (None, "")
        return [Finished(state.load, reason, detail, state.aborted, confirmed)]

    def _timer(self, when: float, request_id: str) -> None:
        heapq.heappush(self._timers, (when, request_id))


def with_budget(pull: Pull, budget_s: float) -> Pull:
    """Return the pull with its budget. A struct copy; msgspec's own `replace` is untyped."""
    return Pull(
        pull_id=pull.pull_id,
        transfer_id=pull.transfer_id,
        prefill_engine=pull.prefill_engine,
        prefill_rank=pull.prefill_rank,
        decode_engine=pull.decode_engine,
        decode_rank=pull.decode_rank,
        budget_s=max(0.0, budget_s),
        start=pull.start,
        end=pull.end,
        digest=pull.digest,
        layout=pull.layout,
        block_table=pull.block_table,
        pages=pull.pages,
        segment=pull.segment,
    )
