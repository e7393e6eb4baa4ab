"""The life of a transfer on a prefill rank: events in, actions out. No clock, no I/O, no threads.

    Hold (prompt computed, blocks kept)  ─┐
                                          ├─ both there ─> Write ─> written ─> Done or Failed
    Pull (a decode rank asks)            ─┘
    Cancel  ─> nothing in flight: Settled at once; else Halt, and Settled once the writer stopped
    Release ─> the blocks go back, unless a write still reads them
    lease   ─> nobody asked in time: the blocks go back

Pulls that come before their Hold are parked; they cost an entry in a dictionary, no thread. A transfer ends when every
decode rank that this rank serves is settled. It is then remembered for a while, so that a late message gets an answer
and a second prompt under the same id is refused. Whatever the messages are, a request is reported sent exactly once.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from dcp_connector.errors import PeerError, Reason
from dcp_connector.wire import MAX_AGE_S, Cancel, Done, Failed, Pull, Release, Settled, ToDecode

#: Transfers that may wait for their prompt, and ended ones that are remembered. Beyond it the oldest are forgotten.
MAX_WAITING = 16384
MAX_ENDED = 65536
#: Pulls of one transfer, refused ones included; more than any decode engine has ranks.
MAX_ASKS = 4096


@dataclass(frozen=True, slots=True)
class Hold:
    """A computed prompt whose blocks are kept. `block_ids` is clipped to the prompt; `num_tokens` have KV.

    `tokens` are the prompt's ids as little-endian int32 (empty for prompts given as embeddings).
    """

    request_id: str
    transfer_id: str
    block_ids: tuple[int, ...]
    num_tokens: int
    tokens: bytes
    adapter: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Send `message` to the decode rank with this ZeroMQ identity."""

    peer: bytes
    message: ToDecode


@dataclass(frozen=True, slots=True)
class Write:
    """Start writing what `pull` asks for out of `hold`; no batch may begin after `deadline`.

    `peer` is the decode rank's ZeroMQ identity, for the messages of the scatter path.
    """

    pull: Pull
    hold: Hold
    deadline: float
    peer: bytes = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop the write of this pull before its next batch."""

    pull_id: str


@dataclass(frozen=True, slots=True)
class Sent:
    """The request's blocks are no longer needed. `reason` is None when KV went out, else why not."""

    request_id: str
    reason: Reason | None


Action = Reply | Write | Halt | Sent


@dataclass(frozen=True, slots=True)
class Written:
    """How a write ended: `failure` is None when everything was written.

    `quiet_s`: for so long parts of a batch that the TransferEngine failed may still arrive.
    """

    num_bytes: int
    failure: PeerError | None = None
    quiet_s: float = 0.0


class _Stage(Enum):
    PARKED = auto()
    WRITING = auto()
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


@dataclass(slots=True)
class _Ask:
    """One pull, from its arrival to its answer."""

    peer: bytes
    pull: Pull
    deadline: float
    stage: _Stage = _Stage.PARKED
    cancelled: bool = False
    answer: ToDecode | None = None


