"""What breaks, breaks here: processes that die and freeze, messages that don't arrive, clients that leave.

Every rank is a process with the product's worker and the real TransferEngine. Most tests run by the direct path and by
the scatter path, with staging memory of four slots and transfers of several chunks.

During a fault no id is reported twice, no load takes longer than its deadline and grace, and what a rank reports as
good is right to the byte; nothing else changes in its memory (`ended`). Blocks that go to another owner afterwards stay
as that one left them (`untouched`). In the end the same engines, or those that were restarted, transfer a prompt of the
same length into the same blocks, right to the byte and by the same path, and then no blocks are held and no staging
memory is in use (`works`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.control_proxy import Weather, control_proxy
from tests.support.fault_engines import PATIENCE_S, FaultEngine, Prompt, running, wait_until
from tests.support.fault_pair import (
    AFTER,
    BEFORE,
    DCP,
    DURING,
    FOUR,
    LONGER,
    LOST,
    MET,
    NUM_SLOTS,
    ONE,
    P_TABLE,
    SETTINGS,
    SLOT_BYTES,
    SLOTS_OF_ONE,
    TIMES,
    TOKENS,
    TWO_HEADS,
    WIDE,
    Pair,
    ask,
    come_to,
    ended,
    one_rank,
    reused,
    settled,
    several,
    untouched,
    works,
    written_to,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module", params=SETTINGS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(folder: Path, path: str) -> Iterator[Pair]:
    made = Pair(folder, path, ONE, DCP)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def two(folder: Path, path: str) -> Iterator[Pair]:
    """Two prefill ranks that both serve the one decode rank."""
    made = Pair(folder, path, TWO_HEADS, WIDE)
    yield made
    made.stop()


@pytest.mark.parametrize("moment", [BEFORE, DURING, AFTER])
def test_prefill_is_killed(pair: Pair, moment: str) -> None:
    p, d = pair.get()
    prompt, origin = come_to(moment, p, d), p.origin
    p.kill()
    if moment != AFTER:
        ended(d, [prompt], "peer_lost", "bootstrap_unreachable")
        reused(d, prompt)
    settled(d)
    after, d = pair.get()
    assert after.origin == origin
    untouched(d)
    works(after, d)


@pytest.mark.parametrize("moment", [BEFORE, DURING, AFTER])
def test_one_of_two_prefill_ranks_is_killed(two: Pair, moment: str) -> None:
    p, d = two.get()
    prompt = come_to(moment, p, d)
    p.kill(one_rank(p))
    if moment == BEFORE:
        p.hold(prompt)
    p.all("ungate")
    if moment != AFTER:
        ended(d, [prompt], "peer_lost")
        assert p.all_sent(prompt) <= {None, "cancelled"}
        reused(d, prompt)
    settled(p, d)
    untouched(d)
    # An engine that lost a rank is restarted as a whole.
    works(*two.get())


@pytest.mark.parametrize("moment", [BEFORE, MET, DURING, AFTER])
@pytest.mark.parametrize("ranks", [(), (1,)], ids=["all ranks", "one rank"])
def test_decode_is_killed(pair: Pair, folder: Path, moment: str, ranks: tuple[int, ...]) -> None:
    p, other = pair.get()
    with running("decode", DCP, folder, **pair.settings) as d:
        prompt = come_to(moment, p, d)
        d.kill(*ranks)
        if moment == BEFORE:
            p.hold(prompt)
        p.all("ungate")
        if ranks:
            ended(d, [prompt], None)
            settled(d)
        # Its writes fail, or nobody is left to ask: the blocks come back either way, at the latest with the lease.
        assert p.all_sent(prompt) <= {None, *LOST}
    works(p, other)


def test_prefill_freezes_beyond_the_deadline_and_goes_on(pair: Pair) -> None:
    p, d = pair.get()
    prompt = ask(d)
    written_to(p, d, prompt)
    p.freeze()
    ended(d, [prompt], "deadline")
    assert {request_id for _, request_id in d.unclear} == {prompt.id}, "prefill may still write into the blocks"
    assert any(d.staging()) == (p.path == "scatter"), "prefill may still write into the slots"
    p.thaw()
    p.all("ungate")
    reused(d, prompt)
    assert p.all_sent(prompt) <= {"cancelled", "deadline"}
    untouched(d)
    works(p, d)


def test_one_of_two_prefill_ranks_freezes_beyond_the_deadline_and_goes_on(two: Pair) -> None:
    p, d = two.get()
    prompt = ask(d)
    written_to(p, d, prompt)
    p.freeze(one_rank(p))
    p.all("ungate")
    ended(d, [prompt], "deadline")
    assert {request_id for _, request_id in d.unclear} == {prompt.id}, "a rank may still write into the blocks"
    p.thaw()
    p.all("ungate")
    reused(d, prompt)
    assert p.all_sent(prompt) <= {None, "cancelled", "deadline"}
    untouched(d)
    works(p, d)


def test_prefill_freezes_in_the_middle_of_real_batches(pair: Pair) -> None:
    p, d = pair.get()
    prompts = several(d, 6)
    p.hold(*prompts)
    p.all("freeze_at", batch=7)
    d.load(p, *prompts)
    p.freezes()
    assert "deadline" in ended(d, prompts, None, "deadline")
    p.thaw()
    reused(d, *prompts)
    p.all_sent(*prompts)
    untouched(d)
    works(p, d)


@pytest.mark.parametrize(
    ("moment", "ranks"),
    [(BEFORE, ()), (DURING, ()), (DURING, (1,))],
    ids=["while it waits", "while it is written to", "one rank, while it is written to"],
)
def test_decode_freezes_beyond_the_lease_and_goes_on(pair: Pair, moment: str, ranks: tuple[int, ...]) -> None:
    p, d = pair.get()
    prompt = come_to(moment, p, d)
    d.freeze(*ranks)
    until = time.monotonic() + TIMES["lease_s"] + 0.5
    if moment == BEFORE:
        p.hold(prompt)
    p.all("ungate")
    if ranks:
        ended(d, [prompt], None)
    p.all_sent(prompt)
    # Not to wait for something: so long does the fault last.
    time.sleep(max(0.0, until - time.monotonic()))
    thawed = d.thaw()
    # What arrived before the deadline is good; else the request fails. It never hangs.
    ended(d, [prompt], None, *LOST, since=thawed)
    reused(d, prompt)
    untouched(d)
    works(p, d)


@pytest.mark.parametrize("known", [True, False], ids=["that prefill has met", "that prefill meets now"])
def test_a_frozen_decode_engine_holds_up_nobody_else(pair: Pair, folder: Path, known: bool) -> None:
    p, d = pair.get()
    with running("decode", FOUR, folder, **pair.settings) as frozen:
        if known:
            works(p, frozen)
        prompts = several(frozen, 6)
        frozen.load(p, *prompts)
        frozen.poll()
        frozen.freeze()
        p.hold(*prompts)
        for _ in range(3):
            prompt = ask(d)
            p.hold(prompt)
            d.load(p, prompt)
            ended(d, [prompt], None)
        thawed = frozen.thaw()
        ended(frozen, prompts, None, *LOST, since=thawed)
        settled(frozen)
        p.all_sent(*prompts)
    settled(p)
    works(p, d)


WEATHERS = {
    "a tenth is lost": Weather(lose=0.1),
    "half is lost": Weather(lose=0.5),
    "all is repeated": Weather(repeat=1.0),
    "late and out of order": Weather(repeat=0.3, delay_s=0.1),
    "all of it": Weather(lose=0.2, repeat=0.3, delay_s=0.1),
}


@pytest.mark.parametrize("name", WEATHERS)
def test_control_messages_are_lost_repeated_delayed_and_reordered(pair: Pair, name: str) -> None:
    p, d = pair.get()
    prompts, weather = several(d, 8), WEATHERS[name]
    control = p.ranks[0].facts.control
    with control_proxy(control, weather, seed=len(name)) as proxy, p.also_behind([proxy.address]) as origin:
        # Where nothing is lost everything arrives. Few at a time, since they wait for each other's slots.
        at_once, reasons = (8, ("deadline",)) if weather.lose else (2, ())
        for first in range(0, len(prompts), at_once):
            some = prompts[first : first + at_once]
            p.hold(*some)
            d.load(p, *some, origin=origin)
            ended(d, some, None, *reasons)
            reused(d, *some)
        p.all_sent(*prompts)
        untouched(d)
        settled(p, d)
        assert bool(weather.lose) == bool(sum(proxy.lost.values()))
        assert bool(weather.repeat) == bool(proxy.repeated)
        assert bool(weather.delay_s) == bool(proxy.reordered)
    works(p, d)


#: Kinds of messages, see `wire`. What a lost Pull leaves behind is the lease's business.
KINDS = {
    "direct": ("done", "cancel", "settled"),
    "scatter": ("want", "grant", "chunk", "taken", "done", "cancel", "settled"),
}


def test_a_transfer_that_lost_a_message_is_given_up(pair: Pair) -> None:
    p, d = pair.get()
    with control_proxy(p.ranks[0].facts.control, Weather()) as proxy, p.also_behind([proxy.address]) as origin:
        for kind in KINDS[p.path]:
            prompt = ask(d)
            proxy.lose(kind, len(d.ranks))
            if kind == "cancel":
                written_to(p, d, prompt, origin)
                d.work(aborts=[prompt.id])
            elif kind == "settled":
                asked = proxy.taken["pull"] + len(d.ranks)
                d.load(p, prompt, origin=origin)
                wait_until(lambda asked=asked: proxy.taken["pull"] == asked, PATIENCE_S, lambda: str(proxy.taken))
                d.work(aborts=[prompt.id])
            else:
                p.hold(prompt)
                d.load(p, prompt, origin=origin)
            wait_until(lambda kind=kind: proxy.lost[kind] == len(d.ranks), PATIENCE_S, lambda: str(proxy.lost))
            assert any(d.staging()) or kind not in ("grant", "chunk", "taken"), "the transfer should hang"
            d.work(aborts=[prompt.id])
            p.all("ungate")
            ended(d, [prompt], None, "cancelled")
            reused(d, prompt)
            if kind == "settled":
                p.hold(prompt)
            assert p.all_sent(prompt) <= {None, "cancelled"}
            settled(p, d)
            untouched(d)
    works(p, d)


@dataclass
class Full:
    """Forty loads of one decode engine fill its staging memory; each prefill engine has twenty of them."""

    prefills: tuple[FaultEngine, FaultEngine]
    d: FaultEngine
    prompts: tuple[list[Prompt], list[Prompt]]


@pytest.fixture
def full(folder: Path) -> Iterator[Full]:
    """Writers stand before their first write, and no slot is free. Each prefill engine has a prompt under five ids."""
    loads, per_target = 20, 3
    settings = {**SETTINGS["scatter"], **LONGER, "num_blocks": 2 * loads * per_target}
    with (
        running("prefill", ONE, folder, **settings) as first,
        running("prefill", ONE, folder, **settings) as second,
        running("decode", DCP, folder, **settings) as d,
    ):
        made = Full((first, second), d, ([], []))
        for place, p in enumerate(made.prefills):
            p.all("gate", after=0)
            for n in range(loads):
                source, target = len(P_TABLE) * (n % 4), per_target * (place * loads + n)
                tables = tuple(range(source, source + len(P_TABLE))), tuple(range(target, target + per_target))
                made.prompts[place].append(Prompt(*tables, TOKENS, number=4 * place + n % 4))
            p.hold(*made.prompts[place])
            d.load(p, *made.prompts[place])
        all_slots = [NUM_SLOTS * SLOT_BYTES] * len(d.ranks)
        wait_until(lambda: d.staging() == all_slots, PATIENCE_S, lambda: f"never full: {d.staging()}")
        for p in made.prefills:
            p.held_up(len(d.ranks))
            assert all(p.staging())
        yield made


def test_more_transfers_than_staging_has_room_for(full: Full) -> None:
    (first, second), d = full.prefills, full.d
    for p, prompts in zip(full.prefills, full.prompts, strict=True):
        p.all("ungate")
        assert p.all_sent(*prompts) == {None}
    ended(d, [*full.prompts[0], *full.prompts[1]], None, times=LONGER)
    settled(first, second, d)
    assert first.written()["scatter"] == second.written()["scatter"] == len(d.ranks) * len(full.prompts[0])
    works(first, d)
    works(second, d)


def test_a_writer_that_freezes_while_it_holds_staging_holds_up_nobody_else_and_gives_it_back(full: Full) -> None:
    (frozen, other), d, (lost, good) = full.prefills, full.d, full.prompts
    frozen.freeze()
    other.all("ungate")
    assert other.all_sent(*good) == {None}
    reasons = ended(d, [*good, *lost], None, "deadline", times=LONGER)
    assert reasons == [None] * len(d.ranks) * len(good) + ["deadline"] * len(d.ranks) * len(lost)
    # The slots that the frozen one may write into stay its own. Those that are left serve the others.
    beside = Prompt(P_TABLE, good[0].target, TOKENS)
    other.hold(beside)
    d.load(other, beside)
    ended(d, [beside], None)
    assert other.all_sent(beside) == {None}
    assert other.written()["scatter"] == len(d.ranks) * (len(good) + 1)
    assert d.staging() == [SLOTS_OF_ONE * SLOT_BYTES] * len(d.ranks)
    frozen.thaw()
    frozen.all("ungate")
    reused(d, *lost)
    frozen.all_sent(*lost)
    untouched(d)
    settled(frozen, other, d)
    works(frozen, d)
    works(other, d)


def test_the_client_leaves_decode_while_it_looks_prefill_up(pair: Pair) -> None:
    p, d = pair.get()
    prompt = ask(d)
    with p.behind_held_answers() as held:
        p.hold(prompt)
        d.load(p, prompt, origin=held.origin)
        held.asked()
        d.work(aborts=[prompt.id])
        ended(d, [prompt], "cancelled")
        reused(d, prompt)
        held.release()
        # Decode says so once it knows whom to tell; if it never does, the lease ends it.
        assert p.all_sent(prompt) <= {"released", "lease_expired"}
    untouched(d)
    works(p, d)


@contextmanager
def waiting(p: FaultEngine, d: FaultEngine, prompt: Prompt) -> Iterator[None]:
    """All ranks of decode have asked prefill for a prompt that isn't computed."""
    with control_proxy(p.ranks[0].facts.control, Weather()) as proxy, p.also_behind([proxy.address]) as origin:
        d.load(p, prompt, origin=origin)
        wait_until(lambda: proxy.taken["pull"] == len(d.ranks), PATIENCE_S, lambda: str(proxy.taken))
        yield


