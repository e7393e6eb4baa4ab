"""A prefill and a decode engine of real processes that faults are tried on, and what holds during and after each."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.fault_engines import PATIENCE_S, FaultEngine, Prompt, start, wait_until
from tests.support.kv_oracle import Sizes

ONE, TWO_HEADS = Sizes(1, 1, 16, 16, 1), Sizes(2, 1, 16, 16, 2)
DCP, WIDE, FOUR = Sizes(2, 2, 1, 16, 1), Sizes(1, 1, 16, 16, 2), Sizes(4, 4, 1, 16, 1)
TOKENS = 70
#: Blocks of one prompt on either side, and those that several prompts share out among themselves.
P_TABLE, D_TABLE = (3, 9, 1, 7, 12), (5, 2, 8, 0, 11)
NUM_BLOCKS, FIRST_OF_MANY = 64, 16
#: Short, so that tests don't wait long.
TIMES = {"request_timeout_s": 4.0, "cancel_grace_s": 0.5, "lease_s": 6.0}
#: Long enough for forty transfers on a loaded machine.
LONGER = {**TIMES, "request_timeout_s": 10.0, "lease_s": 15.0}
#: What a loaded machine adds to the deadline and the grace of a load, until its rank reports it.
SLACK_S = 2.5
#: Small batches or small staging memory, so that a transfer has many batches or several chunks.
SETTINGS: dict[str, dict[str, Any]] = {
    "direct": {"path": "direct", "max_batch_descriptors": 8, "num_blocks": NUM_BLOCKS, **TIMES},
    "scatter": {"path": "scatter", "staging_bytes": 1 << 20, "entry_bytes": 8192, "num_blocks": NUM_BLOCKS, **TIMES},
}
#: Decode's staging memory of 1 MiB is four slots, and two of them are always left to other prefill engines.
SLOT_BYTES, NUM_SLOTS, SLOTS_OF_ONE = 1 << 18, 4, 2
BEFORE, DURING, AFTER = "before the prompt is computed", "while it is written", "when it has been written"
#: Prefill has found that all ranks of decode run, and has written nothing to them, nor ever before.
MET = "when prefill has met it"
#: How a load may end whose writers were lost or frozen, or that were too late.
LOST = ("peer_lost", "deadline", "transfer_error", "lease_expired")


class Pair:
    """A prefill and a decode engine that tests share; one with a dead rank is started again, at the same address."""

    def __init__(self, folder: Path, path: str, prefill: Sizes, decode: Sizes) -> None:
        self.settings = SETTINGS[path]
        self._folder = folder
        self._sizes = {"prefill": prefill, "decode": decode}
        self._engines: dict[str, FaultEngine] = {}
        self._port = 0

    def get(self) -> tuple[FaultEngine, FaultEngine]:
        for role, sizes in self._sizes.items():
            engine = self._engines.get(role)
            if engine is not None and not all(rank.alive for rank in engine.ranks):
                self._engines.pop(role).stop()
            if role not in self._engines:
                port = self._port if role == "prefill" else 0
                self._engines[role] = start(role, sizes, self._folder, port, **self.settings)
        prefill, decode = self._engines["prefill"], self._engines["decode"]
        assert prefill.bootstrap
        self._port = prefill.bootstrap.port
        return prefill, decode

    def stop(self) -> None:
        for engine in self._engines.values():
            engine.stop()


def ask(d: FaultEngine) -> Prompt:
    """A new prompt in the same blocks as the last one."""
    return Prompt(P_TABLE, D_TABLE[: blocks_of(d)], TOKENS)


def several(d: FaultEngine, count: int) -> list[Prompt]:
    """New prompts with blocks of their own."""
    per_source, per_target = len(P_TABLE), blocks_of(d)
    free = range(FIRST_OF_MANY, NUM_BLOCKS)
    source = random.Random(1).sample(free, count * per_source)
    target = random.Random(2).sample(free, count * per_target)
    return [
        Prompt(
            tuple(source[n * per_source :][:per_source]),
            tuple(target[n * per_target :][:per_target]),
            TOKENS,
        )
        for n in range(count)
    ]


def blocks_of(d: FaultEngine) -> int:
    return -(-TOKENS // (d.sizes.b * d.sizes.w))


def ended(
    d: FaultEngine,
    prompts: Sequence[Prompt],
    *reasons: str | None,
    since: float = 0.0,
    times: Mapping[str, float] = TIMES,
) -> list[str | None]:
    """Loads end on all running ranks, for these reasons, in time, and what a rank calls good is right to the byte.

    Nothing else has changed in its memory since the loads began. The time of a rank that was frozen counts from
    `since`. Returns the reasons.
    """
    found = [each for prompt in prompts for each in d.all_received(prompt)]
    assert {each.reason for each in found} <= set(reasons), found
    took_s = max(each.ended - max(each.began, since) for each in found)
    assert took_s < times["request_timeout_s"] + times["cancel_grace_s"] + SLACK_S, found
    assert not any(d.wrong_bytes(*prompts)), "reported good, and bytes are wrong, or a write went astray"
    return [each.reason for each in found]


def reused(d: FaultEngine, *prompts: Prompt) -> None:
    """The blocks get another owner, as they would in vLLM; `untouched` then says whether a late write came."""
    d.clear()
    for prompt in prompts:
        d.all("reuse", table=prompt.target)


def untouched(d: FaultEngine) -> None:
    assert not any(d.wrong_bytes()), "a late write landed in blocks of another owner"


def settled(*engines: FaultEngine) -> None:
    """Nothing is unclear and no staging memory is in use."""
    for engine in engines:
        engine.clear()
        wait_until(lambda engine=engine: not any(engine.staging()), PATIENCE_S, lambda: "staging is in use")


def works(p: FaultEngine, d: FaultEngine) -> None:
    """A transfer between the two is right, takes its path and leaves nothing behind."""
    prompt, before = ask(d), p.written()
    d.poll()
    p.peaks.clear()
    d.peaks.clear()
    p.hold(prompt)
    d.load(p, prompt)
    ended(d, [prompt], None)
    assert p.all_sent(prompt) == {None}
    after = p.written()
    assert {path for path in after if after[path] > before[path]} == {p.path}
    settled(p, d)
    for engine in (p, d):
        peaks = [engine.peaks[number] for number in engine.running()]
        assert all(peaks) if p.path == "scatter" else not any(peaks), f"staging memory that was in use: {peaks}"


def written_to(p: FaultEngine, d: FaultEngine, prompt: Prompt, origin: str | None = None) -> None:
    """A part of a transfer is written, and a writer of each prefill rank that has a place to write to stands still."""
    p.all("gate", after=1)
    p.hold(prompt)
    d.load(p, prompt, origin=origin)
    # By the scatter path two prefill ranks wait for the same slots.
    p.held_up(len(p.ranks) if p.path == "direct" else 1)
    assert any(p.staging()) == any(d.staging()) == (p.path == "scatter")


def come_to(moment: str, p: FaultEngine, d: FaultEngine) -> Prompt:
    """A transfer, up to this moment of its life."""
    prompt = ask(d)
    if moment == BEFORE:
        d.load(p, prompt)
        d.poll()
        p.poll()
    elif moment == MET:
        p.all("gate", after=0)
        p.hold(prompt)
        d.load(p, prompt)
        p.held_up(len(p.ranks) * len(d.ranks))
    elif moment == DURING:
        written_to(p, d, prompt)
    else:
        p.hold(prompt)
        d.load(p, prompt)
        ended(d, [prompt], None)
        assert p.all_sent(prompt) == {None}
    return prompt


def one_rank(p: FaultEngine) -> int:
    """One of two prefill ranks; if only one of them may write at present, that one."""
    return max(p.running(), key=lambda number: (p.last[number]["held_up"], number))
