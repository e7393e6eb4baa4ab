"""Memory of a device: KV is read after the kernels that compute it, and moved on a stream that disturbs no model.

vLLM launches the kernels that write a prompt's KV on the current stream of the engine's thread, and calls
`start_load_kv` on that thread in a later step (v1/worker/kv_connector_model_runner_mixin.py). So what was launched
there before `WorkerSide.start` has to be over before anything is read, and nothing that is launched behind it may be
waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from dcp_connector.pages import StagedUnits
from dcp_connector.requests_prefill import Hold
from dcp_connector.staging import Staging, Where
from dcp_connector.tensors import fence
from dcp_connector.work import StepWork
from tests.support.kv_oracle import Sizes
from tests.support.staged_units import UNITS, a_page
from tests.support.stand_in_torch import DEVICE, StandInTorch, Stream
from tests.support.transfer_memory import ArrayTensor, Engine, engine, prompt

PREFILL, DECODE = Sizes(1, 1, 16, 16, 1), Sizes(2, 2, 1, 16, 1)
END, SOURCE, TARGET = 40, [3, 1, 2], [7, 2]
WHERE: tuple[Where, ...] = ("device", "host")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> StandInTorch:
    made = StandInTorch()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


class Model:
    """The engine's thread, with a stream of the model's own."""

    def __init__(self, torch: StandInTorch) -> None:
        self.torch, self.stream = torch, torch.cuda.Stream(device=DEVICE)
        self.later: list[str] = []

    def prefills(self, side: Engine) -> None:
        """Launch what writes a prompt's KV, and let the scheduler hand the prompt over in the next step."""
        with self.torch.cuda.stream(self.stream):
            for rank in side.ranks:
                self.torch.launch("attention", lambda rank=rank: rank.fill(rank.memory, SOURCE, 0, END))
            side.start(StepWork(holds=[Hold("a", "a", tuple(SOURCE), END, prompt(END), "")]))
            self.launches_a_step()

    def launches_a_step(self) -> None:
        """Launch kernels that take forever."""
        with self.torch.cuda.stream(self.stream):
            self.torch.launch("the next step", lambda: self.later.append("ran"))


@contextmanager
def both(torch: StandInTorch, path: str, where: str) -> Iterator[tuple[Engine, Engine]]:
    options = {"tensors": torch.tensors_of, "path": path, "staging_memory": where}
    with engine("kv_producer", PREFILL, **options) as p, engine("kv_consumer", DECODE, **options) as d:
        yield p, d


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("path", ["direct", "pack", "scatter"])
def test_a_prompt_is_read_after_its_kernels_and_no_later_step_is_waited_for(
    torch: StandInTorch, path: str, where: str
) -> None:
    model = Model(torch)
    with both(torch, path, where) as (p, d):
        before = d.snapshot()
        model.prefills(p)
        d.load("a", END, TARGET, p.origin, p.engine_id)
        assert d.received("a") == ([None] * DECODE.t, set())
        assert d.differing_bytes(before, TARGET, END) == [0] * DECODE.t
        p.sent("a")
        assert (p.counters[0].take() or {})["paths"] == {path: DECODE.t}
    assert model.later == []
    assert torch.pageable == []


def test_a_step_of_decode_is_not_waited_for_and_its_stream_gets_no_work(torch: StandInTorch) -> None:
    model = Model(torch)
    with both(torch, "scatter", "device") as (p, d):
        model.prefills(p)
        model.launches_a_step()
        d.load("a", END, TARGET, p.origin, p.engine_id)
        assert d.received("a") == ([None] * DECODE.t, set())
    assert model.later == []
    moved = {stream for what, stream in torch.launched if what in ("copy", "index_select", "index_copy")}
    assert len(moved) == 1 + DECODE.t  # one of each rank
    assert moved.isdisjoint({model.stream, torch.default})
    assert {what for what, stream in torch.launched if stream is model.stream} == {"attention", "the next step"}


