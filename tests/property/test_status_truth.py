"""The status says what is, after any sequence of changes: random steps on the simulated API, an oracle after each.

Steps are what users, Kubernetes, nodes and other controllers do, in any order. Watch events come late, twice, out of
date or not at all; the operator is restarted in between. After each step the stored status equals the truth that
`tests.support.truth` works out from the same objects.
"""

import asyncio
import copy
import functools
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_operator import names
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.kinds import DEPLOYMENT, POD, kind_named
from dcp_operator.observed import Key
from dcp_operator.reconciler import Reconciler
from dcp_operator.reports import PAUSE_S
from dcp_operator.target import Operator, resolve_target
from tests.support.calls_in_turn import CallsInTurn
from tests.support.objects import owner, spec
from tests.support.profiles import examples
from tests.support.simulated_api import SimulatedApi, observe
from tests.support.truth import expected_status, said_status

Body = dict[str, Any]
CHAT = Key("models", "chat")
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
OPERATOR = Operator("acme/operator:1")
KEY = "ZnJlc2gga2V5"
#: Passes within which the operator has nothing more to do or say of a step.
PASSES = 40


class World:
    """An API server, Kubernetes' controllers and nodes behind it, and an operator that is told of what happens."""

    def __init__(self) -> None:
        self.api = SimulatedApi()
        self.now_s = 1000.0
        self.seen: dict[tuple[str, str, str], Body] = {}
        self.past: list[Body] = []
        self.restart()
        self.api.put(owner(router={"replicas": 1}))

    # The operator.

    def restart(self) -> None:
        self.operator = Reconciler(
            self.api,  # type: ignore[arg-type] - the simulated server has the same calls
            OPERATOR,
            now=self.now,
            fresh_key=lambda: KEY,
            calls=CallsInTurn(),
        )
        self.operator._reporter._clock = lambda: self.now_s
        self.seen, self.past = {}, []

    def now(self) -> str:
        return f"{EPOCH + timedelta(seconds=self.now_s):%Y-%m-%dT%H:%M:%SZ}"

    async def deliver(self, chance: random.Random | None = None) -> None:
        """Tell the operator what happened since: with chance in any order, some twice, and old news in between."""
        events: list[tuple[str, Body]] = []
        for place, body in self.api.objects.items():
            if self.seen.get(place) is not body:
                events.append(("MODIFIED", copy.deepcopy(body)))
                if place in self.seen and self.seen[place]["metadata"]["uid"] != body["metadata"]["uid"]:
                    events.append(("DELETED", self._ended(self.seen[place])))
        events += [("DELETED", self._ended(body)) for place, body in self.seen.items() if place not in self.api.objects]
        if chance is not None:
            events += [event for event in events if chance.random() < 0.2]
            events += [("MODIFIED", old) for old in self.past if chance.random() < 0.1]
            chance.shuffle(events)
        for kind, body in events:
            if body["kind"] in {each.kind for each in WATCHED_KINDS}:
                self.operator.lists.on_event(kind_named(body["kind"]), kind, body)
        self._remember()

    async def list_all(self) -> None:
        """Have the operator read everything, as after a watch that was cut."""
        for kind in WATCHED_KINDS:
            await self.operator.lists.refresh(kind)
        self._remember()

    def _ended(self, body: Body) -> Body:
        metadata = {**body["metadata"], "resourceVersion": str(next(self.api._versions))}
        return {**copy.deepcopy(body), "metadata": metadata}

    def _remember(self) -> None:
        self.past = [*self.past, *self.seen.values()][-60:]
        # The server replaces what it stores and never changes it in place.
        self.seen = dict(self.api.objects)

    async def settle(self) -> None:
        """Let the operator make its passes until it has nothing left to do or to say; it may take a second."""
        for _ in range(PASSES):
            before = len(self.api.writes)
            await self.operator.reconcile(CHAT)
            due = self.operator._due_s.pop(CHAT, None)
            if due is not None and due <= PAUSE_S:
                self.now_s += due
            elif len(self.api.writes) == before:
                return
            await self.deliver()
        raise AssertionError(f"still at it after {PASSES} passes: {self.api.writes[-10:]}")

    # Users, Kubernetes and the rest.

    def edit(self, change: Callable[[Body], None]) -> None:
        body = copy.deepcopy(self.api.owner())
        change(body["spec"])
        self.api.put(body)

    def deployments(self) -> list[Body]:
        return [copy.deepcopy(body) for place, body in self.api.objects.items() if place[0] == DEPLOYMENT.kind]

    def pods(self) -> list[Body]:
        return [copy.deepcopy(body) for place, body in self.api.objects.items() if place[0] == POD.kind]

    def act_on(self, deployment: Body) -> None:
        """Do one step of what Kubernetes does for a Deployment, and report."""
        digest, count = names.digest(deployment["spec"]["template"]), deployment["spec"]["replicas"]
        owned = [pod for pod in self.pods() if pod["metadata"]["ownerReferences"][0]["uid"] == uid_of(deployment)]
        alive = [pod for pod in owned if is_alive(pod)]
        new = [pod for pod in alive if pod["metadata"]["annotations"]["digest"] == digest]
        old = [pod for pod in alive if pod not in new]
        while len(new) < count and len(alive) < count + 1:
            made = self.make_pod(deployment, digest)
            new.append(made)
            alive.append(made)
        for extra in [*old, *sorted(new, key=is_ready)][: max(0, len(alive) - count)]:
            self.api.put({**extra, "metadata": {**extra["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
        left = [pod for pod in self.pods() if pod["metadata"]["ownerReferences"][0]["uid"] == uid_of(deployment)]
        left = [pod for pod in left if is_alive(pod)]
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(left),
            "updatedReplicas": sum(pod["metadata"]["annotations"]["digest"] == digest for pod in left),
            "readyReplicas": sum(map(is_ready, left)),
        }
        self.api.put(deployment)

    def make_pod(self, deployment: Body, digest: str) -> Body:
        number = next(self.api._versions)
        metadata = deployment["metadata"]
        return self.api.put(
            {
                "kind": POD.kind,
                "metadata": {
                    "name": f"{metadata['name']}-{number}",
                    "namespace": metadata["namespace"],
                    "labels": deployment["spec"]["template"]["metadata"]["labels"],
                    "annotations": {"digest": digest},
                    "ownerReferences": [{"uid": metadata["uid"]}],
                },
                "status": {"phase": "Pending", "conditions": []},
            }
        )


def uid_of(body: Body) -> str:
    return body["metadata"]["uid"]


def is_alive(pod: Body) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] != "Failed"


def is_ready(pod: Body) -> bool:
    return {"type": "Ready", "status": "True"} in pod["status"]["conditions"]


def set_status(world: World, pod: Body, phase: str, *, ready: bool, scheduled: bool = True) -> None:
    pod["status"] = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": str(scheduled)},
            {"type": "Ready", "status": str(ready)},
        ],
    }
    world.api.put(pod)


