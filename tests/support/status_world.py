"""An object, the operator that says how it is, and what users, Kubernetes, nodes and other controllers do to it."""

import copy
import itertools
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from dcp_operator import names
from dcp_operator.canary.judge import Verdict
from dcp_operator.canary.request import Request
from dcp_operator.canary_http import Outcome
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.kinds import DEPLOYMENT, DEPLOYMENT_OF_ENGINES, POD, SCALER, Kind, kind_named
from dcp_operator.observed import Key
from dcp_operator.reasons import Reason, Said
from dcp_operator.reconciler import Reconciler
from dcp_operator.reports import PAUSE_S
from dcp_operator.status import condition_of
from dcp_operator.target import Operator
from tests.support.calls_in_turn import CallsInTurn
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi
from tests.support.truth import Checked

Body = dict[str, Any]
CHAT = Key("models", "chat")
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
OPERATOR = Operator("acme/operator:1")
KEY = "ZnJlc2gga2V5"
#: Passes within which the operator has nothing more to do or say of a step.
PASSES = 40


class CountingApi(SimulatedApi):
    """Counts the events that are told, and the changes of a condition that a status write makes.

    In each write the time of a condition is `now` exactly where its status changes.
    """

    def __init__(self, now: Callable[[], str]) -> None:
        super().__init__()
        self.told = self.changed = 0
        self._now = now

    def apply(self, kind: Kind, namespace: str, manifest: Body, subresource: str | None = None) -> Body:
        before = self.objects.get((kind.kind, namespace, manifest["metadata"]["name"]), {})
        after = super().apply(kind, namespace, manifest, subresource)
        if kind is DEPLOYMENT_OF_ENGINES:
            self.changed += changes(before.get("status", {}), after["status"])
            check_times(before.get("status", {}), after["status"], self._now())
        return after

    def create_event(self, namespace: str, event: Body) -> Body:
        self.told += 1
        return super().create_event(namespace, event)

    def repeat_event(self, namespace: str, name: str, count: int, now: str) -> None:
        super().repeat_event(namespace, name, count, now)
        self.told += 1


#: What checks of the transfer find, in turn; the last tells nothing.
VERDICTS = (
    Said("True", Reason.VERIFIED, "KV moved"),
    Said("False", Reason.RECOMPUTED, "decode computed the prompt again"),
    Said("Unknown", Reason.NOT_CHECKED, "the router did not answer"),
)


class Probe:
    """Checks transfers in no time, and knows what it found last."""

    def __init__(self, now: Callable[[], str]) -> None:
        self.last: Checked | None = None
        self._now = now
        self._verdicts = itertools.cycle(VERDICTS)

    async def check(self, request: Request) -> Outcome:
        said = next(self._verdicts)
        if said.status != "Unknown":
            about = request.subject
            self.last = Checked(about.revision, about.engines, self._now(), (said.status, said.reason))
        return Outcome(Verdict(said), 1)


async def _no_pages(urls: list[str]) -> list[None]:
    """The engines' own pages: nobody answers at a simulated pod's address."""
    return [None for _ in urls]


class World:
    """An API server, Kubernetes' controllers and nodes behind it, and an operator that is told of what happens."""

    def __init__(self) -> None:
        self.api = CountingApi(self.now)
        self.now_s = 1000.0
        self.seen: dict[tuple[str, str, str], Body] = {}
        self.past: list[Body] = []
        self.probe = Probe(self.now)
        self.restart()
        self.api.put(owner(router={"replicas": 1}))

    # The operator.

    def restart(self) -> None:
        self.operator = Reconciler(
            self.api,  # type: ignore[arg-type] - the simulated server has the same calls
            OPERATOR,
            now=self.now,
            fresh_key=lambda: KEY,
            probe=self.probe,
            calls=CallsInTurn(),
        )
        self.operator._applier._pages = _no_pages
        self.operator._reporter._clock = self.operator._checks._clock = lambda: self.now_s
        # Of an earlier check a new process knows what the status tells.
        status = self.api.owner().get("status", {}) if self.api.objects else {}
        if "transferCheck" not in status or condition_of(status, "KVTransferVerified").get("reason") == "Theirs":
            self.probe.last = None
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
        """Let the operator make its passes as long as something wakes it; it may take a second.

        What it writes itself wakes nobody, and no pass is made for its own sake: so each leaves the truth behind.
        """
        woken = [CHAT]
        self.operator.wake = self.operator._checks._wake = woken.append  # type: ignore[method-assign]
        for _ in range(PASSES):
            if not woken:
                return
            woken.clear()
            assert await self.operator.reconcile(CHAT)
            # A check that has begun ends now.
            for task in [state.task for state in self.operator._checks._states.values() if state.task is not None]:
                await task
            due_s = self.operator._due_s.pop(CHAT, None)
            if due_s is not None and due_s <= PAUSE_S:
                self.now_s += due_s
                woken.append(CHAT)
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


