"""What breaks, breaks here: processes that die and freeze, messages that don't arrive, clients that leave.

Every rank is a process with the product's worker and the real TransferEngine. After each fault: no wrong byte, no
request beyond its deadline, no id reported twice (the helpers see to that), the other processes alive, no blocks held
and no staging in use, and the same prompt again is right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.control_proxy import Weather, control_proxy
from tests.support.fault_engines import PATIENCE_S, FaultEngine, running, start, wait_until
from tests.support.kv_oracle import Sizes

ONE, TWO_HEADS, DCP = Sizes(1, 1, 16, 16, 1), Sizes(2, 1, 16, 16, 2), Sizes(2, 2, 1, 16, 1)
TOKENS = 70
P_TABLE, D_TABLE = [3, 9, 1, 7, 12], [5, 2, 8]
#: Small batches, so that a transfer has many of them, and short times, so that tests don't wait long.
SMALL: dict[str, Any] = {"path": "direct", "max_batch_descriptors": 8}
TIMES = {"request_timeout_s": 5.0, "cancel_grace_s": 0.5, "lease_s": 8.0}
#: A request is over by then, whatever happened: deadline and grace, and what a loaded machine adds.
OVER_S = TIMES["request_timeout_s"] + TIMES["cancel_grace_s"] + 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


class Pair:
    """A prefill and a decode engine that tests share; one that a test killed is started again for the next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[str, FaultEngine] = {}
        self._count = 0

    def get(self) -> tuple[FaultEngine, FaultEngine]:
        for role, sizes in (("prefill", ONE), ("decode", DCP)):
            engine = self._engines.get(role)
            if engine is not None and not all(rank.alive for rank in engine.ranks):
                self._engines.pop(role).stop()
            if role not in self._engines:
                self._engines[role] = start(role, sizes, self._folder, **{**SMALL, **TIMES})
        return self._engines["prefill"], self._engines["decode"]

    def new_id(self) -> str:
        self._count += 1
        return f"transfer-{self._count}"

    def stop(self) -> None:
        for engine in self._engines.values():
            engine.stop()


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    made = Pair(folder)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def p(pair: Pair) -> FaultEngine:
    return pair.get()[0]


@pytest.fixture
def d(pair: Pair) -> FaultEngine:
    return pair.get()[1]


def works(p: FaultEngine, d: FaultEngine, transfer_id: str = "again") -> None:
    """A transfer between the two is right to the byte; afterwards nothing is held and nothing is unclear."""
    d.all("remember")
    p.hold(transfer_id, P_TABLE, TOKENS)
    d.load(transfer_id, D_TABLE, TOKENS, p)
    assert d.outcomes("received", transfer_id) == [None] * len(d.ranks)
    assert d.differing(D_TABLE, TOKENS) == [0] * len(d.ranks)
    assert set(p.outcomes("sent", transfer_id)) <= {None, "released"}
    settled(p, d)


def settled(*engines: FaultEngine) -> None:
    for engine in engines:
        engine.clear()
        wait_until(lambda engine=engine: engine.gauge("staging_bytes") == 0, PATIENCE_S, lambda: "staging is in use")


def failed(d: FaultEngine, transfer_id: str, *reasons: str | None, began: float) -> None:
    """A load ends on all ranks, for one of these reasons, in time."""
    outcomes = d.outcomes("received", transfer_id, OVER_S)
    assert set(outcomes) <= set(reasons), outcomes
    assert time.monotonic() - began < OVER_S


def reused(d: FaultEngine) -> None:
    """The blocks get another owner, as they would in vLLM; `untouched` then says whether a late write came."""
    d.clear()
    d.all("reuse", table=D_TABLE)


def untouched(d: FaultEngine) -> None:
    assert d.differing(D_TABLE, 0) == [0] * len(d.ranks), "a late write landed in blocks of another owner"


@pytest.mark.parametrize("moment", ["before the prompt is computed", "while it writes", "when it has written"])
def test_prefill_is_killed(pair: Pair, folder: Path, moment: str) -> None:
    p, d = pair.get()
    transfer_id, began = pair.new_id(), time.monotonic()
    d.all("remember")
    if moment == "before the prompt is computed":
        d.load(transfer_id, D_TABLE, TOKENS, p)
        p.poll()
    else:
        if moment == "while it writes":
            p.all("gate", after=2)
        p.hold(transfer_id, P_TABLE, TOKENS)
        d.load(transfer_id, D_TABLE, TOKENS, p)
        if moment == "while it writes":
            p.held_up()
        else:
            assert d.outcomes("received", transfer_id) == [None, None]
    port = p.bootstrap.port if p.bootstrap else 0
    p.kill()
    if moment == "when it has written":
        assert d.differing(D_TABLE, TOKENS) == [0, 0]
    else:
        failed(d, transfer_id, "peer_lost", "bootstrap_unreachable", began=began)
        reused(d)
        untouched(d)
    # It comes back at the same address.
    with running("prefill", ONE, folder, port, **{**SMALL, **TIMES}) as after:
        assert after.origin == p.origin
        works(after, d, pair.new_id())


