"""Two whole engines in the world of `transfer_world`: each has a scheduler, a pool of blocks and two ranks.

The scheduler's side of the connector (`SchedulerSide`) hands prompts off and begins loads. Steps carry its work to the
ranks and their reports back, as vLLM's do: what ranks hear is decided before the last step's reports are read. Blocks
belong to vLLM's pool; the connector's quarantine is all that keeps those of a failed load out of use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from dcp_connector.config import ConnectorConfig
from dcp_connector.requests_decode import Cleared, Finished
from dcp_connector.requests_prefill import Sent
from dcp_connector.scheduler import Identity, SchedulerSide
from dcp_connector.stats import Counters
from dcp_connector.work import RankReport
from dcp_connector.worker import WorkerSide
from tests.support.block_pool import BlockPool
from tests.support.transfer_messages import DECODE, ENGINE, a_release
from tests.support.transfer_world import (
    LEASE_S,
    RANKS,
    TRANSFERS,
    Decode,
    Prefill,
    TransferWorld,
    ranks,
    rarely,
    transfers,
)

#: A prompt has three tokens, in two blocks.
NUM_TOKENS, VIRTUAL_BLOCK, BLOCKS_PER_PROMPT = 3, 2, 2
#: Enough for two of the three requests, so that the third gets what another had. 0 is vLLM's null block.
NUM_BLOCKS = 1 + 2 * BLOCKS_PER_PROMPT


class Pool(BlockPool):
    """The pool, of which prompts take blocks and give them back."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, references=0)

    def free(self) -> list[int]:
        return [number for number in super().free() if number]

    def take(self) -> tuple[int, ...]:
        """Give a prompt its blocks."""
        taken = self.free()[:BLOCKS_PER_PROMPT]
        self.touch([self.blocks[number] for number in taken])
        return tuple(taken)

    def give_back(self, numbers: Sequence[int]) -> None:
        self.free_blocks([self.blocks[number] for number in numbers])


@dataclass(slots=True)
class Request:
    """vLLM's request, and the blocks that it holds."""

    request_id: str
    kv_transfer_params: dict[str, Any]
    block_ids: tuple[int, ...]
    prompt_token_ids: Sequence[int] = (0, 1, 2)
    num_prompt_tokens: int = NUM_TOKENS
    num_computed_tokens: int = NUM_TOKENS
    lora_request: None = None
    #: ranks that have not reported it yet
    left: int = len(RANKS)
    loading: bool = True
    client_left: bool = False
    is_over: bool = False
    #: a rank wants it computed in other blocks
    needs_others: bool = False


class Half:
    """What a rank's `WorkerSide` asks its threads for."""

    alive = True

    def __init__(self) -> None:
        self.over: list[Any] = []

    def take_finished(self) -> list[Any]:
        taken, self.over = self.over, []
        return taken

    take_sent = take_finished


@dataclass(slots=True)
class Output:
    """What all ranks said in one step."""

    report: RankReport = field(default_factory=RankReport)
    sent: list[str] = field(default_factory=list[str])
    received: list[str] = field(default_factory=list[str])
    failed_requests: set[str] = field(default_factory=set[str])


class Engine:
    """One engine: the scheduler's side, both ranks' worker sides, and what vLLM keeps of requests and blocks."""

    def __init__(self, world: EngineWorld, *, is_producer: bool) -> None:
        self.pool = Pool()
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        self.outputs: deque[Output] = deque()
        self.halves = [Half() for _ in RANKS]
        self.workers = [_worker(rank) for rank in RANKS]
        for worker, half in zip(self.workers, self.halves, strict=True):
            worker._virtual_block_size = VIRTUAL_BLOCK
            if is_producer:
                worker._prefill = half
            else:
                worker._decode = half
        me = Identity(ENGINE if is_producer else DECODE, "", is_producer, not is_producer, VIRTUAL_BLOCK)
        clock = (lambda: world.prefill_now) if is_producer else (lambda: world.decode_now)
        self.side = SchedulerSide(me, self.counters, lambda: "minted", 2 * LEASE_S, clock)
        self.side.bind_blocks(self.pool)

    def new_request(self, request_id: str, params: dict[str, Any]) -> Request:
        request = self.requests[request_id] = Request(request_id, params, self.pool.take())
        self.side.on_new_request(request)
        return request

    def free(self, request: Request) -> None:
        """Give a request's blocks back to the pool."""
        self.pool.give_back(request.block_ids)
        request.block_ids = ()

    def reports(self) -> Output:
        """Gather what the ranks report in this step, as vLLM does over its workers."""
        output = Output()
        for worker in self.workers:
            sent, received = worker.finished()
            output.failed_requests |= worker.take_failed_requests()
            output.report = output.report.merged(worker.take_report() or RankReport())
            output.sent += [name for name in sent if self._counted_down(name)]
            output.received += [name for name in received if self._counted_down(name)]
        return output

    def _counted_down(self, request_id: str) -> bool:
        request = self.requests[request_id]
        request.left -= 1
        assert request.left >= 0, "a rank reported a request twice"
        return request.left == 0

    def is_idle(self) -> bool:
        """Tell whether no step has anything to do."""
        return not (self.side.has_work() or self.outputs or any(half.over for half in self.halves))


