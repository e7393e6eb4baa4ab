"""The pairs that go through the real TransferEngine: chosen so that every two values of different dimensions meet.

There are far more combinations than can be run. Most mistakes need at most two things to come together, such as a
layout and a path, so each pair of values of any two dimensions below occurs in at least one case (`cases`), and nothing
is left to chance: the same cases every time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import get_args

from dcp_connector.config import ConnectorConfig
from tests.support.kv_oracle import VLLM_LAYOUTS, Physical, Sizes
from tests.support.transfer_pair import ENTRY_BYTES, Pair

#: (T, W, I, B, H) of prefill and decode. Blocks are multiples of 4, so that kernel blocks can be a quarter of one.
SIDES = {
    "one rank to one rank": ((1, 1, 16, 16, 1), (1, 1, 16, 16, 1)),
    "one rank to DCP 2, interleave 1": ((1, 1, 16, 16, 1), (2, 2, 1, 16, 1)),
    "one rank to DCP 2, interleave 4": ((1, 1, 16, 16, 1), (2, 2, 4, 16, 1)),
    "one rank to DCP 2, interleave = block": ((1, 1, 16, 16, 1), (2, 2, 16, 16, 1)),
    "DCP 2 to one rank": ((2, 2, 1, 16, 1), (1, 1, 16, 16, 1)),
    "DCP 2 to DCP 2, equal": ((2, 2, 4, 16, 1), (2, 2, 4, 16, 1)),
    "DCP 2 to DCP 2, other interleave": ((2, 2, 8, 16, 1), (2, 2, 1, 16, 1)),
    "DCP 2 to DCP 3": ((2, 2, 4, 16, 1), (3, 3, 2, 16, 1)),
    "DCP 3 to DCP 2, blocks that do not divide": ((3, 3, 4, 12, 1), (2, 2, 5, 20, 1)),
    "DCP 2 to DCP 4": ((2, 2, 1, 16, 1), (4, 4, 1, 16, 1)),
    "blocks of 16 to blocks of 32": ((1, 1, 16, 16, 1), (2, 2, 8, 32, 1)),
    "blocks of 24 to blocks of 16": ((1, 1, 24, 24, 1), (2, 2, 2, 16, 1)),
    "more ranks to fewer, one head": ((3, 1, 16, 16, 1), (2, 1, 16, 16, 1)),
    "replicas on both sides": ((4, 2, 2, 16, 1), (4, 2, 8, 16, 1)),
    "two heads split, then sharded": ((2, 1, 16, 16, 2), (4, 2, 1, 16, 2)),
    "two heads joined": ((2, 1, 16, 16, 2), (1, 1, 16, 16, 2)),
    "two heads sharded, then joined": ((4, 2, 4, 16, 2), (1, 1, 16, 16, 2)),
    "two heads replicated, six ranks to four": ((6, 3, 1, 12, 2), (4, 1, 16, 16, 2)),
    "four heads on one rank to a rank each": ((1, 1, 20, 20, 4), (4, 1, 16, 16, 4)),
    "four heads on two ranks to replicas": ((2, 1, 20, 20, 4), (8, 2, 2, 16, 4)),
}
#: MLA has one head without a value, registered without a dimension of heads.
MLA = frozenset(name for name, (prefill, _) in SIDES.items() if prefill[4] == 1 and "DCP" in name)
LAYOUTS = {
    **{name: Physical(order) for name, order in VLLM_LAYOUTS.items()},
    "padded": Physical(("block", "layer", "row", "head"), padding=16),
    "two tensors": Physical(("kv", "layer", "block", "row", "head"), registered="two tensors"),
    "kv before blocks": Physical(("layer", "kv", "block", "row", "head"), registered="kv first"),
    "kv behind blocks": Physical(("layer", "block", "kv", "head", "row"), registered="kv second"),
}
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "sides": tuple(SIDES),
    "prefill layout": tuple(LAYOUTS),
    "decode layout": tuple(LAYOUTS),
    "path": get_args(ConnectorConfig.model_fields["path"].annotation),
    "stages": ("1 to 1", "2 to 1", "1 to 2", "2 to 3"),
    "kernel blocks": ("1 to 1", "2 to 1", "1 to 2", "4 to 2"),
    # Where the range of tokens begins, in blocks that decode has already.
    "prefix": ("none", "one block", "two blocks"),
}
#: Ends of the range, from the first token behind the prefix on, in decode's blocks of all shards and rows more.
ENDS = ((0, 1), (0, 5), (1, -1), (1, 0), (1, 1), (2, 3))
NUM_LAYERS = 3


@dataclass(frozen=True)
class Case:
    """One value of each dimension, in the order of DIMENSIONS."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.values)

    def __getitem__(self, dimension: str) -> str:
        return self.values[list(DIMENSIONS).index(dimension)]

    @property
    def pair(self) -> Pair:
        """The two sides, their memory and their options."""
        name = self["sides"]
        prefill, decode = (Sizes(*sizes) for sizes in SIDES[name])
        ratios, stages = (tuple(map(int, self[what].split(" to "))) for what in ("kernel blocks", "stages"))
        return Pair(
            prefill,
            decode,
            _physical(self["prefill layout"], ratios[0], is_mla=name in MLA),
            _physical(self["decode layout"], ratios[1], is_mla=name in MLA),
            config={"path": self["path"], "max_batch_descriptors": 100},
            stages=(stages[0], stages[1]),
            key_bytes=0 if name in MLA else ENTRY_BYTES // 2,
            num_layers=NUM_LAYERS,
        )

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, end) in tokens: begins at an edge of decode's blocks, as its prefix cache does."""
        decode = Sizes(*SIDES[self["sides"]][1])
        span = decode.b * decode.w
        start = DIMENSIONS["prefix"].index(self["prefix"]) * span
        return tuple((start, start + blocks * span + rows) for blocks, rows in ENDS)


def _physical(name: str, kernel_blocks: int, *, is_mla: bool) -> Physical:
    found = replace(LAYOUTS[name], kernel_blocks_per_block=kernel_blocks)
    if not is_mla:
        return found
    # No value, so nothing to keep apart; what is left of the order is kept.
    return replace(found, order=tuple(part for part in found.order if part != "kv"), registered="one head")


def cases() -> list[Case]:
    """Return cases in which every two values of different dimensions meet, greedily few of them."""
    names = list(DIMENSIONS)
    open_pairs = {
        ((a, x), (b, y)) for a, b in combinations(range(len(names)), 2) for x in _of(names[a]) for y in _of(names[b])
    }
    found: list[Case] = []
    while open_pairs:
        chosen: dict[int, str] = dict(min(open_pairs))
        for number, name in enumerate(names):
            if number not in chosen:
                chosen[number] = max(_of(name), key=lambda value: _gain(open_pairs, chosen, (number, value)))
        case = Case(tuple(chosen[number] for number in range(len(names))))
        found.append(case)
        open_pairs -= set(met(case))
    return found


def met(case: Case) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Return every two values that meet in a case."""
    return list(combinations(enumerate(case.values), 2))


def _of(name: str) -> tuple[str, ...]:
    return DIMENSIONS[name]


def _gain(
    open_pairs: set[tuple[tuple[int, str], tuple[int, str]]], chosen: dict[int, str], candidate: tuple[int, str]
) -> int:
    """Count the open pairs that a candidate closes together with what is chosen already."""
    both = (tuple(sorted((candidate, other))) for other in chosen.items())
    return sum(pair in open_pairs for pair in both)