def test_one_of_two_prefill_ranks_is_killed_while_it_writes(folder: Path) -> None:
    config = {**SMALL, **TIMES}
    with (
        running("prefill", TWO_HEADS, folder, **config) as p,
        running("decode", Sizes(1, 1, 16, 16, 2), folder, **config) as d,
    ):
        p.all("gate", after=1)
        began = time.monotonic()
        p.hold("half", P_TABLE, TOKENS)
        d.load("half", P_TABLE, TOKENS, p)
        p.held_up(2)
        p.kill(1)
        p.living()[0].ask(do="ungate")
        failed(d, "half", "peer_lost", began=began)
        d.clear()
        d.all("reuse", table=P_TABLE)
        assert set(p.outcomes("sent", "half")) <= {None, "cancelled"}
        assert d.differing(P_TABLE, 0) == [0], "a late write landed in blocks of another owner"
        settled(d)


@pytest.mark.parametrize("moment", ["while it waits", "while it is written to"])
@pytest.mark.parametrize("ranks", [(), (1,)], ids=["all ranks", "one rank"])
def test_decode_is_killed(pair: Pair, folder: Path, moment: str, ranks: tuple[int, ...]) -> None:
    p, _ = pair.get()
    transfer_id = pair.new_id()
    with running("decode", DCP, folder, **TIMES) as d:
        if moment == "while it waits":
            d.load(transfer_id, D_TABLE, TOKENS, p)
            d.poll()
            d.kill(*ranks)
            p.hold(transfer_id, P_TABLE, TOKENS)
        else:
            p.all("gate", after=2)
            p.hold(transfer_id, P_TABLE, TOKENS)
            d.load(transfer_id, D_TABLE, TOKENS, p)
            p.held_up()
            d.kill(*ranks)
        p.all("ungate")
        # Its writes fail, or nobody is left to ask: the blocks come back either way, at the latest with the lease.
        assert set(p.outcomes("sent", transfer_id)) <= {None, "transfer_error", "peer_lost", "lease_expired"}
    works(p, pair.get()[1], pair.new_id())


def test_prefill_freezes_beyond_the_deadline_and_goes_on(pair: Pair) -> None:
    p, d = pair.get()
    transfer_id, began = pair.new_id(), time.monotonic()
    p.all("gate", after=2)
    p.hold(transfer_id, P_TABLE, TOKENS)
    d.load(transfer_id, D_TABLE, TOKENS, p)
    p.held_up()
    p.freeze()
    failed(d, transfer_id, "deadline", "peer_lost", began=began)
    assert {request_id for _, request_id in d.unclear} == {transfer_id}, "prefill may still write into the blocks"
    p.thaw()
    p.all("ungate")
    reused(d)
    assert set(p.outcomes("sent", transfer_id)) <= {None, "cancelled", "deadline"}
    untouched(d)
    works(p, d, pair.new_id())


def test_prefill_freezes_in_the_middle_of_real_batches(pair: Pair) -> None:
    p, d = pair.get()
    for number in range(3):
        transfer_id, began = pair.new_id(), time.monotonic()
        p.hold(transfer_id, P_TABLE, TOKENS)
        d.load(transfer_id, D_TABLE, TOKENS, p)
        time.sleep(0.004 * number)
        p.freeze()
        d.outcomes("received", transfer_id, OVER_S)
        assert time.monotonic() - began < OVER_S
        p.thaw()
        reused(d)
        p.outcomes("sent", transfer_id)
        untouched(d)
    works(p, d, pair.new_id())


def test_decode_freezes_beyond_the_lease_and_goes_on(pair: Pair) -> None:
    p, d = pair.get()
    transfer_id = pair.new_id()
    d.load(transfer_id, D_TABLE, TOKENS, p)
    d.poll()
    d.freeze()
    p.hold(transfer_id, P_TABLE, TOKENS)
    p.outcomes("sent", transfer_id)
    time.sleep(TIMES["request_timeout_s"] + 1)
    d.thaw()
    # What arrived before the deadline is good; else the request fails. It never hangs.
    d.outcomes("received", transfer_id, OVER_S)
    reused(d)
    untouched(d)
    works(p, d, pair.new_id())


@pytest.mark.parametrize("known", [True, False], ids=["that prefill has met", "that prefill meets now"])
def test_a_frozen_decode_engine_holds_up_nobody_else(pair: Pair, folder: Path, known: bool) -> None:
    p, d = pair.get()
    with running("decode", Sizes(4, 4, 1, 16, 1), folder, **TIMES) as frozen:
        if known:
            works(p, frozen, pair.new_id())
        ids = [pair.new_id() for _ in range(6)]
        for transfer_id in ids:
            frozen.load(transfer_id, D_TABLE[:2], TOKENS, p)
        frozen.poll()
        frozen.freeze()
        for transfer_id in ids:
            p.hold(transfer_id, P_TABLE, TOKENS)
        for _ in range(3):
            began = time.monotonic()
            works(p, d, pair.new_id())
            assert time.monotonic() - began < 10, "a healthy engine waits for a frozen one"
        frozen.thaw()
        for transfer_id in ids:
            frozen.outcomes("received", transfer_id, OVER_S)
    for transfer_id in ids:
        p.outcomes("sent", transfer_id)
    settled(p)


