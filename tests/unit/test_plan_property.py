"""The whole loop against a simulated API server: whatever happens, it comes to rest, and at rest it writes nothing."""

import asyncio
import copy

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_operator import names
from dcp_operator.kinds import DEPLOYMENT, DEPLOYMENT_OF_ENGINES, SECRET, ref_of
from dcp_operator.observed import Key, Observed
from dcp_operator.reconciler import Reconciler
from dcp_operator.rollout import serving_revisions
from dcp_operator.status import ready_condition
from dcp_operator.target import Operator, resolve_target
from tests.support.calls_in_turn import CallsInTurn
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi, observe

CHAT = Key("models", "chat")
BAD_DECODE = {"parallelism": {"tensor": 3, "decodeContext": 2}, "blockSize": 32}


class World:
    """The operator and a simulated cluster, taking turns."""

    def __init__(self) -> None:
        self.api = SimulatedApi()
        self.api.put(owner())
        self.operator = Operator("acme/operator:1")
        self.restart()

    def restart(self) -> None:
        self._take_over(
            Reconciler(
                self.api,  # type: ignore[arg-type] - the simulated server has the same calls
                self.operator,
                now=lambda: "2026-01-01T00:00:00Z",
                fresh_key=lambda: "ZnJlc2g=",
                calls=CallsInTurn(),
            )
        )

    def _take_over(self, reconciler: Reconciler) -> None:
        if hasattr(self, "reconciler"):
            self.reconciler._calls.close()
        self.reconciler = reconciler

    def upgrade(self) -> None:
        self.operator = Operator(f"acme/operator:{int(self.operator.image[-1]) + 1}")
        self.restart()

    def look(self) -> bool:
        """Deliver all events, then make one pass."""

        async def one_pass() -> bool:
            observe(self.api, cache=self.reconciler._cache)
            return await self.reconciler.reconcile(CHAT)

        return asyncio.run(one_pass())

    def edit(self, **changes) -> None:
        self.api.put({**copy.deepcopy(self.api.owner()), "spec": spec(**changes)})

    def spoil(self, number: int, how: str) -> None:
        """Delete a child, or overwrite its labels, its annotations or its spec."""
        children = sorted(self.api.children().items())
        if not children:
            return
        (kind, name), body = children[number % len(children)]
        if how == "delete":
            self.api.remove(kind, "models", name)
            return
        body = copy.deepcopy(body)
        if how == "labels":
            body["metadata"]["labels"] = {names.LABEL_NAME: "chat"}
        elif how == "owners":
            body["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "somebody"
        elif kind == DEPLOYMENT.kind:
            body["spec"]["replicas"] += 1
            body["spec"]["template"]["spec"]["containers"][0]["args"] = ["--evil"]
        elif kind == SECRET.kind:
            body["data"] = {"key": ""}
        self.api.put(body)

    def rest(self) -> None:
        """Take turns until a pass writes nothing and Kubernetes has nothing to do."""
        for _ in range(12):
            self.api.run_deployments()
            self.api.writes.clear()
            assert self.look(), "a pass reported problems"
            if not self.api.writes:
                return
        raise AssertionError(f"does not come to rest: {self.api.writes}")


EDITS = {
    "image 1": {},
    "image 2": {"image": "acme/engine:2"},
    "image 3": {"image": "acme/engine:3"},
    "more replicas": {"prefill": {**spec()["prefill"], "replicas": 3}},
    "none": {"decode": {**spec()["decode"], "replicas": 0}},
    "other interleave": {"decode": {**spec()["decode"], "kvCacheInterleaveSize": 8}},
    "no connector injection": {"kvConnector": {"protocol": "tcp", "delivery": "Image"}},
    "invalid": {"decode": BAD_DECODE},
}
STEPS = st.one_of(
    st.tuples(st.just("edit"), st.sampled_from(sorted(EDITS))),
    st.tuples(st.just("spoil"), st.integers(0, 11), st.sampled_from(["delete", "labels", "owners", "spec"])),
    st.tuples(st.just("look")),
    st.tuples(st.just("run"), st.booleans()),
    st.tuples(st.just("restart")),
    st.tuples(st.just("upgrade")),
)


def serving_of(observed: Observed) -> list[str]:
    return serving_revisions(observed, 1, None)


def take(world: World, step: tuple) -> None:
    match step:
        case ("edit", name):
            world.edit(**EDITS[name])
        case ("spoil", number, how):
            world.spoil(number, how)
        case ("look",):
            world.look()
        case ("run", broken):
            newest = observe(world.api).status.get("updateRevision", "")
            world.api.run_deployments(broken=frozenset({newest}) if broken else frozenset())
        case ("restart",):
            world.restart()
        case ("upgrade",):
            world.upgrade() if world.operator.image != "acme/operator:9" else world.restart()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=12))