# Each step takes the world and its own source of chance.


def new_image(world: World, chance: random.Random) -> None:
    world.edit(lambda body: body.update(image=f"acme/engine:{chance.randrange(3)}"))


def new_sidecar(world: World, chance: random.Random) -> None:
    sidecar = {"spec": {"containers": [{"name": "log", "image": f"acme/log:{chance.randrange(3)}"}]}}
    world.edit(lambda body: body[chance.choice(["prefill", "decode"])].update(template=sidecar))


def new_replicas(world: World, chance: random.Random) -> None:
    world.edit(lambda body: body[chance.choice(["prefill", "decode", "router"])].update(replicas=chance.randrange(4)))


def new_strategy(world: World, chance: random.Random) -> None:
    strategy = chance.choice([(1, 0), (0, 1), ("25%", "25%"), ("100%", 0), (1, "50%")])
    world.edit(lambda body: body.update(rolloutStrategy={"maxSurge": strategy[0], "maxUnavailable": strategy[1]}))


def pause(world: World, chance: random.Random) -> None:
    world.edit(lambda body: body.update(paused=not body.get("paused", False)))


def kubernetes(world: World, chance: random.Random) -> None:
    for deployment in chance.sample(found := world.deployments(), k=chance.randint(0, len(found))):
        world.act_on(deployment)


def everybody_works(world: World, chance: random.Random) -> None:
    """Let Kubernetes, the nodes and the operator's own events come to an end: the next change meets a settled world."""
    for deployment in world.deployments():
        world.act_on(deployment)
    for pod in world.pods():
        if "deletionTimestamp" in pod["metadata"]:
            world.api.remove(POD.kind, pod["metadata"]["namespace"], pod["metadata"]["name"])
        elif is_alive(pod):
            set_status(world, pod, "Running", ready=True)


def some_pod(change: Callable[[World, Body], None]) -> Callable[[World, random.Random], None]:
    def step(world: World, chance: random.Random) -> None:
        for pod in chance.sample(found := world.pods(), k=min(len(found), chance.randint(1, 3))):
            change(world, pod)

    return step


def gets_ready(world: World, pod: Body) -> None:
    set_status(world, pod, "Running", ready=True)


def gets_unready(world: World, pod: Body) -> None:
    set_status(world, pod, "Running", ready=False)