class EngineWorld(TransferWorld):
    """The same ranks, network and clocks, below two schedulers. A worker that dies takes its engine with it."""

    def __init__(self) -> None:
        super().__init__()
        self.lives = 0
        self.prefill = Engine(self, is_producer=True)
        self.decode = Engine(self, is_producer=False)
        #: the blocks that each request's KV is fetched into, whoever has them now
        self.fetched: dict[str, tuple[int, ...]] = {}

    def prefill_acts(self, prefill: Prefill, actions: list) -> None:
        super().prefill_acts(prefill, actions)
        self.prefill.halves[prefill.rank].over += [action for action in actions if isinstance(action, Sent)]

    def decode_acts(self, decode: Decode, actions: list) -> None:
        super().decode_acts(decode, actions)
        self.decode.halves[decode.rank].over += [action for action in actions if isinstance(action, Finished | Cleared)]

    @rule(transfer=transfers, data=st.data())
    @precondition(lambda self: self.prefill_lives())
    def writes_are_under_way(self, transfer: str, data: st.DataObject) -> None:
        """What usually happens to a request, in one go: most of what can go wrong begins here."""
        self.prompt_is_computed(transfer)
        self.prefill_steps()
        self.blocks_are_allocated(transfer)
        self.decode_steps()
        for rank in RANKS:
            self.sources_are_looked_up(rank, False)
        self.all_messages_arrive_in_order()
        if data.draw(rarely):
            self.prefill_freezes_or_thaws(data.draw(ranks), True)

    # What the prefill engine does.

    def prefill_lives(self) -> bool:
        return len(self.alive()) == len(RANKS)

    @rule(transfer=transfers)
    @precondition(lambda self: self.prefill_lives())
    def prompt_is_computed(self, transfer: str) -> None:
        self.prompt_ends(transfer, handed_off=True)

    @rule(transfer=transfers, really=rarely)
    @precondition(lambda self: self.prefill_lives() and self.now > 0)
    def prompt_is_aborted(self, transfer: str, really: bool) -> None:
        if really:
            self.prompt_ends(transfer, handed_off=False)

    def prompt_ends(self, transfer: str, *, handed_off: bool) -> None:
        engine, request_id = self.prefill, f"p{self.lives}-{transfer}"
        if request_id in engine.requests or len(engine.pool.free()) < BLOCKS_PER_PROMPT:
            return
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        request = engine.new_request(request_id, params)
        is_held, _ = engine.side.finished(request, request.block_ids, handed_off=handed_off)
        assert is_held == handed_off
        if not is_held:
            engine.free(request)

    @rule()
    @precondition(lambda self: self.prefill_lives() and not self.prefill.is_idle())
    def prefill_steps(self) -> None:
        work = self.prefill.side.take_work()
        for prefill in self.prefills:
            for hold in work.holds:
                self.hold(prefill, hold)
            for transfer, reason in work.drops:
                self.prefill_acts(prefill, prefill.requests.drop(transfer, reason, self.prefill_now))
        self.prefill.outputs.append(self.prefill.reports())

    @rule()
    @precondition(lambda self: self.prefill.outputs)
    def prefill_hears(self) -> None:
        engine = self.prefill
        output = engine.outputs.popleft()
        engine.side.settle(output.report, output.sent, output.received)
        for request_id in output.sent:
            reading = [w for p in self.prefills for w in p.writing.values() if w.hold.request_id == request_id]
            assert not reading, "blocks are free although a write reads them"
            engine.free(engine.requests[request_id])

    @rule(really=rarely, noticed=st.booleans())
    def prefill_dies(self, really: bool, noticed: bool) -> None:
        if really and all(prefill.dead_since is None for prefill in self.prefills):
            self.lives += 1
            self.prefill = Engine(self, is_producer=True)
            for rank in RANKS:
                super().prefill_dies(rank, True, noticed)

    @rule()
    def prefill_comes_back(self) -> None:
        for rank in RANKS:
            super().prefill_comes_back(rank)

    # What the decode engine does.

    @rule(transfer=transfers)
    def blocks_are_allocated(self, transfer: str) -> None:
        engine, request_id = self.decode, f"d-{transfer}"
        if request_id in engine.requests or len(engine.pool.free()) < BLOCKS_PER_PROMPT:
            return
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": "http://10.0.0.2:8998",
            "remote_engine_id": ENGINE,
            "transfer_id": transfer,
        }
        request = engine.new_request(request_id, params)
        assert engine.side.matched_tokens(request, 0) == (NUM_TOKENS, True)
        engine.side.allocated(request, request.block_ids, NUM_TOKENS)
        self.fetched[request_id] = request.block_ids

    @rule(transfer=transfers, really=rarely)
    def client_leaves(self, transfer: str, really: bool) -> None:
        request = self.decode.requests.get(f"d-{transfer}")
        if really and request is not None and request.loading and not request.client_left:
            request.client_left = True
            assert self.decode.side.finished(request, request.block_ids, handed_off=False) == (False, None)

    @rule()
    @precondition(lambda self: not self.decode.is_idle())
    def decode_steps(self) -> None:
        work = self.decode.side.take_work()
        for decode in self.decodes:
            for load in work.loads:
                self.load(decode, load)
            for request_id in work.aborts:
                self.decode_acts(decode, decode.requests.abort(request_id, self.decode_now))
        for transfer, _, _ in work.releases:
            self.to_prefill += [(self.now, 0, rank, a_release(transfer, DECODE, rank)) for rank in RANKS]
        self.decode.outputs.append(self.decode.reports())

    @rule()
    @precondition(lambda self: self.decode.outputs)
    def decode_hears(self) -> None:
        engine = self.decode
        output = engine.outputs.popleft()
        for request_id in output.failed_requests:
            engine.requests[request_id].needs_others = True
        engine.side.settle(output.report, output.sent, output.received)
        for request_id, reason in output.report.received.items():
            if reason is not None and request_id not in output.received:
                assert engine.side.has_work(), "the other ranks go on loading what one rank did not get"
        for request_id in output.received:
            request = engine.requests[request_id]
            request.loading = False
            request.is_over = request.client_left
            if request.client_left or request.needs_others:
                engine.free(request)

    @rule(transfer=transfers)
    def request_is_answered(self, transfer: str) -> None:
        """It was computed to its end: in its blocks, or in others, for which vLLM asks the connector once more."""
        request, side = self.decode.requests.get(f"d-{transfer}"), self.decode.side
        if request is None or request.loading or request.is_over:
            return
        if request.needs_others:
            assert side.matched_tokens(request, 0) == (0, False)
            side.allocated(request, (), 0)
        request.is_over = True
        assert side.finished(request, request.block_ids, handed_off=True) == (False, None)
        self.decode.free(request)

    # What must hold.

    @invariant()
    def no_write_is_in_flight_into_blocks_that_are_free(self) -> None:
        super().no_write_is_in_flight_into_blocks_that_are_free()
        free = set(self.decode.pool.free())
        in_use = {
            number: request.request_id
            for request in self.decode.requests.values()
            if not request.loading
            for number in request.block_ids
        }
        for pull_id in self.in_flight():
            for number in self.fetched[pull_id.partition("/")[0]]:
                assert number not in free, f"{pull_id} is written into a free block"
                assert number not in in_use, f"{pull_id} is written into a block in which {in_use[number]} computes"

    @invariant()
    def every_reference_is_a_requests_or_the_quarantines(self) -> None:
        for engine in (self.prefill, self.decode):
            held = sum(len(request.block_ids) for request in engine.requests.values())
            assert sum(block.references for block in engine.pool.blocks) == held + engine.side._quarantine.num_blocks

    def step_on(self) -> None:
        """Let engines step while they have something to do."""
        while not self.decode.is_idle():
            self.decode_steps()
            while self.decode.outputs:
                self.decode_hears()
        while self.prefill_lives() and not self.prefill.is_idle():
            self.prefill_steps()
            while self.prefill.outputs:
                self.prefill_hears()

    def teardown(self) -> None:
        """Engines step on as the world comes to its end: every request is over then, and every block is free."""
        for prefill in self.prefills:
            if prefill.frozen:
                self.prefill_freezes_or_thaws(prefill.rank, True)
        self.step_on()
        super().teardown()
        self.step_on()
        assert not any(request.loading for request in self.decode.requests.values()), "a request is loaded for ever"
        for transfer in TRANSFERS:
            self.request_is_answered(transfer)
        for engine in (self.decode, self.prefill) if self.prefill_lives() else (self.decode,):
            assert len(engine.pool.free()) == NUM_BLOCKS - 1, "blocks are kept for ever"
            shown = engine.counters.take() or {}
            for gauge in ("pinned_requests", "pinned_blocks", "quarantined_blocks"):
                assert shown.get(gauge, 0) == 0


def _worker(rank: int) -> WorkerSide:
    """Return a rank's side of the connector without pages and threads: what it reports is all that is wanted of it."""

    def nothing(*_: Any) -> Any:
        raise AssertionError("nothing is registered here")

    return WorkerSide(
        host="127.0.0.1",
        tp_rank=rank,
        pp_rank=0,
        num_blocks=NUM_BLOCKS,
        read_facts=nothing,
        open_transport=nothing,
        config=ConnectorConfig(),
        secret=b"",
        counters=Counters(),
    )
