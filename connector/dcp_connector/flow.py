"""Flow control of the scatter path: which chunk may go into which staging slot, as seen from either side.

Chunk k lies in slot k % n of the n slots that decode granted. Prefill writes it when decode has taken chunk k - n out
of that slot, so a slot is never overwritten before it was read. Messages may be lost, repeated or reordered: a lost one
stops the pull, which then ends at its deadline, and no order of the others moves a wrong byte.
"""

from __future__ import annotations

__all__ = ["Inflow", "Outflow"]


class Outflow:
    """Prefill's side: chunks 0 to `total` - 1 go out through `num_slots` slots."""

    def __init__(self, total: int, num_slots: int) -> None:
        if total < 0 or num_slots < 1:
            raise ValueError(f"{total} chunks through {num_slots} slots")
        self._total = total
        self._num_slots = num_slots
        self._next = 0
        self._in_slots: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every chunk was written."""
        return self._next == self._total

    def next_chunk(self) -> tuple[int, int] | None:
        """Return (number, slot) of the chunk to write next, or None while its slot is full or none is left."""
        if self.complete or self._next - self._num_slots in self._in_slots:
            return None
        return self._next, self._next % self._num_slots

    def wrote(self) -> None:
        """The chunk that `next_chunk` returned is on its way into its slot."""
        if self.next_chunk() is None:
            raise ValueError(f"chunk {self._next} has no slot")
        self._in_slots.add(self._next)
        self._next += 1

    def taken(self, number: int) -> None:
        """Decode has read this chunk. Numbers of chunks that are in no slot are ignored."""
        self._in_slots.discard(number)


class Inflow:
    """Decode's side: each chunk is scattered once, out of a slot that prefill doesn't write meanwhile."""

    def __init__(self, total: int, num_slots: int) -> None:
        if total < 0 or num_slots < 1:
            raise ValueError(f"{total} chunks through {num_slots} slots")
        self._total = total
        self._expected = list(range(num_slots))
        self._busy = [False] * num_slots
        self._halted = False

    @property
    def quiet(self) -> bool:
        """Whether nothing is being scattered."""
        return not any(self._busy)

    @property
    def complete(self) -> bool:
        """Whether every chunk was scattered."""
        return self.quiet and all(number >= self._total for number in self._expected)

    def halt(self) -> None:
        """Begin nothing any more; what runs is waited for."""
        self._halted = True

    def begin(self, number: int) -> int | None:
        """Return the slot to scatter this chunk from, or None when it can't be there: wrong, repeated, or too late."""
        if self._halted or not 0 <= number < self._total:
            return None
        slot = number % len(self._expected)
        if self._busy[slot] or self._expected[slot] != number:
            return None
        self._busy[slot] = True
        return slot

    def scattered(self, number: int) -> None:
        """The chunk's bytes are in the pages and its slot is free."""
        slot = number % len(self._expected)
        if not self._busy[slot] or self._expected[slot] != number:
            raise ValueError(f"chunk {number} isn't being scattered")
        self._busy[slot] = False
        self._expected[slot] += len(self._expected)