def is_evicted(world: World, pod: Body) -> None:
    set_status(world, pod, "Failed", ready=False)


def begins_to_end(world: World, pod: Body) -> None:
    world.api.put({**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})


def is_gone(world: World, pod: Body) -> None:
    world.api.remove(POD.kind, pod["metadata"]["namespace"], pod["metadata"]["name"])


def lost_node(world: World, chance: random.Random) -> None:
    for pod in world.pods():
        if chance.random() < 0.5:
            set_status(world, pod, pod["status"]["phase"], ready=False)


def others_scale(world: World, chance: random.Random) -> None:
    if deployments := world.deployments():
        deployment = chance.choice(deployments)
        deployment["spec"]["replicas"] = chance.randrange(4)
        world.api.put(deployment)


def others_delete(world: World, chance: random.Random) -> None:
    if children := sorted(world.api.children()):
        kind, name = chance.choice(children)
        world.api.remove(kind, CHAT.namespace, name)


def others_write_the_status(world: World, chance: random.Random) -> None:
    body = copy.deepcopy(world.api.owner())
    said = body.get("status", {}).get("conditions", [])
    if said:
        chance.choice(said).update(status="False", reason="Theirs", message="said by somebody else")
        body["status"] |= chance.choice([{"rollout": {"waitingFor": "a miracle"}}, {"currentRevision": "0" * 8}])
        body["status"]["prefill"] = {"replicas": 99, "readyReplicas": 99}
        said.append({"type": f"Theirs{len(said)}", "status": "True", "reason": "Theirs", "message": ""})
        world.api.put(body)


STEPS: dict[str, Callable[[World, random.Random], None]] = {
    "new image": new_image,
    "new sidecar": new_sidecar,
    "new replicas": new_replicas,
    "new strategy": new_strategy,
    "pause or resume": pause,
    "Kubernetes acts": kubernetes,
    "everybody works": everybody_works,
    "pods get ready": some_pod(gets_ready),
    "pods get unready": some_pod(gets_unready),
    "pods are evicted": some_pod(is_evicted),
    "pods begin to end": some_pod(begins_to_end),
    "pods are gone": some_pod(is_gone),
    "a node is lost": lost_node,
    "others scale a Deployment": others_scale,
    "others delete a child": others_delete,
    "others write the status": others_write_the_status,
}
OFTEN = ("Kubernetes acts", "everybody works", "everybody works", "pods get ready", "new image")
HOW = ("events", "events", "events", "lists", "restart")
A_STEP = st.tuples(st.sampled_from([*STEPS, *OFTEN]), st.sampled_from(HOW), st.integers(0, 2**20))


@functools.cache
def revision_of(written: str) -> str:
    """Return the revision of a spec: it depends on nothing else."""
    api = SimulatedApi()
    api.put({**owner(), "spec": json.loads(written)})
    revision = resolve_target(observe(api), OPERATOR, KEY, "").revision
    assert revision is not None
    return revision


def check(world: World, before: Body, stored: Body, what: str) -> None:
    """Compare the stored status with the truth, and the times of its conditions with what was said before."""
    body = world.api.owner()
    expected = expected_status(body, revision_of(json.dumps(body["spec"], sort_keys=True)), world.api.objects.values())
    assert said_status(stored) == expected, what
    since = {entry["type"]: entry for entry in before.get("conditions", [])}
    for entry in stored["conditions"]:
        old = since.get(entry["type"])
        if old is not None and old["status"] == entry["status"] and "lastTransitionTime" in old:
            assert entry["lastTransitionTime"] == old["lastTransitionTime"], f"{what}: {entry['type']} did not change"


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
        check(world, before, world.api.owner()["status"], what)
        theirs = [entry["type"] for entry in before.get("conditions", []) if entry["type"].startswith("Theirs")]
        kept = [entry["type"] for entry in world.api.owner()["status"]["conditions"]]
        assert set(theirs) <= set(kept), f"{what}: a condition of somebody else was lost"
    await world.operator.stop()


def test_a_spec_change_is_said_before_anything_is_touched():
    async def scenario() -> None:
        world = World()
        await world.list_all()
        chance = random.Random(1)
        for _ in range(6):
            await world.settle()
            everybody_works(world, chance)
            await world.list_all()
        await world.settle()
        assert said_status(world.api.owner()["status"])["conditions"]["Ready"] == "True"
        world.api.writes.clear()
        world.edit(lambda body: body.update(spec(image="acme/engine:9")))
        await world.list_all()
        await world.operator.reconcile(CHAT)
        assert world.api.writes[0] == ("apply", "status", "chat")
        await world.operator.stop()

    asyncio.run(scenario())
