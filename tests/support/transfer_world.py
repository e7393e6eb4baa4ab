"""Both state machines against an adversarial network, clocks and memory, as hypothesis plays it.

Two prefill ranks and two decode ranks exchange messages over a network that loses, repeats, delays and reorders them;
prompts are computed, aborted or never come; clients leave; connections break; prefill ranks freeze, die and come back
as another engine. Writes are in flight for as long as Mooncake can keep one, and failed ones leave stragglers. What
vLLM relies on must hold in every step, no write may be in flight into free blocks, and in the end nothing is left.

The two sides are two hosts: their monotonic clocks began at different times, and their clocks of the day, by which the
age of a frame is judged, differ by as much as is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcp_connector.errors import PeerError, Reason
from dcp_connector.requests_decode import Abandon, Ask, Cleared, DecodeRequests, Finished, Load, Probe, Resolve, Send
from dcp_connector.requests_prefill import Halt, Hold, PrefillRequests, Reply, Sent, Write, Written
from dcp_connector.wire import MAX_AGE_S, Cancel, Done, Failed, Pull, Release, Settled
from tests.support.transfer_messages import DECODE, ENGINE, a_hold, a_load, a_pull, a_release

TRANSFERS = [f"t{number}" for number in range(3)]
RANKS = (0, 1)
TIMEOUT_S, GRACE_S, LEASE_S = 60.0, 5.0, 100.0
#: A batch may run for so long after the writer's deadline, and a failed one leaves stragglers for so long.
BATCH_S, STRAGGLERS_S = 30.0, 30.0
#: A frame is refused that looks older than MAX_AGE_S, by clocks of the day that may differ as much.
OLDEST_S = 2 * MAX_AGE_S
#: Where a host's monotonic clock may begin; all times here are sums of such numbers, and exact.
EPOCHS = [0.0, 65536.0, -65536.0]
LONGEST_WRITE_S = OLDEST_S + BATCH_S + STRAGGLERS_S
#: Events that end a transfer are rare, or nothing would ever get far.
rarely = st.integers(0, 3).map(lambda number: number == 3)
transfers, ranks = st.sampled_from(TRANSFERS), st.sampled_from(RANKS)


@dataclass
class Prefill:
    """A prefill rank with a writer whose writes end when the test says so, or when Mooncake gives them up."""

    rank: int
    requests: PrefillRequests
    writing: dict[str, Write] = field(default_factory=dict)
    ever_written: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)
    dead_since: float | None = None
    frozen: bool = False


@dataclass
class Decode:
    """A decode rank: what it was asked for, what it reported, and which loads own their blocks."""

    rank: int
    requests: DecodeRequests
    loaded: dict[str, float] = field(default_factory=dict)
    resolving: set[str] = field(default_factory=set)
    asked: dict[str, set[str]] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)

    def owns_blocks(self, request_id: str) -> bool:
        return request_id not in self.finished or request_id in self.unclear


class TransferWorld(RuleBasedStateMachine):
    """Prefill rank p serves decode ranks 0 and 1; each decode rank has both prefill ranks as sources."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        #: What each side's monotonic clock says beyond `now`, and prefill's clock of the day beyond decode's.
        self.prefill_ahead_s = self.decode_ahead_s = self.day_ahead_s = 0.0
        self.prefills = [Prefill(rank, self.new_prefill(ENGINE, rank)) for rank in RANKS]
        self.decodes = [Decode(rank, DecodeRequests(TIMEOUT_S, GRACE_S, LONGEST_WRITE_S)) for rank in RANKS]
        #: (when it was sent, sender, receiver, message)
        self.to_prefill: list[tuple[float, int, int, object]] = []
        self.to_decode: list[tuple[float, int, object]] = []
        self.probes: list[tuple[int, int]] = []
        self.written_well: set[str] = set()
        #: parts of failed batches: pull id -> when the last one lands
        self.stragglers: dict[str, float] = {}

    def new_prefill(self, engine: str, rank: int) -> PrefillRequests:
        return PrefillRequests(engine, rank, LEASE_S, lambda pull, hold: frozenset(RANKS))

    @initialize(
        prefill=st.sampled_from(EPOCHS),
        decode=st.sampled_from(EPOCHS),
        day=st.sampled_from([0.0, MAX_AGE_S, -MAX_AGE_S]),
    )
    def hosts_have_clocks_of_their_own(self, prefill: float, decode: float, day: float) -> None:
        self.prefill_ahead_s, self.decode_ahead_s, self.day_ahead_s = prefill, decode, day

    @property
    def prefill_now(self) -> float:
        return self.now + self.prefill_ahead_s

    @property
    def decode_now(self) -> float:
        return self.now + self.decode_ahead_s

    # Carrying out actions, and checking each.

    def prefill_acts(self, prefill: Prefill, actions: list) -> None:
        for action in actions:
            match action:
                case Reply():
                    message = action.message
                    if isinstance(message, Done):
                        assert message.pull_id in self.written_well, "Done for what was not written"
                    if isinstance(message, Settled | Failed):
                        assert message.pull_id not in prefill.writing, "settled while its write runs"
                        quiet_s = message.quiet_s if isinstance(message, Failed) else 0.0
                        late = self.stragglers.get(message.pull_id, self.now)
                        assert late <= self.now + quiet_s, "settled while parts of its batch may arrive"
                    self.to_decode.append((self.now, int(action.peer), message))
                case Write():
                    pull = action.pull
                    assert pull.pull_id not in prefill.ever_written, "a pull was written twice"
                    assert action.hold.request_id in prefill.held, "written from blocks that aren't held"
                    assert action.deadline <= self.prefill_now + TIMEOUT_S
                    prefill.ever_written.add(pull.pull_id)
                    prefill.writing[pull.pull_id] = action
                case Halt():
                    assert action.pull_id in prefill.writing
                case Sent():
                    assert action.request_id in prefill.held, "reported sent without being held, or twice"
                    running = [w for w in prefill.writing.values() if w.hold.request_id == action.request_id]
                    assert not running, "blocks were given back under a running write"
                    prefill.held.remove(action.request_id)
                    prefill.sent.append(action.request_id)

    def decode_acts(self, decode: Decode, actions: list) -> None:
        for action in actions:
            match action:
                case Resolve():
                    decode.resolving.add(action.load.request_id)
                case Send():
                    message = action.message
                    if isinstance(message, Pull):
                        assert 0 <= message.budget_s <= TIMEOUT_S
                    self.to_prefill.append((self.now, decode.rank, int(action.address), message))
                case Probe():
                    self.probes.append((decode.rank, int(action.address)))
                case Abandon():
                    assert action.load.request_id in decode.finished
                case Finished():
                    self.check_finished(decode, action)
                case Cleared():
                    assert action.load.request_id in decode.unclear, "cleared without being unclear, or twice"
                    decode.unclear.remove(action.load.request_id)

    def check_finished(self, decode: Decode, over: Finished) -> None:
        request_id = over.load.request_id
        assert request_id in decode.loaded, "finished without being loaded"
        assert request_id not in decode.finished, "finished twice"
        assert self.now <= decode.loaded[request_id] + TIMEOUT_S + GRACE_S, "finished after its deadline"
        decode.finished[request_id] = over
        if not over.confirmed:
            decode.unclear.add(request_id)
        if over.reason is None:
            assert decode.asked.get(request_id, set()) <= self.written_well, "good, but a source has not written"
            assert over.confirmed

    def in_flight(self) -> set[str]:
        """The pulls of which something may still be written."""
        running = {pull_id for prefill in self.prefills for pull_id in prefill.writing}
        return running | {pull_id for pull_id, until in self.stragglers.items() if until > self.now}

    @invariant()
    def no_write_is_in_flight_into_blocks_that_are_free(self) -> None:
        in_flight = self.in_flight()
        for decode in self.decodes:
            for request_id, pulls in decode.asked.items():
                assert decode.owns_blocks(request_id) or not pulls & in_flight, "a late write lands in a reused block"

    # What the engines and the outside do.

    @rule(transfer=transfers)
    def prompt_is_computed(self, transfer: str) -> None:
        request_id = f"p-{transfer}"
        for prefill in self.alive():
            if request_id not in prefill.held and request_id not in prefill.sent:
                self.hold(prefill, a_hold(transfer, request_id))

    def hold(self, prefill: Prefill, hold: Hold) -> None:
        prefill.held.add(hold.request_id)
        self.prefill_acts(prefill, prefill.requests.hold(hold, self.prefill_now))

    @rule(transfer=transfers, really=rarely)
    @precondition(lambda self: self.now > 0)
    def prompt_is_aborted(self, transfer: str, really: bool) -> None:
        if not really:
            return
        for prefill in self.alive():
            if f"p-{transfer}" not in prefill.held and f"p-{transfer}" not in prefill.sent:
                self.prefill_acts(prefill, prefill.requests.drop(transfer, Reason.PREFILL_ABORTED, self.prefill_now))

    @rule(transfer=transfers)
    def blocks_are_allocated(self, transfer: str) -> None:
        request_id = f"d-{transfer}"
        for decode in self.decodes:
            if request_id not in decode.loaded:
                self.load(decode, a_load(request_id, transfer))

    def load(self, decode: Decode, load: Load) -> None:
        decode.loaded[load.request_id] = self.now
        self.decode_acts(decode, decode.requests.load(load, self.decode_now))

    @rule(rank=ranks, bad=rarely)
    @precondition(lambda self: any(decode.resolving for decode in self.decodes))
    def sources_are_looked_up(self, rank: int, bad: bool) -> None:
        decode = self.decodes[rank]
        for request_id in sorted(decode.resolving):
            decode.resolving.remove(request_id)
            if not bad:
                asks = tuple(
                    Ask(
                        str(source),
                        a_pull(
                            f"{request_id}/{rank}/{source}",
                            transfer_id=request_id[2:],
                            decode_rank=rank,
                            prefill_rank=source,
                        ),
                    )
                    for source in RANKS
                )
                actions = decode.requests.resolved(request_id, asks, self.decode_now)
                if any(isinstance(action, Send) for action in actions):
                    decode.asked[request_id] = {ask.pull.pull_id for ask in asks}
                self.decode_acts(decode, actions)
            else:
                error = PeerError(Reason.BOOTSTRAP_UNREACHABLE, "")
                self.decode_acts(decode, decode.requests.unresolved(request_id, error, self.decode_now))

    @rule(transfer=transfers, really=rarely)
    def client_leaves(self, transfer: str, really: bool) -> None:
        if not really:
            return
        for decode in self.decodes:
            self.decode_acts(decode, decode.requests.abort(f"d-{transfer}", self.decode_now))

    @rule(rank=ranks, source=ranks, really=rarely)
    def connection_breaks(self, rank: int, source: int, really: bool) -> None:
        if not really:
            return
        decode = self.decodes[rank]
        self.decode_acts(decode, decode.requests.peer_lost(str(source), "", self.decode_now))

    @rule(transfer=transfers, source=ranks, meant=ranks, engine=st.sampled_from([DECODE, "stranger"]))
    def release_is_sent(self, transfer: str, source: int, meant: int, engine: str) -> None:
        self.to_prefill.append((self.now, 0, source, a_release(transfer, engine, meant)))

    @rule(rank=ranks, data=st.data(), outcome=st.sampled_from(["good", "good", "failed", "gave up"]))
    @precondition(lambda self: any(prefill.writing for prefill in self.prefills))
    def write_ends(self, rank: int, data: st.DataObject, outcome: str) -> None:
        prefill = self.prefills[rank]
        if prefill.writing:
            self.end_write(prefill, data.draw(st.sampled_from(sorted(prefill.writing))), outcome)

    def end_write(self, prefill: Prefill, pull_id: str, outcome: str) -> None:
        write, result = prefill.writing.pop(pull_id), Written(1)
        if outcome == "good":
            self.written_well.add(pull_id)
        elif outcome == "gave up":
            result = Written(0, PeerError(Reason.DEADLINE, ""))
        else:
            result = Written(0, PeerError(Reason.TRANSFER_ERROR, ""), STRAGGLERS_S)
            self.stragglers[pull_id] = self.now + STRAGGLERS_S
        self.prefill_acts(prefill, prefill.requests.written(write.pull.transfer_id, pull_id, result, self.prefill_now))

    # Processes.

    def alive(self) -> list[Prefill]:
        return [prefill for prefill in self.prefills if prefill.dead_since is None and not prefill.frozen]

    @rule(rank=ranks, really=rarely)
    def prefill_freezes_or_thaws(self, rank: int, really: bool) -> None:
        prefill = self.prefills[rank]
        if (really or prefill.frozen) and prefill.dead_since is None:
            prefill.frozen = not prefill.frozen
            if not prefill.frozen:
                self.prefill_acts(prefill, prefill.requests.tick(self.prefill_now))

    @rule(rank=ranks, really=rarely, noticed=st.booleans())
    def prefill_dies(self, rank: int, really: bool, noticed: bool) -> None:
        """What the kernel has of its writes still arrives for a moment. Decode may notice it at once."""
        prefill = self.prefills[rank]
        if (really or prefill.writing) and prefill.dead_since is None:
            prefill.dead_since, prefill.frozen = self.now, False
            for pull_id in prefill.writing:
                self.stragglers[pull_id] = self.now + GRACE_S
            # Parts of its failed batches end with it as well.
            for pull_id, until in self.stragglers.items():
                if pull_id.endswith(f"/{rank}"):
                    self.stragglers[pull_id] = min(until, self.now + GRACE_S)
            prefill.writing.clear()
            prefill.held.clear()
            for decode in self.decodes if noticed else ():
                self.decode_acts(decode, decode.requests.peer_lost(str(rank), "", self.decode_now))
                self.decode_acts(decode, decode.requests.gone(str(rank), self.decode_now))

    @rule(rank=ranks)
    def prefill_comes_back(self, rank: int) -> None:
        prefill = self.prefills[rank]
        if prefill.dead_since is not None and prefill.dead_since + GRACE_S <= self.now:
            prefill.dead_since = None
            prefill.requests = self.new_prefill("engine after a restart", rank)

    @rule(data=st.data())
    @precondition(lambda self: self.probes)
    def probe_is_answered(self, data: st.DataObject) -> None:
        rank, source = self.probes.pop(data.draw(st.integers(0, len(self.probes) - 1)))
        if self.prefills[source].dead_since is not None:
            # A process that has ended refuses connections until another one listens there.
            decode = self.decodes[rank]
            self.decode_acts(decode, decode.requests.gone(str(source), self.decode_now))

    # What the network does.

    @rule()
    @precondition(lambda self: self.to_prefill or self.to_decode)
    def all_messages_arrive_in_order(self) -> None:
        for item in [item for item in self.to_prefill if not self.prefills[item[2]].frozen]:
            self.carry_to_prefill(self.to_prefill.index(item), "deliver")
        while self.to_decode:
            self.carry_to_decode(0, "deliver")

    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "repeat", "lose"]))
    @precondition(lambda self: self.to_prefill)
    def message_to_prefill(self, data: st.DataObject, fate: str) -> None:
        self.carry_to_prefill(data.draw(st.integers(0, len(self.to_prefill) - 1)), fate)

    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "repeat", "lose"]))
    @precondition(lambda self: self.to_decode)
    def message_to_decode(self, data: st.DataObject, fate: str) -> None:
        self.carry_to_decode(data.draw(st.integers(0, len(self.to_decode) - 1)), fate)

    def carry_to_prefill(self, index: int, fate: str) -> None:
        sent_at, sender, receiver, message = self.to_prefill[index]
        prefill, peer = self.prefills[receiver], str(sender).encode()
        if prefill.frozen:
            return
        if fate != "repeat":
            del self.to_prefill[index]
        looks_late_s = self.now - sent_at + self.day_ahead_s
        if fate == "lose" or prefill.dead_since is not None or abs(looks_late_s) > MAX_AGE_S:
            return
        match message:
            case Pull():
                actions = prefill.requests.pull(peer, message, self.prefill_now)
            case Cancel():
                actions = prefill.requests.cancel(peer, message, self.prefill_now)
            case Release():
                actions = prefill.requests.release(message, self.prefill_now)
                if message.prefill_rank != receiver:
                    assert actions == [], "a release for another rank did something"
        self.prefill_acts(prefill, actions)

    def carry_to_decode(self, index: int, fate: str) -> None:
        sent_at, receiver, message = self.to_decode[index]
        if fate != "repeat":
            del self.to_decode[index]
        # What is late counts as arrived late: how long parts of a batch stay under way is counted from the arrival.
        looks_late_s = self.now - sent_at - self.day_ahead_s
        if fate == "lose" or abs(looks_late_s) > MAX_AGE_S:
            return
        decode = self.decodes[receiver]
        match message:
            case Done():
                actions = decode.requests.done(message, self.decode_now)
            case Failed():
                actions = decode.requests.failed(message, self.decode_now)
            case Settled():
                actions = decode.requests.settled(message, self.decode_now)
        self.decode_acts(decode, actions)

    @rule(step=st.sampled_from([0.0, 1.0, 1.0, 5.0, 5.0, 30.0, 60.0, 101.0, 250.0]))
    def time_passes(self, step: float) -> None:
        """Timers go off when they are due, except those of a frozen rank; writes end when Mooncake gives them up."""
        until = self.now + step
        while True:
            ends = [
                (write.deadline - self.prefill_ahead_s + BATCH_S, prefill, pull_id)
                for prefill in self.prefills
                for pull_id, write in prefill.writing.items()
            ]
            timers = [(prefill.requests.next_timer(), self.prefill_ahead_s) for prefill in self.alive()]
            timers += [(decode.requests.next_timer(), self.decode_ahead_s) for decode in self.decodes]
            due = [when - ahead_s for when, ahead_s in timers if when is not None] + [when for when, _, _ in ends]
            if not due or min(due) > until:
                break
            self.now = max(self.now, min(due))
            for when, prefill, pull_id in ends:
                if when <= self.now:
                    self.end_write(prefill, pull_id, "failed")
            self.tick()
        self.now = until
        self.tick()

    def tick(self) -> None:
        for prefill in self.alive():
            self.prefill_acts(prefill, prefill.requests.tick(self.prefill_now))
        for decode in self.decodes:
            self.decode_acts(decode, decode.requests.tick(self.decode_now))
        self.no_write_is_in_flight_into_blocks_that_are_free()

    @invariant()
    def counts_agree(self) -> None:
        for prefill in self.prefills:
            if prefill.dead_since is None:
                assert prefill.requests.num_held == len(prefill.held)
        for decode in self.decodes:
            assert decode.requests.num_loading == len(decode.loaded) - len(decode.finished)
            assert decode.requests.num_unclear == len(decode.unclear)

    def teardown(self) -> None:
        """Writers come to an end, clocks run on, messages stop: everything must be over, on both sides."""
        for prefill in self.prefills:
            if prefill.frozen:
                self.prefill_freezes_or_thaws(prefill.rank, True)
            for pull_id in list(prefill.writing):
                self.end_write(prefill, pull_id, "gave up")
        for _ in range(2):
            self.time_passes(TIMEOUT_S + LEASE_S + LONGEST_WRITE_S)
        for prefill in self.prefills:
            assert not prefill.held, "blocks are held for ever"
            assert prefill.requests.num_waiting == 0 or prefill.dead_since is not None
            assert len(prefill.sent) == len(set(prefill.sent))
        for decode in self.decodes:
            assert set(decode.finished) == set(decode.loaded), "a load never ended"
            assert not decode.unclear, "blocks are kept out of use for ever"
            assert decode.requests.next_timer() is None, "timers are left over"