def test_the_threads_that_move_bytes_wait_and_the_engines_thread_never_does(torch: StandInTorch) -> None:
    model = Model(torch)
    with both(torch, "scatter", "device") as (p, d):
        started = len(torch.events)
        model.prefills(p)
        d.load("a", END, TARGET, p.origin, p.engine_id)
        assert d.received("a") == ([None] * DECODE.t, set())
    waiters = {waiter.rpartition("_")[0] for event in torch.events[started:] for waiter in event.waiters}
    assert waiters == {"dcp-send", "dcp-scatter"}
    of_model = [event for event in torch.events if event.stream is model.stream]
    assert len(of_model) == 1
    assert {waiter.rpartition("_")[0] for waiter in of_model[0].waiters} == {"dcp-send"}
    assert all(event.waiters for event in torch.events)


def test_a_fence_stands_on_the_streams_of_the_thread_and_the_moment_that_it_is_taken_in(torch: StandInTorch) -> None:
    tensor = torch.zeros(64, torch.uint8, device=DEVICE)
    own, ran = torch.cuda.Stream(device=DEVICE), list[str]()
    with torch.cuda.stream(own):
        torch.launch("before", lambda: ran.append("before"))
        taken = fence(tensor)
        torch.launch("behind", lambda: ran.append("behind"))
    assert taken is not None
    assert ran == []
    taken.synchronize()
    assert ran == ["before"]


def test_memory_of_the_host_needs_no_fence(torch: StandInTorch) -> None:
    assert fence(ArrayTensor(np.zeros(8, dtype=np.uint8), 0, (1,), (1,))) is None
    assert torch.events == []


def staging_of(torch: StandInTorch, where: Where) -> tuple[Staging, np.ndarray, Stream]:
    """Return staging memory for one page, the page's memory and the stream that it was made on."""
    memory = torch.new((np.arange(128) % 251).astype(np.uint8), DEVICE)
    model = torch.cuda.Stream(device=DEVICE)
    with torch.cuda.stream(model):
        return Staging([memory], slot_bytes=64, num_slots=2, where=where), memory.array, model


@pytest.mark.parametrize("where", WHERE)
def test_a_gather_returns_when_its_bytes_are_in_staging_memory(torch: StandInTorch, where: Where) -> None:
    staging, memory, model = staging_of(torch, where)
    first = len(torch.launched)
    with torch.cuda.stream(model):
        staging.gather(1, [StagedUnits(0, 16, 8, UNITS)], (a_page(memory),))
    (buffer,) = torch.allocated
    assert (buffer.array[80:104].reshape(3, 8) == memory.reshape(-1, 8)[UNITS]).all()
    assert buffer.array.sum() == buffer.array[80:104].sum(), "the rest was cleared before"
    assert len(torch.launched) > first
    assert all(stream not in (model, torch.default) for _, stream in torch.launched[first:])


@pytest.mark.parametrize("where", WHERE)
def test_a_scatter_returns_when_its_bytes_are_in_the_pages(torch: StandInTorch, where: Where) -> None:
    staging, memory, model = staging_of(torch, where)
    (buffer,) = torch.allocated
    buffer.array[:] = np.arange(1, 129)
    first, expected = len(torch.launched), memory.copy()
    expected.reshape(-1, 8)[UNITS] = np.arange(81, 105).reshape(3, 8)
    with torch.cuda.stream(model):
        staging.scatter(1, [StagedUnits(0, 16, 8, UNITS)], (a_page(memory),))
    assert (memory == expected).all()
    assert len(torch.launched) > first
    assert all(stream not in (model, torch.default) for _, stream in torch.launched[first:])


@pytest.mark.parametrize(("where", "device", "pinned"), [("device", DEVICE, False), ("host", "cpu", True)])
def test_staging_memory_lies_beside_the_kv_or_is_page_locked(
    torch: StandInTorch, where: Where, device: str, pinned: bool
) -> None:
    staging, memory, _ = staging_of(torch, where)
    (buffer,) = torch.allocated
    assert (buffer.device, buffer.pinned, buffer.data_ptr()) == (device, pinned, staging.base)
    for _ in range(2):
        staging.gather(0, [StagedUnits(0, 0, 8, UNITS)], (a_page(memory),))
    staging.scatter(0, [StagedUnits(0, 0, 8, UNITS)], (a_page(memory),))
    assert torch.pageable == [], "indices are page-locked too"
