"""Inputs that are nearly right: valid ones, changed a little, in bytes or in structure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

#: Numbers at which code changes its mind.
_NUMBERS = (0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 512, 513, 2**16, 2**20, 2**20 + 1, 2**31, 2**32, 2**40, 2**62, 2**63)
_VALUES: tuple[Any, ...] = (
    None, True, False, "", "a", "x" * 600, "\x00", "ä€😀", "http://[::1]:80", "tcp://a:1", b"", b"\xff" * 40,
    [], {}, [[]], {"": {}}, 0.0, -0.5, 1e300, float("inf"), float("nan"), *_NUMBERS,
)  # fmt: skip


class Mutator:
    """Changes inputs with one random generator, so that a seed tells them all."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def bytes(self, seed: bytes, others: Sequence[bytes]) -> bytes:
        """Return `seed` after one to four changes of bytes."""
        data = bytearray(seed)
        for _ in range(self.rng.randint(1, 4)):
            self.rng.choice(_CHANGES)(self, data, others)
        return bytes(data)

    def value(self, seed: Any) -> Any:
        """Return a copy of a structure of lists, dictionaries and leaves, with one to three places changed."""
        value = seed
        for _ in range(self.rng.randint(1, 3)):
            value = self._change(value, 0)
        return value

    def noise(self, longest: int = 300) -> bytes:
        return self.rng.randbytes(self.rng.randint(0, longest))

    def _change(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict) and value and depth < 6 and self.rng.random() < 0.85:
            key = self.rng.choice(list(value))
            match self.rng.randint(0, 9):
                case 0:
                    return {k: v for k, v in value.items() if k != key}
                case 1:
                    return {**value, self.rng.choice(("k", "new", "", 7, key)): self._leaf()}
                case _:
                    return {**value, key: self._change(value[key], depth + 1)}
        if isinstance(value, list) and value and depth < 6 and self.rng.random() < 0.85:
            at = self.rng.randrange(len(value))
            match self.rng.randint(0, 9):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return value[:at] + [value[at]] * self.rng.randint(2, 50) + value[at:]
                case _:
                    return [*value[:at], self._change(value[at], depth + 1), *value[at + 1 :]]
        if isinstance(value, int) and not isinstance(value, bool) and self.rng.random() < 0.6:
            return value + self.rng.choice((-1, 1, 2**31)) if self.rng.random() < 0.5 else self.rng.choice(_NUMBERS)
        if isinstance(value, bytes) and value and self.rng.random() < 0.6:
            return self.bytes(value, (value,))
        return self._leaf()

    def _leaf(self) -> Any:
        if self.rng.random() < 0.05:
            deep: Any = 0
            for _ in range(self.rng.choice((10, 100, 500))):
                deep = [deep]
            return deep
        return self.rng.choice(_VALUES)

    def flip(self, data: bytearray, _others: Sequence[bytes]) -> None:
        if data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)

    def overwrite(self, data: bytearray, _others: Sequence[bytes]) -> None:
        if data:
            at = self.rng.randrange(len(data))
            data[at : at + self.rng.randint(1, 8)] = self.rng.randbytes(self.rng.randint(1, 8))

    def insert(self, data: bytearray, _others: Sequence[bytes]) -> None:
        at = self.rng.randint(0, len(data))
        data[at:at] = self.rng.randbytes(self.rng.randint(1, 16))

    def delete(self, data: bytearray, _others: Sequence[bytes]) -> None:
        if data:
            at = self.rng.randrange(len(data))
            del data[at : at + self.rng.randint(1, 16)]

    def cut(self, data: bytearray, _others: Sequence[bytes]) -> None:
        del data[self.rng.randint(0, len(data)) :]

    def repeat(self, data: bytearray, _others: Sequence[bytes]) -> None:
        if data:
            at = self.rng.randrange(len(data))
            data[at:at] = data[at : at + self.rng.randint(1, 32)] * self.rng.randint(1, 20)

    def splice(self, data: bytearray, others: Sequence[bytes]) -> None:
        other = self.rng.choice(others)
        data[self.rng.randint(0, len(data)) :] = other[self.rng.randint(0, len(other)) :]


_CHANGES: tuple[Callable[[Mutator, bytearray, Sequence[bytes]], None], ...] = (
    Mutator.flip,
    Mutator.overwrite,
    Mutator.insert,
    Mutator.delete,
    Mutator.cut,
    Mutator.repeat,
    Mutator.splice,
)
