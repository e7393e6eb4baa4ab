"""Staging memory: units come in order into the right slot, and go back to where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_connector.pages import StagedUnits
from dcp_connector.paths import landing_slots
from dcp_connector.staging import Staging
from dcp_connector.units import MIB
from tests.support.staged_units import UNITS, a_page
from tests.support.transfer_memory import ArrayTensor


def staging_of(memory: np.ndarray) -> Staging:
    return Staging([ArrayTensor(memory, 0, (1,), (1,))], slot_bytes=64, num_slots=2)


def test_units_are_gathered_in_order_into_the_right_slot() -> None:
    memory = (np.arange(256) % 251).astype(np.uint8)
    staging = staging_of(memory)
    pages = (a_page(memory, 0), a_page(memory, 128))
    staging.gather(1, [StagedUnits(1, 16, 8, UNITS)], pages)
    slots = staging._mover._buffer.reshape(2, 64)
    assert (slots[1, 16:40].reshape(3, 8) == memory[128:].reshape(-1, 8)[UNITS]).all()
    assert slots.sum() == slots[1, 16:40].sum()
    assert staging.address(1) == staging.base + 64


def test_units_are_scattered_to_where_they_belong_and_nothing_else_changes() -> None:
    memory = np.zeros(256, dtype=np.uint8)
    staging = staging_of(memory)
    staging._mover._buffer[:] = np.arange(1, 129)
    staging.scatter(1, [StagedUnits(1, 16, 8, UNITS)], (a_page(memory, 0), a_page(memory, 128)))
    expected = np.zeros((32, 8), dtype=np.uint8)
    expected[16 + UNITS] = np.arange(64 + 16 + 1, 64 + 40 + 1).reshape(3, 8)
    assert (memory.reshape(32, 8) == expected).all()


@pytest.mark.parametrize("staging_bytes", [MIB, 3 * MIB, 100 * MIB, 256 * MIB, 256 * MIB + 1, 4096 * MIB])
@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_decodes_staging_memory_stays_within_its_setting(staging_bytes, transport) -> None:
    slot_bytes, num_slots = landing_slots(staging_bytes, transport)
    assert slot_bytes * num_slots <= staging_bytes
    assert num_slots >= 4
