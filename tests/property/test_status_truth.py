"""The status says what is, after any sequence of changes: random steps on the simulated API, an oracle after each.

Steps are what users, Kubernetes, nodes and other controllers do, in any order. Watch events come late, twice, out of
date or not at all; the operator is restarted in between. After each step every field of the stored status equals the
truth that `tests.support.truth` works out from the same objects, no more events were recorded than the status changed
its words, and two passes more write nothing.
"""

import asyncio
import copy
import functools
import json
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_operator.kinds import DEPLOYMENT, NETWORK_POLICY
from dcp_operator.reports import PAUSE_S
from dcp_operator.status import condition_of, ready_condition
from dcp_operator.target import resolve_target
from tests.support.objects import owner, spec
from tests.support.profiles import examples
from tests.support.simulated_api import SimulatedApi, observe
from tests.support.status_world import (
    CHAT,
    KEY,
    OPERATOR,
    STEPS,
    Body,
    World,
    everybody_works,
)
from tests.support.truth import facts_of
from tests.support.truth_words import lies

OFTEN = ("Kubernetes acts", "everybody works", "everybody works", "pods get ready", "new image")
HOW = ("events", "events", "events", "lists", "restart")
A_STEP = st.tuples(st.sampled_from([*STEPS, *OFTEN]), st.sampled_from(HOW), st.integers(0, 2**20))


@functools.cache
def revision_of(written: str) -> str | None:
    """Return the revision of a spec, None of one that is refused: it depends on nothing else."""
    api = SimulatedApi()
    api.put({**owner(), "spec": json.loads(written)})
    return resolve_target(observe(api), OPERATOR, KEY, "").revision


def check(world: World, what: str) -> None:
    """Compare the stored status with the truth."""
    body = world.api.owner()
    revision = revision_of(json.dumps(body["spec"], sort_keys=True))
    untrue = lies(facts_of(body, revision, world.api.objects.values(), world.probe.last))
    assert not untrue, f"{what}: (said, true) {untrue}"
    if revision is not None:
        policies = {name for kind, name in world.api.children() if kind == NETWORK_POLICY.kind}
        assert bool(policies) == body["spec"].get("networkPolicy", {}).get("enabled", True), what


async def check_rest(world: World, what: str) -> None:
    """Hold that no more is told than changed, and that a pass more neither writes nor tells anything."""
    assert world.api.told <= world.api.changed, what
    written, told = len(world.api.writes), world.api.told
    # By the clock of status writes alone: nothing else becomes due, and none of them is left for later.
    world.operator._reporter._clock = lambda: world.now_s + PAUSE_S
    for _ in range(2):
        await world.deliver()
        await world.operator.reconcile(CHAT)
    world.operator._reporter._clock = lambda: world.now_s
    assert world.api.writes[written:] == [], what
    assert world.api.told == told, what


@settings(max_examples=examples(dev=20, ci=150))
@given(st.lists(A_STEP, min_size=15, max_size=45))
def test_after_every_step_the_status_is_the_truth(steps: list[tuple[str, str, int]]):
    asyncio.run(_walk(steps))


async def _walk(steps: list[tuple[str, str, int]]) -> None:
    world = World()
    await world.list_all()
    await world.settle()
    for number, (name, how, seed) in enumerate(steps):
        chance, what = random.Random(seed), f"step {number}: {name}, by {how}"
        STEPS[name](world, chance)
        before = copy.deepcopy(world.api.owner().get("status", {}))
        world.now_s += chance.choice([0.05, 0.5, 2.0])
        if how == "restart":
            await world.operator.stop()
            world.restart()
        if how == "events":
            await world.deliver(chance)
        else:
            await world.list_all()
        await world.settle()
        check(world, what)
        await check_rest(world, what)
        theirs = [entry["type"] for entry in before.get("conditions", []) if entry["type"].startswith("Theirs")]
        kept = [entry["type"] for entry in world.api.owner()["status"]["conditions"]]
        assert set(theirs) <= set(kept), f"{what}: a condition of somebody else was lost"
    await world.operator.stop()


async def at_rest() -> World:
    """A world whose object is Ready and checked."""
    world = World()
    await world.list_all()
    for _ in range(6):
        await world.settle()
        everybody_works(world, random.Random(1))
        await world.list_all()
    await world.settle()
    assert ready_condition(world.api.owner()["status"])["status"] == "True"
    return world


async def edited(world: World, change: Callable[[Body], None], what: str) -> None:
    world.edit(change)
    await world.deliver()
    await world.settle()
    check(world, what)


def test_a_rollout_goes_on_when_its_scaler_is_made_though_nothing_else_happens():
    """It is held while the scaler is missing, and the event of a scaler that the operator made is no news to it."""

    def change(body: Body) -> None:
        body["image"] = "acme/engine:9"
        body["decode"].pop("replicas")
        body["decode"]["scaling"] = {"minReplicas": 1, "maxReplicas": 3}

    async def scenario() -> None:
        world = await at_rest()
        await edited(world, change, "a scaler and a new image")
        target = world.api.owner()["status"]["updateRevision"]
        assert [name for kind, name in world.api.children() if kind == DEPLOYMENT.kind and target in name]
        await world.operator.stop()

    asyncio.run(scenario())


def test_a_verdict_of_the_transfer_is_not_said_of_a_revision_that_serves_no_more():
    async def scenario() -> None:
        world = await at_rest()
        assert condition_of(world.api.owner()["status"], "KVTransferVerified")["status"] == "True"
        await edited(world, lambda body: body.update(image="acme/engine:9"), "a new image")
        await edited(world, lambda body: body.update(paused=True), "a pause")
        for _ in range(2):
            everybody_works(world, random.Random(1))
            await world.deliver()
            await world.settle()
        status = world.api.owner()["status"]
        assert status["currentRevision"] == status["updateRevision"]
        assert condition_of(status, "KVTransferVerified")["reason"] == "NotChecked"
        check(world, "the new revision serves, paused")
        await world.operator.stop()

    asyncio.run(scenario())


def test_what_somebody_writes_into_the_current_revision_is_in_no_message():
    async def scenario() -> None:
        world = await at_rest()
        body = copy.deepcopy(world.api.owner())
        body["status"]["currentRevision"] = "00000000"
        world.api.put(body)
        await world.deliver()
        await world.settle()
        check(world, "somebody wrote the current revision")
        await world.operator.stop()

    asyncio.run(scenario())


def test_an_object_that_is_paused_from_the_start_says_so():
    async def scenario() -> None:
        world = World()
        world.edit(lambda body: body.update(paused=True))
        await world.list_all()
        await world.settle()
        status = world.api.owner()["status"]
        for kind in ("Ready", "Progressing"):
            assert condition_of(status, kind)["reason"] == "Paused"
        assert world.deployments() == []
        check(world, "paused from the start")
        await world.operator.stop()

    asyncio.run(scenario())


def test_a_spec_change_is_said_before_anything_is_touched():
    async def scenario() -> None:
        world = await at_rest()
        world.api.writes.clear()
        world.edit(lambda body: body.update(spec(image="acme/engine:9")))
        await world.list_all()
        await world.operator.reconcile(CHAT)
        assert world.api.writes[0] == ("apply", "status", "chat")
        await world.operator.stop()

    asyncio.run(scenario())