def test_the_client_leaves_decode_while_it_waits_for_the_prompt(pair: Pair) -> None:
    p, d = pair.get()
    prompt = ask(d)
    with waiting(p, d, prompt):
        d.work(aborts=[prompt.id])
        ended(d, [prompt], "cancelled")
        reused(d, prompt)
        p.hold(prompt)
        assert p.all_sent(prompt) == {"cancelled"}
    untouched(d)
    works(p, d)


@pytest.mark.parametrize("moment", [DURING, AFTER])
def test_the_client_leaves_decode(pair: Pair, moment: str) -> None:
    p, d = pair.get()
    prompt = ask(d)
    if moment == DURING:
        written_to(p, d, prompt)
    else:
        # Prefill has said so already, and decode may not have heard it yet.
        p.hold(prompt)
        d.load(p, prompt)
        assert p.all_sent(prompt) == {None}
    d.work(aborts=[prompt.id])
    p.all("ungate")
    ended(d, [prompt], "cancelled", *([None] if moment == AFTER else []))
    reused(d, prompt)
    assert p.all_sent(prompt) == {None if moment == AFTER else "cancelled"}
    untouched(d)
    works(p, d)


def test_the_client_leaves_prefill_before_decode_asks(pair: Pair) -> None:
    p, d = pair.get()
    prompt = ask(d)
    p.work(drops=[prompt.id])
    d.load(p, prompt)
    ended(d, [prompt], "prefill_aborted")
    reused(d, prompt)
    untouched(d)
    works(p, d)


def test_the_client_leaves_prefill_while_decode_waits(pair: Pair) -> None:
    p, d = pair.get()
    prompt = ask(d)
    with waiting(p, d, prompt):
        p.work(drops=[prompt.id])
        ended(d, [prompt], "prefill_aborted")
    reused(d, prompt)
    untouched(d)
    works(p, d)


@pytest.mark.parametrize("path", ["direct"], indirect=True)
def test_who_reaches_mooncakes_own_port_needs_no_secret(pair: Pair) -> None:
    """Not a promise but a fact to know: it is why SECURITY.md asks for a network policy."""
    p, d = pair.get()
    target = d.ranks[0]
    assert d.wrong_bytes() == [0, 0]
    p.ranks[0].ask(do="write_raw", segment=target.segment, address=target.address)
    assert d.wrong_bytes()[0] > 0, "Mooncake asks for a secret now: say so in SECURITY.md"
