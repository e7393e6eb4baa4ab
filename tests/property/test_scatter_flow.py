"""Both ends of the scatter path's flow control over a network that loses, repeats and reorders messages.

The slots are simulated as memory: a slot holds the number of the chunk that was written last.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcp_connector.flow import Inflow, Outflow


class Stream(RuleBasedStateMachine):
    """One pull, from the grant on."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.num_slots = 7, 3
        self.prefill, self.decode = Outflow(self.total, self.num_slots), Inflow(self.total, self.num_slots)
        self.slots: list[int | None] = [None] * self.num_slots
        self.to_decode: list[int] = []
        self.to_prefill: list[int] = []
        self.scattering: dict[int, int] = {}
        self.scattered: list[int] = []
        self.lossless = True
        self.halted = False

    @rule()
    def write(self) -> None:
        turn = self.prefill.next_chunk()
        if turn is None:
            return
        number, slot = turn
        assert self.slots[slot] is None or self.slots[slot] in self.scattered, "overwritten before it was read"
        assert slot not in self.scattering.values(), "written while it is being read"
        self.slots[slot] = number
        self.prefill.wrote()
        self.to_decode.append(number)

    @precondition(lambda self: self.to_decode)
    @rule(data=st.data(), keep=st.booleans())
    def deliver_chunk(self, data: st.DataObject, keep: bool) -> None:
        number = data.draw(st.sampled_from(self.to_decode))
        if not keep:
            self.to_decode.remove(number)
        self.begin(number)

    @rule(number=st.integers(-2, 12))
    def a_peer_names_any_chunk(self, number: int) -> None:
        if number in range(self.total) and (number in self.to_decode or number not in self.slots):
            # One that is there would be scattered, rightly; one that isn't there must not be named by an honest peer.
            return
        self.begin(number)

    def begin(self, number: int) -> None:
        slot = self.decode.begin(number)
        if slot is None:
            return
        assert not self.halted, "begun after the pull was given up"
        assert self.slots[slot] == number, "scattered from a slot that holds another chunk"
        assert number not in self.scattered, "scattered twice"
        self.scattering[number] = slot

    @precondition(lambda self: self.scattering)
    @rule(data=st.data())
    def finish_scattering(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.scattering)))
        assert not self.decode.quiet
        del self.scattering[number]
        self.decode.scattered(number)
        self.scattered.append(number)
        self.to_prefill.append(number)

    @precondition(lambda self: self.to_prefill)
    @rule(data=st.data(), keep=st.booleans())
    def deliver_taken(self, data: st.DataObject, keep: bool) -> None:
        number = data.draw(st.sampled_from(self.to_prefill))
        if not keep:
            self.to_prefill.remove(number)
        self.prefill.taken(number)

    @precondition(lambda self: self.to_decode or self.to_prefill)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from([queue for queue in (self.to_decode, self.to_prefill) if queue]))
        queue.remove(data.draw(st.sampled_from(queue)))
        self.lossless = False

    @rule(really=st.integers(0, 8).map(lambda number: number == 8))
    def give_up(self, really: bool) -> None:
        if really:
            self.decode.halt()
            self.halted = True

    @invariant()
    def both_ends_know_when_they_are_done(self) -> None:
        assert self.decode.quiet == (not self.scattering)
        assert self.decode.complete == (sorted(self.scattered) == list(range(self.total)))

    def teardown(self) -> None:
        """With a network that loses nothing, everything that was begun can be brought to its end."""
        if not self.lossless or self.halted:
            return
        for _ in range(4 * self.total):
            self.write()
            for number in self.to_decode:
                self.begin(number)
            for number in list(self.scattering):
                del self.scattering[number]
                self.decode.scattered(number)
                self.scattered.append(number)
                self.to_prefill.append(number)
            for number in self.to_prefill:
                self.prefill.taken(number)
        assert self.prefill.complete
        assert self.decode.complete


Stream.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStream = Stream.TestCase


@settings(max_examples=60, deadline=None)
@given(total=st.integers(0, 20), num_slots=st.integers(1, 6))
def test_without_credit_prefill_writes_as_many_chunks_as_there_are_slots(total: int, num_slots: int) -> None:
    prefill = Outflow(total, num_slots)
    written = []
    while (turn := prefill.next_chunk()) is not None:
        prefill.wrote()
        written.append(turn)
    assert written == [(number, number) for number in range(min(total, num_slots))]
    assert prefill.complete == (total <= num_slots)


def test_misuse_is_an_error() -> None:
    full = Outflow(2, 1)
    full.wrote()
    with pytest.raises(ValueError, match="chunk 1 has no slot"):
        full.wrote()
    with pytest.raises(ValueError, match="chunk 0 isn't being scattered"):
        Inflow(2, 1).scattered(0)
    for kind in (Inflow, Outflow):
        with pytest.raises(ValueError, match="1 chunks through 0 slots"):
            kind(1, 0)