WEATHERS = {
    "a tenth is lost": Weather(lose=0.1),
    "half is lost": Weather(lose=0.5),
    "all is repeated": Weather(repeat=1.0),
    "late and out of order": Weather(repeat=0.3, delay_s=0.3),
    "all of it": Weather(lose=0.2, repeat=0.3, delay_s=0.5),
}


@pytest.mark.parametrize("name", WEATHERS)
def test_control_messages_are_lost_repeated_delayed_and_reordered(pair: Pair, name: str) -> None:
    p, d = pair.get()
    control = p.ranks[0].facts.control
    with control_proxy(control, WEATHERS[name], seed=len(name)) as proxy, p.also_behind([proxy.address]) as origin:
        ids = [pair.new_id() for _ in range(8)]
        outcomes = []
        for transfer_id in ids:
            began = time.monotonic()
            d.all("remember")
            p.hold(transfer_id, P_TABLE, TOKENS)
            d.load(transfer_id, D_TABLE, TOKENS, p, origin)
            found = d.outcomes("received", transfer_id, OVER_S)
            assert time.monotonic() - began < OVER_S
            for differing, outcome in zip(d.differing(D_TABLE, TOKENS), found, strict=True):
                assert outcome is not None or differing == 0, "reported good, and bytes are wrong"
            outcomes += found
            reused(d)
            untouched(d)
        for transfer_id in ids:
            p.outcomes("sent", transfer_id)
        assert proxy.passed > 2 * len(ids)
        if not proxy.weather.lose:
            assert outcomes == [None] * len(outcomes), "nothing was lost, so everything arrives"
        untouched(d)
    works(p, d, pair.new_id())


def test_more_transfers_than_staging_has_room_for(folder: Path) -> None:
    config = {"path": "pack", "staging_bytes": 1 << 20, "transfer_threads": 2}
    with running("prefill", ONE, folder, **config) as p, running("decode", DCP, folder, **config) as d:
        d.all("remember")
        ids = [f"many {number}" for number in range(40)]
        p.work(holds=[{"id": transfer_id, "table": P_TABLE, "end": TOKENS} for transfer_id in ids])
        for transfer_id in ids:
            d.load(transfer_id, D_TABLE, TOKENS, p)
        for transfer_id in ids:
            assert d.outcomes("received", transfer_id) == [None, None]
            assert p.outcomes("sent", transfer_id) == [None]
        assert d.differing(D_TABLE, TOKENS) == [0, 0]
        settled(p, d)


@pytest.mark.parametrize("state", ["looking up", "waiting for the prompt", "being written to", "just done"])
def test_the_client_leaves_decode(pair: Pair, state: str) -> None:
    p, d = pair.get()
    transfer_id, began = pair.new_id(), time.monotonic()
    if state == "being written to":
        p.all("gate", after=2)
    if state != "waiting for the prompt":
        p.hold(transfer_id, P_TABLE, TOKENS)
    d.load(transfer_id, D_TABLE, TOKENS, p)
    if state == "being written to":
        p.held_up()
    elif state == "waiting for the prompt":
        time.sleep(0.3)
    elif state == "just done":
        p.outcomes("sent", transfer_id)
    d.work(aborts=[transfer_id])
    p.all("ungate")
    failed(d, transfer_id, "cancelled", *([None] if state in ("looking up", "just done") else []), began=began)
    reused(d)
    if state == "waiting for the prompt":
        p.hold(transfer_id, P_TABLE, TOKENS)
    p.outcomes("sent", transfer_id)
    untouched(d)
    works(p, d, pair.new_id())


@pytest.mark.parametrize("state", ["before decode asks", "while decode waits"])
def test_the_client_leaves_prefill(pair: Pair, state: str) -> None:
    p, d = pair.get()
    transfer_id, began = pair.new_id(), time.monotonic()
    if state == "before decode asks":
        p.work(drops=[transfer_id])
        d.load(transfer_id, D_TABLE, TOKENS, p)
    else:
        d.load(transfer_id, D_TABLE, TOKENS, p)
        time.sleep(0.3)
        p.work(drops=[transfer_id])
    failed(d, transfer_id, "prefill_aborted", began=began)
    assert time.monotonic() - began < TIMES["request_timeout_s"] + 5
    reused(d)
    untouched(d)
    works(p, d, pair.new_id())


def test_who_reaches_mooncakes_own_port_needs_no_secret(pair: Pair) -> None:
    """Not a promise but a fact to know: it is why SECURITY.md asks for a network policy."""
    p, d = pair.get()
    p.clear()
    target = d.ranks[0]
    d.all("remember")
    p.ranks[0].ask(do="write_raw", segment=target.segment, address=target.address)
    assert d.differing(D_TABLE, 0)[0] > 0, "Mooncake asks for a secret now: say so in SECURITY.md"