@dataclass(slots=True)
class _Transfer:
    """One transfer id: blocks, asks, or both."""

    hold: Hold | None = None
    until: float = float("-inf")
    claimed_by: str | None = None
    expected: frozenset[int] = frozenset()
    settled: set[int] = field(default_factory=set[int])
    failed: Reason | None = None
    ending: Reason | None = None
    asks: dict[str, _Ask] = field(default_factory=dict[str, _Ask])

    def writing(self) -> bool:
        return any(ask.stage is _Stage.WRITING for ask in self.asks.values())


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is remembered of a transfer: why it ended and what its pulls were answered."""

    reason: Reason | None
    until: float
    answers: dict[str, ToDecode]


#: Checks a pull against its hold and returns the decode ranks that this rank serves. Raises PeerError.
Admit = Callable[[Pull, Hold], frozenset[int]]


class PrefillRequests:
    """All transfers of one prefill rank. Times are seconds of any monotonic clock, given to every call.

    `engine_id` and `rank` are this rank's: pulls for another engine (an earlier process at this address) are refused.
    """

    def __init__(self, engine_id: str, rank: int, lease_s: float, admit: Admit) -> None:
        self._engine_id = engine_id
        self._rank = rank
        self._lease_s = lease_s
        self._admit = admit
        self._transfers: OrderedDict[str, _Transfer] = OrderedDict()
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._given_up: OrderedDict[str, float] = OrderedDict()
        self._timers: list[tuple[float, str]] = []

    @property
    def num_held(self) -> int:
        """Requests whose blocks are kept."""
        return sum(transfer.hold is not None for transfer in self._transfers.values())

    @property
    def num_waiting(self) -> int:
        """Transfers that decode asked for and whose prompt isn't computed."""
        return sum(transfer.hold is None for transfer in self._transfers.values())

    def next_timer(self) -> float | None:
        """Return when `tick` has something to do at the earliest, or None."""
        return self._timers[0][0] if self._timers else None

    def hold(self, hold: Hold, now: float) -> list[Action]:
        """A prompt is computed and its blocks are kept for decode."""
        ended = self._ended.get(hold.transfer_id)
        transfer = self._transfers.get(hold.transfer_id)
        if ended is not None or (transfer is not None and transfer.hold is not None):
            return [Sent(hold.request_id, ended.reason if ended and ended.reason else Reason.REUSED_TRANSFER_ID)]
        transfer = transfer or self._open(hold.transfer_id)
        transfer.hold = hold
        transfer.until = now + self._lease_s
        self._timer(transfer.until, hold.transfer_id)
        actions: list[Action] = []
        for ask in list(transfer.asks.values()):
            actions += self._begin(transfer, ask)
        return actions + self._end_if_settled(hold.transfer_id, transfer, now)

    def drop(self, transfer_id: str, reason: Reason, now: float) -> list[Action]:
        """The prompt will never be computed (aborted, refused): whoever waits for it is told at once."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self._remember(transfer_id, _Ended(reason, now + self._lease_s, {}))
            return []
        if transfer.hold is not None:
            return []
        return self._end(transfer_id, transfer, reason, now)

    def pull(self, peer: bytes, pull: Pull, now: float) -> list[Action]:
        """A decode rank asks for its part."""
        if pull.prefill_engine != self._engine_id or pull.prefill_rank != self._rank:
            wanted, here = (pull.prefill_engine, pull.prefill_rank), (self._engine_id, self._rank)
            detail = f"this is engine {here[0]} rank {here[1]}, not {wanted[0]} rank {wanted[1]}"
            return [Reply(peer, Failed(pull.pull_id, Reason.STALE_ENGINE_ID, detail))]
        ended = self._ended.get(pull.transfer_id)
        if ended is not None:
            return [Reply(peer, ended.answers.get(pull.pull_id) or _too_late(pull.pull_id, ended.reason))]
        transfer = self._transfers.get(pull.transfer_id)
        if transfer is None:
            transfer = self._open(pull.transfer_id)
        known = transfer.asks.get(pull.pull_id)
        if known is not None:
            return [Reply(peer, known.answer)] if known.answer else []
        for other in transfer.asks.values():
            same_rank = other.pull.decode_rank == pull.decode_rank and other.pull.decode_engine == pull.decode_engine
            if same_rank and other.stage is not _Stage.FAILED:
                detail = f"decode rank {pull.decode_rank} asked for transfer {pull.transfer_id} twice"
                return [Reply(peer, Failed(pull.pull_id, Reason.REUSED_TRANSFER_ID, detail))]
        if len(transfer.asks) >= MAX_ASKS:
            detail = f"transfer {pull.transfer_id} was asked for {MAX_ASKS} times"
            return [Reply(peer, Failed(pull.pull_id, Reason.REUSED_TRANSFER_ID, detail))]
        ask = _Ask(peer, pull, now + pull.budget_s)
        transfer.asks[pull.pull_id] = ask
        if pull.pull_id in self._given_up:
            self._answer(ask, _Stage.CANCELLED, Settled(pull.pull_id))
        self._timer(ask.deadline, pull.transfer_id)
        if transfer.hold is None:
            transfer.until = max(transfer.until, ask.deadline + self._lease_s)
            self._timer(transfer.until, pull.transfer_id)
            return []
        return self._begin(transfer, ask) + self._end_if_settled(pull.transfer_id, transfer, now)

    def cancel(self, peer: bytes, cancel: Cancel, now: float) -> list[Action]:
        """A decode rank gives its pull up and wants to know when nothing is in flight.

        Only this rank may say so of its own pulls: to a Cancel that is meant for another one it says nothing.
        """
        if (cancel.prefill_engine, cancel.prefill_rank) != (self._engine_id, self._rank):
            return []
        ended = self._ended.get(cancel.transfer_id)
        if ended is not None:
            return [Reply(peer, ended.answers.get(cancel.pull_id) or Settled(cancel.pull_id))]
        transfer = self._transfers.get(cancel.transfer_id)
        ask = transfer.asks.get(cancel.pull_id) if transfer else None
        if transfer is None or ask is None:
            # The pull may still be under way behind us: it must find nothing to do when it comes, however late. Both
            # hosts' clocks may differ by as much as a frame may be late.
            self._given_up[cancel.pull_id] = now + 2 * MAX_AGE_S
            if len(self._given_up) > MAX_WAITING:
                self._given_up.popitem(last=False)
            return [Reply(peer, Settled(cancel.pull_id))]
        if ask.answer is not None:
            return [Reply(peer, ask.answer)]
        ask.cancelled = True
        ask.peer = peer
        if ask.stage is _Stage.WRITING:
            return [Halt(cancel.pull_id)]
        return self._answer(ask, _Stage.CANCELLED, Settled(cancel.pull_id))

    def release(self, release: Release, now: float) -> list[Action]:
        """Decode needs nothing (more) from this rank.

        Ignored from an engine other than the one being served, and when it is meant for another rank of this engine.
        """
        meant = (release.prefill_engine, release.prefill_rank) == (self._engine_id, self._rank)
        if not meant or release.transfer_id in self._ended:
            return []
        transfer = self._transfers.get(release.transfer_id)
        if transfer is None:
            transfer = self._open(release.transfer_id)
        owners = (
            {transfer.claimed_by} if transfer.claimed_by else {a.pull.decode_engine for a in transfer.asks.values()}
        )
        if owners - {release.decode_engine}:
            return []
        if transfer.writing():
            transfer.ending = Reason.RELEASED
            return []
        return self._end(release.transfer_id, transfer, transfer.failed or Reason.RELEASED, now)

    def written(self, transfer_id: str, pull_id: str, result: Written, now: float) -> list[Action]:
        """The writer is done with a pull: nothing of it is in flight any more."""
        transfer = self._transfers.get(transfer_id)
        ask = transfer.asks.get(pull_id) if transfer else None
        if transfer is None or ask is None or ask.stage is not _Stage.WRITING:
            return []
        if result.failure is None:
            actions = self._answer(ask, _Stage.DONE, Done(pull_id, result.num_bytes))
        elif ask.cancelled and not result.quiet_s:
            transfer.failed = transfer.failed or Reason.CANCELLED
            actions = self._answer(ask, _Stage.CANCELLED, Settled(pull_id))
        else:
            transfer.failed = result.failure.reason
            actions = self._answer(ask, _Stage.FAILED, _failed(pull_id, result.failure, result.quiet_s))
        transfer.settled.add(ask.pull.decode_rank)
        if transfer.ending is not None and not transfer.writing():
            return [*actions, *self._end(transfer_id, transfer, transfer.ending, now)]
        return [*actions, *self._end_if_settled(transfer_id, transfer, now)]

    def tick(self, now: float) -> list[Action]:
        """Let leases and budgets run out. Call at `next_timer` or later."""
        actions: list[Action] = []
        while self._timers and self._timers[0][0] <= now:
            _, transfer_id = heapq.heappop(self._timers)
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                actions += self._expire(transfer_id, transfer, now)
        while self._ended and next(iter(self._ended.values())).until <= now:
            self._ended.popitem(last=False)
        while self._given_up and next(iter(self._given_up.values())) <= now:
            self._given_up.popitem(last=False)
        return actions

    def _expire(self, transfer_id: str, transfer: _Transfer, now: float) -> list[Action]:
        actions: list[Action] = []
        for ask in transfer.asks.values():
            if ask.stage is _Stage.PARKED and ask.deadline <= now:
                late = PeerError(Reason.DEADLINE, "prefill had not computed the prompt before decode's deadline")
                actions += self._answer(ask, _Stage.FAILED, _failed(ask.pull.pull_id, late))
        if transfer.until > now:
            return actions
        if transfer.writing():
            transfer.ending = transfer.ending or Reason.LEASE_EXPIRED
            return actions
        return actions + self._end(transfer_id, transfer, transfer.failed or Reason.LEASE_EXPIRED, now)

    def _begin(self, transfer: _Transfer, ask: _Ask) -> list[Action]:
        """Start a parked ask whose prompt is there, or settle one that was given up meanwhile."""
        hold = transfer.hold
        if hold is None or ask.stage not in (_Stage.PARKED, _Stage.CANCELLED, _Stage.FAILED):
            return []
        try:
            expected = self._expected(transfer, ask.pull, hold)
        except PeerError as error:
            # Someone else's prompt, or nonsense: the asker fails, the blocks stay for the right one.
            return self._answer(ask, _Stage.FAILED, _failed(ask.pull.pull_id, error)) if not ask.answer else []
        transfer.claimed_by = ask.pull.decode_engine
        transfer.expected = expected
        if ask.stage is not _Stage.PARKED:
            transfer.settled.add(ask.pull.decode_rank)
            transfer.failed = transfer.failed or Reason.CANCELLED
            return []
        ask.stage = _Stage.WRITING
        return [Write(ask.pull, hold, ask.deadline, ask.peer)]

    def _expected(self, transfer: _Transfer, pull: Pull, hold: Hold) -> frozenset[int]:
        """Return the decode ranks that are served together with this one. Raises PeerError if the pull may not run."""
        if transfer.claimed_by not in (None, pull.decode_engine):
            detail = f"transfer {hold.transfer_id} is being read by engine {transfer.claimed_by}"
            raise PeerError(Reason.REUSED_TRANSFER_ID, detail)
        expected = self._admit(pull, hold)
        if pull.decode_rank not in expected:
            detail = f"prefill rank {self._rank} doesn't serve decode rank {pull.decode_rank}"
            raise PeerError(Reason.INCOMPATIBLE, detail)
        return expected

    def _answer(self, ask: _Ask, stage: _Stage, message: ToDecode) -> list[Action]:
        ask.stage, ask.answer = stage, message
        return [Reply(ask.peer, message)]

    def _end_if_settled(self, transfer_id: str, transfer: _Transfer, now: float) -> list[Action]:
        # A rank whose first pull failed may be asking again: never give blocks back under a running write.
        settled = bool(transfer.expected) and transfer.settled >= transfer.expected and not transfer.writing()
        if transfer.hold is None or not settled:
            return []
        return self._end(transfer_id, transfer, transfer.failed, now)

    def _end(self, transfer_id: str, transfer: _Transfer, reason: Reason | None, now: float) -> list[Action]:
        actions: list[Action] = []
        for ask in transfer.asks.values():
            if ask.answer is None:
                actions += self._answer(ask, _Stage.FAILED, _too_late(ask.pull.pull_id, reason))
        answers = {pull_id: ask.answer for pull_id, ask in transfer.asks.items() if ask.answer}
        del self._transfers[transfer_id]
        self._remember(transfer_id, _Ended(reason, now + self._lease_s, answers))
        if transfer.hold is not None:
            actions.append(Sent(transfer.hold.request_id, reason))
        return actions

    def _open(self, transfer_id: str) -> _Transfer:
        waiting = len(self._transfers) - MAX_WAITING
        if waiting >= 0:
            # Only transfers that nobody computed may be forgotten; their askers run into their own deadline.
            for oldest in [key for key, value in self._transfers.items() if value.hold is None][: waiting + 1]:
                del self._transfers[oldest]
        transfer = self._transfers[transfer_id] = _Transfer()
        return transfer

    def _remember(self, transfer_id: str, ended: _Ended) -> None:
        self._ended[transfer_id] = ended
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._timer(ended.until, transfer_id)

    def _timer(self, when: float, transfer_id: str) -> None:
        heapq.heappush(self._timers, (when, transfer_id))


def _failed(pull_id: str, error: PeerError, quiet_s: float = 0.0) -> Failed:
    return Failed(pull_id, error.reason, error.detail[:2048], quiet_s)


def _too_late(pull_id: str, reason: Reason | None) -> Failed:
    words = {
        Reason.PREFILL_ABORTED: "the prefill request was aborted or refused",
        Reason.LEASE_EXPIRED: "the blocks were given back because nobody asked within the lease",
        Reason.RELEASED: "decode had said that it needs nothing",
    }
    if reason is not None and reason in words:
        return Failed(pull_id, reason, words[reason])
    return Failed(pull_id, Reason.REUSED_TRANSFER_ID, "the transfer is over: each transfer id serves one request")
