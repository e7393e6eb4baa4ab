"""Both state machines against an adversarial network and clock.

Two prefill ranks and two decode ranks exchange messages over a network that loses, repeats and reorders them; prompts
are computed, aborted or never come; clients leave; connections break; time jumps. What vLLM relies on must hold in
every step, and in the end nothing may be left over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcp_connector.errors import PeerError, Reason
from dcp_connector.requests_decode import Abandon, Ask, DecodeRequests, Finished, Resolve, Send
from dcp_connector.requests_prefill import Halt, Hold, PrefillRequests, Reply, Sent, Write, Written
from dcp_connector.wire import Cancel, Done, Failed, Pull, Release, Settled
from tests.support.transfer_messages import DECODE, ENGINE, a_hold, a_load, a_pull, a_release

TRANSFERS = [f"t{number}" for number in range(2)]
RANKS = (0, 1)
TIMEOUT_S, GRACE_S, LEASE_S = 60.0, 5.0, 100.0
#: Events that end a transfer are rare, or nothing would ever get far.
rarely = st.integers(0, 3).map(lambda number: number == 3)
transfers, ranks = st.sampled_from(TRANSFERS), st.sampled_from(RANKS)


@dataclass
class Prefill:
    """A prefill rank with a writer whose writes end when the test says so."""

    rank: int
    requests: PrefillRequests
    writing: dict[str, Write] = field(default_factory=dict)
    ever_written: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)


@dataclass
class Decode:
    """A decode rank. `open_pulls` are pulls that it has sent and not seen settled."""

    rank: int
    requests: DecodeRequests
    loaded: set[str] = field(default_factory=set)
    resolving: set[str] = field(default_factory=set)
    asked: dict[str, set[str]] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)


class World(RuleBasedStateMachine):
    """Prefill rank p serves decode ranks 0 and 1; each decode rank has both prefill ranks as sources."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.prefills = [
            Prefill(rank, PrefillRequests(ENGINE, rank, LEASE_S, lambda pull, hold: frozenset(RANKS))) for rank in RANKS
        ]
        self.decodes = [Decode(rank, DecodeRequests(TIMEOUT_S, GRACE_S)) for rank in RANKS]
        self.to_prefill: list[tuple[int, int, object]] = []
        self.to_decode: list[tuple[int, object]] = []
        self.written_well: set[str] = set()

    # Carrying out actions, and checking each.

    def prefill_acts(self, prefill: Prefill, actions: list) -> None:
        for action in actions:
            match action:
                case Reply():
                    if isinstance(action.message, Done):
                        assert action.message.pull_id in self.written_well, "Done for what was not written"
                    if isinstance(action.message, Settled | Failed):
                        assert action.message.pull_id not in prefill.writing, "settled while its write runs"
                    self.to_decode.append((int(action.peer), action.message))
                case Write():
                    pull = action.pull
                    assert pull.pull_id not in prefill.ever_written, "a pull was written twice"
                    assert action.hold.request_id in prefill.held, "written from blocks that aren't held"
                    assert action.deadline <= self.now + TIMEOUT_S
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
                    self.to_prefill.append((decode.rank, int(action.address), message))
                case Abandon():
                    assert action.load.request_id in decode.finished
                case Finished():
                    self.check_finished(decode, action)

    def check_finished(self, decode: Decode, over: Finished) -> None:
        request_id = over.load.request_id
        assert request_id in decode.loaded, "finished without being loaded"
        assert request_id not in decode.finished, "finished twice"
        decode.finished[request_id] = over
        pulls = decode.asked.get(request_id, set())
        if over.reason is None:
            assert pulls <= self.written_well, "reported good, but a source has not written"
        if over.confirmed:
            running = {pull_id for prefill in self.prefills for pull_id in prefill.writing}
            assert not pulls & running, "blocks were given up while a writer still writes into them"

    # What the engines and the outside do.

    @rule(transfer=transfers)
    def prompt_is_computed(self, transfer: str) -> None:
        request_id = f"p-{transfer}"
        for prefill in self.prefills:
            if request_id not in prefill.held and request_id not in prefill.sent:
                hold: Hold = a_hold(transfer, request_id)
                prefill.held.add(request_id)
                self.prefill_acts(prefill, prefill.requests.hold(hold, self.now))

    @rule(transfer=transfers, really=rarely)
    @precondition(lambda self: self.now > 0)
    def prompt_is_aborted(self, transfer: str, really: bool) -> None:
        if not really:
            return
        for prefill in self.prefills:
            if f"p-{transfer}" not in prefill.held and f"p-{transfer}" not in prefill.sent:
                self.prefill_acts(prefill, prefill.requests.drop(transfer, Reason.PREFILL_ABORTED, self.now))

    @rule(transfer=transfers)
    def blocks_are_allocated(self, transfer: str) -> None:
        request_id = f"d-{transfer}"
        for decode in self.decodes:
            if request_id not in decode.loaded:
                decode.loaded.add(request_id)
                self.decode_acts(decode, decode.requests.load(a_load(request_id, transfer), self.now))

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
                decode.asked[request_id] = {ask.pull.pull_id for ask in asks}
                self.decode_acts(decode, decode.requests.resolved(request_id, asks, self.now))
            else:
                error = PeerError(Reason.BOOTSTRAP_UNREACHABLE, "")
                self.decode_acts(decode, decode.requests.unresolved(request_id, error))

    @rule(transfer=transfers, really=rarely)
    def client_leaves(self, transfer: str, really: bool) -> None:
        if not really:
            return
        for decode in self.decodes:
            self.decode_acts(decode, decode.requests.abort(f"d-{transfer}", self.now))

    @rule(rank=ranks, source=ranks, really=rarely)
    def connection_breaks(self, rank: int, source: int, really: bool) -> None:
        if not really:
            return
        decode = self.decodes[rank]
        self.decode_acts(decode, decode.requests.peer_lost(str(source), "", self.now))

    @rule(transfer=transfers, source=ranks, engine=st.sampled_from([DECODE, "stranger"]))
    def release_is_sent(self, transfer: str, source: int, engine: str) -> None:
        self.to_prefill.append((0, source, a_release(transfer, engine)))

    @rule(rank=ranks, data=st.data(), good=st.booleans())
    @precondition(lambda self: any(prefill.writing for prefill in self.prefills))
    def write_ends(self, rank: int, data: st.DataObject, good: bool) -> None:
        prefill = self.prefills[rank]
        if prefill.writing:
            pull_id = data.draw(st.sampled_from(sorted(prefill.writing)))
            write = prefill.writing.pop(pull_id)
            if good:
                self.written_well.add(pull_id)
            failure = None if good else PeerError(Reason.TRANSFER_ERROR, "")
            actions = prefill.requests.written(write.pull.transfer_id, pull_id, Written(1, failure), self.now)
            self.prefill_acts(prefill, actions)

    # What the network does.

    @rule()
    @precondition(lambda self: self.to_prefill or self.to_decode)
    def all_messages_arrive_in_order(self) -> None:
        while self.to_prefill:
            self.carry_to_prefill(0, "deliver")
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
        sender, receiver, message = self.to_prefill[index]
        if fate != "repeat":
            del self.to_prefill[index]
        if fate == "lose":
            return
        prefill, peer = self.prefills[receiver], str(sender).encode()
        match message:
            case Pull():
                actions = prefill.requests.pull(peer, message, self.now)
            case Cancel():
                actions = prefill.requests.cancel(peer, message, self.now)
            case Release():
                actions = prefill.requests.release(message, self.now)
        self.prefill_acts(prefill, actions)

    def carry_to_decode(self, index: int, fate: str) -> None:
        receiver, message = self.to_decode[index]
        if fate != "repeat":
            del self.to_decode[index]
        if fate == "lose":
            return
        decode = self.decodes[receiver]
        match message:
            case Done():
                actions = decode.requests.done(message)
            case Failed():
                actions = decode.requests.failed(message, self.now)
            case Settled():
                actions = decode.requests.settled(message)
        self.decode_acts(decode, actions)

    @rule(step=st.sampled_from([0.0, 1.0, 1.0, 5.0, 5.0, 30.0, 60.0, 101.0]))
    def time_passes(self, step: float) -> None:
        self.now += step
        for prefill in self.prefills:
            self.prefill_acts(prefill, prefill.requests.tick(self.now))
        for decode in self.decodes:
            self.decode_acts(decode, decode.requests.tick(self.now))

    @invariant()
    def counts_agree(self) -> None:
        for prefill in self.prefills:
            assert prefill.requests.num_held == len(prefill.held)
        for decode in self.decodes:
            assert decode.requests.num_loading == len(decode.loaded) - len(decode.finished)

    def teardown(self) -> None:
        """Writers come to an end, clocks run on, messages stop: everything must be over, on both sides."""
        for prefill in self.prefills:
            for pull_id, write in list(prefill.writing.items()):
                del prefill.writing[pull_id]
                failure = PeerError(Reason.DEADLINE, "")
                actions = prefill.requests.written(write.pull.transfer_id, pull_id, Written(0, failure), self.now)
                self.prefill_acts(prefill, actions)
        for _ in range(2):
            self.time_passes(TIMEOUT_S + LEASE_S)
        for prefill in self.prefills:
            assert not prefill.held, "blocks are held for ever"
            assert prefill.requests.num_waiting == 0
            assert len(prefill.sent) == len(set(prefill.sent))
        for decode in self.decodes:
            assert set(decode.finished) == decode.loaded, "a load never ended"


World.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase
