"""Nothing that a network, clocks, clients and dying engines do makes a transfer harm anybody, or last for ever."""

from __future__ import annotations

from hypothesis import settings

from tests.support.engine_world import EngineWorld
from tests.support.transfer_world import TransferWorld


class TestRanks(TransferWorld.TestCase):
    """The ranks' state machines alone: many messages in few steps."""

    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


class TestEngines(EngineWorld.TestCase):
    """The same ranks below the schedulers of two engines."""

    settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