def test_after_any_steps_it_comes_to_rest_at_one_complete_revision(steps: list[tuple]):
    world = World()
    for step in steps:
        take(world, step)
    world.edit()
    world.rest()
    revisions = {name.rsplit("-", 1)[1] for kind, name in world.api.children() if kind == DEPLOYMENT.kind}
    assert len(revisions) == 1
    observed = observe(world.api)
    wanted = resolve_target(observed, world.operator, "").manifests
    assert set(world.api.children()) == {tuple(ref_of(manifest)) for manifest in wanted}
    assert ready_condition(world.api.owner()["status"])["status"] == "True"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=12))
def test_ready_is_never_claimed_for_a_revision_that_is_not_ready(steps: list[tuple]):
    world = World()
    for step in steps:
        take(world, step)
        world.look()
        observed = observe(world.api)
        ready = ready_condition(observed.status)
        if ready["status"] == "True":
            assert ready["observedGeneration"] == observed.generation
            assert observed.status["updateRevision"] in serving_of(observed)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS.filter(lambda step: step[0] in ("edit", "look", "restart", "upgrade")), max_size=12))
def test_edits_alone_never_take_away_the_revision_that_serves(steps: list[tuple]):
    world = World()
    world.rest()
    for step in steps:
        if step == ("edit", "none"):
            continue
        take(world, step)
        world.look()
        # The new revisions get no pods in this test, so the first one has to go on.
        assert serving_of(observe(world.api))


def test_a_failed_pass_is_reported_in_the_status_and_made_up_for():
    from dcp_operator.client import ApiError

    world = World()
    message = 'deployments.apps is forbidden: User "x" cannot patch resource "deployments" in API group "apps"'
    world.api.refuse["apply", "Deployment"] = ApiError(403, "Forbidden", message)
    assert not world.look()
    ready = ready_condition(world.api.owner()["status"])
    assert (ready["status"], ready["reason"]) == ("False", "PermissionDenied")
    assert 'cannot patch resource "deployments"' in ready["message"]
    assert ("Service", "chat") in world.api.children()
    world.api.refuse.clear()
    world.rest()
    assert ready_condition(world.api.owner()["status"])["status"] == "True"


def test_an_invalid_object_gets_no_pods_and_keeps_those_it_has():
    world = World()
    world.edit(**EDITS["invalid"])
    world.rest()
    assert world.api.children() == {}
    world.edit()
    world.rest()
    before = set(world.api.children())
    world.edit(**EDITS["invalid"])
    world.rest()
    assert set(world.api.children()) == before
    status = world.api.owner()["status"]
    conditions = {condition["type"]: condition for condition in status["conditions"]}
    assert conditions["Ready"]["status"] == "False"
    assert conditions["ConfigCompatible"]["reason"] == "InvalidSpec"
    assert "dcp-divides-tp" in conditions["ConfigCompatible"]["message"]
    assert conditions["PrefillReady"]["status"] == "True"
    assert status["currentRevision"]


def test_an_event_is_recorded_when_ready_changes_and_at_no_other_time():
    world = World()
    world.rest()
    reasons = [event["reason"] for event in world.api.events]
    assert reasons[-1] == "Serving"
    assert len(reasons) == len(set(reasons))
    count = len(reasons)
    world.look()
    assert len(world.api.events) == count


def test_an_object_that_is_gone_is_left_alone():
    world = World()
    world.rest()
    world.api.remove(DEPLOYMENT_OF_ENGINES.kind, "models", "chat")
    assert world.api.children() == {}
