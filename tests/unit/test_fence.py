"""The fence behind a prompt's kernels: until it is reached the sender neither gathers nor writes anything."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dcp_connector.chunks import plan_chunks
from dcp_connector.requests_prefill import Written
from dcp_connector.wire import Grant
from tests.support.transfer_memory import MemoryTransport
from tests.support.transfer_sender import SenderBench

#: What `SenderBench` moves: a block of 16 rows of 16 bytes in each of two layers.
BLOCK_BYTES, ROW_BYTES, NUM_BYTES = 256, 16, 512
#: Blocks of the prompt on prefill and on decode.
SOURCE, TARGET = 0, 2


class Gate:
    """A fence that stands until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.reached.set()
        assert self.opened.wait(60), "nobody opened the gate"


def block(bench: SenderBench, side: str, layer: int, number: int) -> np.ndarray:
    """Return a block's bytes of a layer on one side."""
    rank = getattr(bench, side)
    return rank.at(rank.pages[layer].base + number * BLOCK_BYTES, BLOCK_BYTES)


@pytest.mark.parametrize("path", ["direct", "pack", "scatter"])
def test_nothing_is_gathered_or_written_before_the_prompts_kernels_are_over(path: str) -> None:
    transport, gate, slots = MemoryTransport(), Gate(), np.zeros(NUM_BYTES, dtype=np.uint8)
    bench = SenderBench(transport, path=path)
    staging = bench.sender._writer._staging._mover._buffer
    before = bench.decode.memory.copy()
    try:
        bench.submit("a", fence=gate)
        # Decode's answer is there already: nothing but the fence is waited for.
        bench.sender.granted(Grant("a", (int(slots.ctypes.data),), NUM_BYTES))
        assert gate.reached.wait(10), "the sender did not wait for the fence"
        assert transport.batches == []
        assert not staging.any()
        assert not slots.any()
        assert (bench.decode.memory == before).all()
        assert bench.done == {}
        # The kernels write the prompt's KV only now.
        for layer in range(2):
            block(bench, "prefill", layer, SOURCE)[:] = np.arange(BLOCK_BYTES) % 100 + layer
    finally:
        gate.opened.set()
    bench.wait(1)
    bench.sender.close()
    assert bench.done == {"a": Written(NUM_BYTES)}
    assert (bench.counters.take() or {})["paths"] == {path: 1}
    expected = [block(bench, "prefill", layer, SOURCE) for layer in range(2)]
    if path == "scatter":
        rows = [expected[part.layer][part.first_row * ROW_BYTES :][: part.num_rows * ROW_BYTES] for part in parts()]
        assert (slots == np.concatenate(rows)).all()
    else:
        assert [block(bench, "decode", layer, TARGET).tolist() for layer in range(2)] == [e.tolist() for e in expected]


def parts():
    """Return the parts of the only chunk that holds the whole prompt."""
    (chunk,) = plan_chunks(16, (ROW_BYTES, ROW_BYTES), NUM_BYTES)
    return chunk.parts
