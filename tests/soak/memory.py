"""How much memory an engine's processes keep, and how that grows with requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from devcluster.completions import complete_all
from tests.support.engines import RunningEngine

MIB = 1 << 20
#: How often a twin is looked at.
_TWIN_SAMPLES = 50


@dataclass(frozen=True, slots=True)
class Growth:
    """The slope of resident memory, in MiB per 1,000 requests, and over how many requests it was taken."""

    mib_per_1000: float
    num_requests: int


def resident_bytes(engine: RunningEngine) -> int:
    """Private memory of an engine's processes; shared pages, which are counted for each of them, left out."""
    total = 0
    for pid in engine.group.members():
        try:
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        except OSError:
            continue
        total += sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) * 1024
    return total


def growth(samples: Sequence[tuple[int, int]]) -> Growth:
    """Return how memory grows: samples are (requests so far, bytes) since the engine started.

    The first quarter, in which caches fill, is left out. Raises ValueError when fewer than three samples remain.
    """
    steady = samples[len(samples) // 4 :]
    if len(steady) < 3:
        raise ValueError(f"{len(samples)} samples of memory are too few for a slope")
    counts, sizes = np.array(steady, dtype=float).T
    return Growth(float(np.polyfit(counts, sizes, 1)[0]) * 1000 / MIB, steady[-1][0] - steady[0][0])


def twin_growth(
    engine: RunningEngine, prompts: Sequence[str], num_requests: int, max_tokens: int, concurrency: int
) -> Growth:
    """Return how an engine without the connector grows, from its start, while it computes as many prompts."""
    rng = random.Random(len(prompts))
    step = max(concurrency, num_requests // _TWIN_SAMPLES)
    samples: list[tuple[int, int]] = []
    for first in range(0, num_requests, step):
        complete_all(engine.url, rng.choices(prompts, k=step), max_tokens=max_tokens, concurrency=concurrency)
        samples.append((first + step, resident_bytes(engine)))
    return growth(samples)