def check_times(before: Body, after: Body, now: str) -> None:
    since = {entry["type"]: entry for entry in before.get("conditions", [])}
    for entry in after["conditions"]:
        old = since.get(entry["type"], {})
        if not entry["type"].startswith("Theirs"):
            same = old.get("status") == entry["status"]
            assert entry["lastTransitionTime"] == (old["lastTransitionTime"] if same else now), entry["type"]


def changes(before: Body, after: Body) -> int:
    """Return how many conditions say something else: another status, or another reason."""
    known = {entry["type"]: (entry["status"], entry["reason"]) for entry in before.get("conditions", [])}
    return sum(known.get(entry["type"]) != (entry["status"], entry["reason"]) for entry in after["conditions"])


def uid_of(body: Body) -> str:
    return body["metadata"]["uid"]


def is_alive(pod: Body) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] != "Failed"


def is_ready(pod: Body) -> bool:
    return {"type": "Ready", "status": "True"} in pod["status"]["conditions"]


def set_status(world: World, pod: Body, phase: str, *, ready: bool, scheduled: bool = True) -> None:
    pod["status"] = {
        "phase": phase,
        "podIP": "10.0.0.7",
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
    def change(body: Body) -> None:
        role = chance.choice([role for role in ("prefill", "decode", "router") if "scaling" not in body[role]])
        body[role]["replicas"] = chance.randrange(4)

    world.edit(change)


def new_strategy(world: World, chance: random.Random) -> None:
    strategy = chance.choice([(1, 0), (0, 1), ("25%", "25%"), ("100%", 0), (1, "50%")])
    world.edit(lambda body: body.update(rolloutStrategy={"maxSurge": strategy[0], "maxUnavailable": strategy[1]}))


def pause(world: World, chance: random.Random) -> None:
    world.edit(lambda body: body.update(paused=not body.get("paused", False)))


def refused(world: World, chance: random.Random) -> None:
    """Ask for what a rule refuses, as an object can that was stored before the rule, or make it right again."""

    def change(body: Body) -> None:
        if body["decode"].pop("extraArgs", None) is None:
            body["decode"]["extraArgs"] = ["--port=1"]

    world.edit(change)


def is_refused(world: World) -> bool:
    return "extraArgs" in world.api.owner()["spec"]["decode"]


def scaling(world: World, chance: random.Random) -> None:
    """Leave the number of a role to a scaler, or state it again."""
    if is_refused(world):
        # Nothing is made for such a spec, a scaler neither: what is wanted then is told by what runs.
        return

    def change(body: Body) -> None:
        role = body[chance.choice(["prefill", "decode"])]
        if role.pop("scaling", None) is None:
            role.pop("replicas", None)
            role["scaling"] = {"minReplicas": chance.randrange(2), "maxReplicas": chance.randint(1, 3)}
        else:
            role["replicas"] = chance.randrange(4)

    world.edit(change)


def an_autoscaler_asks(world: World, chance: random.Random) -> None:
    scalers = [copy.deepcopy(body) for place, body in sorted(world.api.objects.items()) if place[0] == SCALER.kind]
    for scaler in scalers:
        scaler["spec"]["replicas"] = chance.randrange(5)
        world.api.put(scaler)


def network_policy(world: World, chance: random.Random) -> None:
    world.edit(lambda body: body.update(networkPolicy={"enabled": chance.random() < 0.5}))


def transfer_check(world: World, chance: random.Random) -> None:
    world.edit(lambda body: body.update(transferCheck={"enabled": chance.random() < 0.5}))


def model(world: World, chance: random.Random) -> None:
    """Take a model whose heads nobody knows, or the one that is described."""
    described = spec()["model"]
    world.edit(lambda body: body.update(model=chance.choice([described, {"uri": "hf://acme/unheard-of"}])))


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
    kept = SCALER.kind if is_refused(world) else None
    if children := sorted(each for each in world.api.children() if each[0] != kept):
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
    "a rule refuses the spec, or not any more": refused,
    "a role gets a scaler, or loses it": scaling,
    "an autoscaler asks": an_autoscaler_asks,
    "the network policy is turned on or off": network_policy,
    "checks of transfers are turned on or off": transfer_check,
    "the model is known or not": model,
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
