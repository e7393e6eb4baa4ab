"""A prefill rank's sender alone, with memory of its own for both sides."""

from __future__ import annotations

import time

import numpy as np

from dcp_connector.config import ConnectorConfig
from dcp_connector.handshake import wire_layout, wire_page
from dcp_connector.requests_prefill import Write, Written
from dcp_connector.sender import Sender
from dcp_connector.stats import Counters
from dcp_connector.tensors import Fence, describe
from dcp_connector.wire import Chunk, Want
from tests.support.kv_oracle import HEAD_MAJOR, Rank, Sizes
from tests.support.transfer_memory import MemoryTransport, tensors_of, wait_for
from tests.support.transfer_messages import a_hold, a_pull

SIDE = Sizes(1, 1, 16, 16, 1)
FAR = time.monotonic() + 1e6


class SenderBench:
    """A sender with its own prefill and decode memory."""

    def __init__(self, transport: MemoryTransport, **config: object) -> None:
        self.prefill, self.decode = (Rank(SIDE, 0, 0, 8, 2, 16, HEAD_MAJOR) for _ in range(2))
        layout = SIDE.layout()
        layers = [describe(name, tensor, layout, 8) for name, tensor in tensors_of(self.prefill).items()]
        targets = [describe(name, tensor, layout, 8) for name, tensor in tensors_of(self.decode).items()]
        self.pages = {layer.name: wire_page(layer.page) for layer in targets}
        self.done: dict[str, Written] = {}
        self.told: list[Want | Chunk] = []
        self.counters = Counters()
        options = ConnectorConfig(**{"mooncake_protocol": "tcp", "staging_bytes": 1 << 20, "path": "direct", **config})
        self.sender = Sender(
            transport,
            tuple(layers),
            layout,
            0,
            options,
            options.staging_bytes,
            self.counters,
            lambda _transfer, pull_id, written: self.done.update({pull_id: written}),
            lambda _peer, message: self.told.append(message),
            whole_pages=False,
        )

    def submit(
        self,
        pull_id: str,
        *,
        segment: str = "peer",
        deadline: float = FAR,
        blocks: tuple[int, ...] = (2,),
        fence: Fence | None = None,
    ) -> None:
        pull = a_pull(
            pull_id,
            end=16,
            layout=wire_layout(SIDE.layout()),
            pages=self.pages,
            segment=segment,
            block_table=np.array(blocks, dtype="<i8").tobytes(),
        )
        self.sender.submit(Write(pull, a_hold(num_tokens=16), deadline), fence)

    def is_parked(self) -> bool:
        """Whether the sender waits for decode with nothing else to do."""
        return bool(self.sender._lanes.parked()) and not self.sender._lanes._lanes

    def wait(self, count: int) -> None:
        wait_for(lambda: len(self.done) == count, 10, f"only {list(self.done)} were reported")
