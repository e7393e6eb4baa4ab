"""Runs one target: many inputs, watched for crashes, slowness and growth."""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import dataclass

from tests.fuzz.targets import TARGETS, Target

#: An input that takes longer lets a peer hold up everybody's thread. Far above what a loaded machine adds.
SLOWEST_S = 5.0
#: What a target may keep more than after its first half, when everything bounded has had time to fill.
MOST_GROWTH_BYTES = 8 << 20
_CHECK_EVERY = 1000


class FoundError(Exception):
    """The fuzzer found something: the message says what, and how to see it again."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What a run did. `taken`: inputs that weren't refused."""

    target: str
    seed: int
    num_inputs: int
    taken: int
    seconds: float
    grown_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.target:10} {self.num_inputs:>9} inputs, {self.taken:>8} taken, {self.seconds:6.1f} s, "
            f"{self.grown_bytes / 1024:8.0f} KiB more in the second half, seed {self.seed}"
        )


def run(name: str, seed: int, *, num_inputs: int | None = None, seconds: float = float("inf")) -> Tally:
    """Feed a target until either limit is reached. Raises FoundError."""
    target = TARGETS[name](random.Random(seed))
    began = time.monotonic()
    count = taken = 0
    half: int | None = None
    tracemalloc.start()
    try:
        while (num_inputs is None or count < num_inputs) and time.monotonic() - began < seconds:
            taken += _feed(target, name, seed, count)
            count += 1
            if count % _CHECK_EVERY == 0:
                _check_sizes(target, name, seed, count)
            done = max(count / num_inputs if num_inputs else 0.0, (time.monotonic() - began) / seconds)
            if half is None and done >= 0.5:
                half = tracemalloc.get_traced_memory()[0]
        _check_sizes(target, name, seed, count)
        grown = tracemalloc.get_traced_memory()[0] - (half or 0)
    finally:
        tracemalloc.stop()
        target.close()
    if grown > MOST_GROWTH_BYTES:
        raise FoundError(
            f"{name}: {grown} bytes more are kept after {count} inputs than after half of them; seed {seed}"
        )
    return Tally(name, seed, count, taken, time.monotonic() - began, grown)


def _feed(target: Target, name: str, seed: int, count: int) -> bool:
    started = time.monotonic()
    try:
        taken = target.feed()
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise FoundError(f"{name}: input {count} of seed {seed} raised {words}") from error
    took = time.monotonic() - started
    if took > SLOWEST_S:
        raise FoundError(f"{name}: input {count} of seed {seed} took {took:.1f} s")
    return taken


def _check_sizes(target: Target, name: str, seed: int, count: int) -> None:
    for what, (size, bound) in target.sizes().items():
        if size > bound:
            raise FoundError(f"{name}: {size} {what} after {count} inputs of seed {seed}, bound {bound}")
