"""What the writer does with a plan, against a simulated API server that can refuse."""

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from dcp_operator import names
from dcp_operator.apply import Applier, problem_of
from dcp_operator.client import ApiError
from dcp_operator.gather import Cache
from dcp_operator.kinds import DEPLOYMENT, DEPLOYMENT_OF_ENGINES, POD, ROLE_BINDING, SCALER, SERVICE, Ref
from dcp_operator.observed import Child, Key
from dcp_operator.plan import make_plan
from dcp_operator.reasons import Problem, Reason
from dcp_operator.target import Operator, resolve_target
from tests.support.objects import owner
from tests.support.simulated_api import SimulatedApi, observe


async def run(function, *arguments):
    return function(*arguments)


async def no_pages(urls):
    return ["" for _ in urls]


class Bench:
    def __init__(self) -> None:
        self.api = SimulatedApi()
        self.api.put(owner())
        self.cache = Cache()
        self.applier = Applier(self.api, self.cache, run, no_pages)

    def execute(self, *, deliver: bool = True) -> list:
        observed = observe(self.api, cache=self.cache) if deliver else self.cache.snapshot(Key("models", "chat"))
        assert observed is not None
        target = resolve_target(observed, Operator("acme/operator:1"), "ZnJlc2g=")
        plan = make_plan(target, observed)
        return asyncio.run(self.applier.execute(plan, observed))


def a_status(kind: str) -> tuple[SimulatedApi, Callable[[], Problem | None], str]:
    """Return a server, a write of the status of its object or scaler, and the name of what has it."""
    bench = Bench()
    scaler = {"kind": SCALER.kind, "metadata": {"name": "chat-prefill", "namespace": "models"}, "spec": {"replicas": 1}}
    child = Child(bench.api.put(scaler))
    observed = observe(bench.api)
    if kind == SCALER.kind:
        return (
            bench.api,
            lambda: asyncio.run(bench.applier.write_scaler_status(observed, child, {"replicas": 1})),
            child.ref.name,
        )
    return bench.api, lambda: asyncio.run(bench.applier.write_status(observed, {"observedGeneration": 9})), "chat"


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_was_written_is_known_without_waiting_for_the_watch(bench: Bench):
    assert bench.execute() == []
    bench.api.writes.clear()
    assert bench.execute(deliver=False) == []
    assert bench.api.writes == []


def test_what_is_new_is_made_at_once_but_after_what_it_refers_to(bench: Bench):
    under_way: set[str] = set()
    most, order = 0, []

    async def slow(function, *arguments):
        nonlocal most
        kind = arguments[0].kind
        under_way.add(kind)
        most = max(most, len(under_way))
        # Whoever else can begin, begins; what gives a Role away overtakes what it could.
        for _ in range(1 if kind == ROLE_BINDING.kind else 5):
            await asyncio.sleep(0)
        under_way.discard(kind)
        if function.__name__ != "get":
            order.append(kind)
        return function(*arguments)

    bench.applier = Applier(bench.api, bench.cache, slow, no_pages)
    assert bench.execute() == []
    assert most >= 3
    first = order.index(DEPLOYMENT.kind)
    last = len(order) - 1 - order[::-1].index(DEPLOYMENT.kind)
    assert set(order[:first]) == {"Secret", "ServiceAccount", "NetworkPolicy"}
    assert {"Service", "Role", "ControllerRevision"} <= set(order[last:])
    assert order[-1] == ROLE_BINDING.kind


def test_a_name_that_is_taken_is_not_taken_over(bench: Bench):
    theirs = {"kind": "Service", "metadata": {"name": "chat", "namespace": "models"}, "spec": {"theirs": True}}
    bench.api.put(theirs)
    (problem,) = bench.execute()
    assert problem.reason is Reason.NAME_TAKEN
    assert "Service chat exists already and was not made for this object" in problem.message
    assert bench.api.objects["Service", "models", "chat"]["spec"] == {"theirs": True}


def made_anew_with_its_children_left(bench: Bench) -> set[str]:
    """Make the object anew under its name, as Kubernetes' collector of garbage misses it; return the old uids."""
    bench.execute()
    old = {body["metadata"]["uid"] for body in bench.api.children().values()}
    del bench.api.objects[DEPLOYMENT_OF_ENGINES.kind, "models", "chat"]
    bench.api.put(owner())
    return old


def test_what_an_object_of_the_same_name_left_over_is_removed_and_made_anew(bench: Bench):
    old = made_anew_with_its_children_left(bench)
    assert bench.execute() == []
    assert not old & {body["metadata"]["uid"] for body in bench.api.children().values()}
    assert bench.execute() == []
    assert {"Secret", "Deployment", "Service", "ControllerRevision"} <= {kind for kind, _ in bench.api.children()}
    uid = bench.api.owner()["metadata"]["uid"]
    assert all(Child(body).belongs_to(uid) for body in bench.api.children().values())


def made_anew_while_pods_run_on(bench: Bench, **metadata: str) -> list[dict]:
    """Make the object anew, all that it owned gone but for its pods; return these."""
    bench.execute()
    bench.api.run_deployments()
    pods = {place: body for place, body in bench.api.objects.items() if place[0] == POD.kind}
    bench.api.remove(DEPLOYMENT_OF_ENGINES.kind, "models", "chat")
    replica_set = {"kind": "ReplicaSet", "name": "chat-old", "uid": "replica-set", "controller": True}
    for body in pods.values():
        body["metadata"] |= {"ownerReferences": [replica_set], **metadata}
    bench.api.objects |= pods
    bench.api.put(owner())
    return list(pods.values())


def workloads_of(bench: Bench) -> list[str]:
    return [name for kind, name in bench.api.children() if kind == DEPLOYMENT.kind]


def test_workloads_wait_until_pods_of_an_object_of_the_same_name_go(bench: Bench):
    pods = made_anew_while_pods_run_on(bench)
    (problem,) = bench.execute()
    assert problem.reason is Reason.NAME_TAKEN
    assert f"{len(pods)} pods of a deleted object" in problem.message
    assert "kubectl -n models delete replicaset chat-old" in problem.message
    assert workloads_of(bench) == []
    assert (SERVICE.kind, "chat") in bench.api.children()
    for body in pods:
        body["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "99999"}
    assert bench.execute() == []
    assert workloads_of(bench)


def test_pods_that_are_younger_than_the_object_are_not_waited_for(bench: Bench):
    made_anew_while_pods_run_on(bench, creationTimestamp="2026-02-01T00:00:00Z")
    assert bench.execute() == []
    assert workloads_of(bench)


def test_pods_of_workloads_that_somebody_kept_are_not_waited_for(bench: Bench):
    made_anew_while_pods_run_on(bench)
    kept = {"kind": DEPLOYMENT.kind, "metadata": {"name": "chat-prefill-old", "namespace": "models"}, "spec": {}}
    kept["metadata"]["labels"] = {names.LABEL_NAME: "chat"}
    bench.api.put(kept)
    assert bench.execute() == []
    assert len(workloads_of(bench)) == 4


def test_what_the_pods_do_not_need_is_made_when_kubernetes_has_had_time_for_them(bench: Bench):
    made: list[list[str]] = []

    async def note(seconds: float) -> None:
        made.append(sorted({kind for kind, _ in bench.api.children()}))

    bench.applier = Applier(bench.api, bench.cache, run, no_pages, note)
    assert bench.execute() == []
    assert made == [["Deployment", "NetworkPolicy", "Secret", "ServiceAccount"]]
    assert bench.execute() == []
    assert len(made) == 1


def test_children_of_a_successor_that_is_not_seen_yet_are_not_taken_for_left_over(bench: Bench):
    stale = observe(bench.api)
    del bench.api.objects[DEPLOYMENT_OF_ENGINES.kind, "models", "chat"]
    bench.api.put(owner())
    bench.execute()
    made = bench.api.children()
    late = dataclasses.replace(stale, children=observe(bench.api).children)
    target = resolve_target(late, Operator("acme/operator:1"), "ZnJlc2g=")
    plan = make_plan(target, late)
    assert plan.actions
    asyncio.run(bench.applier.execute(plan, late))
    assert bench.api.children() == made


def test_a_child_that_lost_its_label_is_found_by_its_name_and_repaired(bench: Bench):
    bench.execute()
    service = bench.api.objects["Service", "models", "chat"]
    service["metadata"]["labels"] = {}
    bench.cache.correct(SERVICE, [], "999999", None)
    assert bench.execute() == []
    assert bench.api.objects["Service", "models", "chat"]["metadata"]["labels"][names.LABEL_NAME] == "chat"


def test_one_refused_manifest_does_not_keep_the_others_from_being_applied(bench: Bench):
    bench.api.refuse["apply", "Secret"] = ApiError(422, "Invalid", "data.key: too long")
    (problem,) = bench.execute()
    assert problem.reason is Reason.APPLY_REJECTED
    assert ("Service", "chat") in bench.api.children()


def test_a_server_that_does_not_answer_ends_the_pass(bench: Bench):
    bench.api.refuse["apply", "NetworkPolicy"] = ApiError(0, "Unreachable", "no route")
    (problem,) = bench.execute()
    assert problem.reason is Reason.API_UNAVAILABLE
    # What was to be made together with it was on its way; nothing that comes after is.
    assert SERVICE.kind not in {kind for kind, _ in bench.api.children()}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ApiError(403, "Forbidden", 'services is forbidden: User "u" cannot patch resource "services"'),
            Reason.PERMISSION_DENIED,
        ),
        (ApiError(403, "Forbidden", "exceeded quota: services"), Reason.APPLY_REJECTED),
        (
            ApiError(
                403, "Forbidden", "unable to create new content in namespace models because it is being terminated"
            ),
            Reason.APPLY_REJECTED,
        ),
        (ApiError(422, "Invalid", "spec.replicas: must be at least 0"), Reason.APPLY_REJECTED),
        (ApiError(400, "BadRequest", "unknown field"), Reason.APPLY_REJECTED),
        (ApiError(404, "NotFound", 'namespaces "models" not found'), Reason.APPLY_REJECTED),
        (ApiError(409, "Conflict", "the object has been modified"), Reason.API_UNAVAILABLE),
        (ApiError(429, "TooManyRequests", "slow down"), Reason.API_UNAVAILABLE),
        (ApiError(500, "InternalError", "etcd"), Reason.API_UNAVAILABLE),
        (ApiError(0, "Unreachable", "no route"), Reason.API_UNAVAILABLE),
    ],
)
def test_an_answer_of_the_api_server_is_put_into_the_words_of_the_list(error: ApiError, reason: Reason):
    problem = problem_of(error, "apply Service chat")
    assert problem.reason is reason
    assert problem.message.startswith(f"could not apply Service chat: {error.message}")


def test_the_status_is_written_to_this_object_and_not_to_its_successor(bench: Bench):
    observed = observe(bench.api)
    bench.api.remove(DEPLOYMENT_OF_ENGINES.kind, "models", "chat")
    successor = bench.api.put(owner())
    assert successor["metadata"]["uid"] != observed.uid
    assert asyncio.run(bench.applier.write_status(observed, {"observedGeneration": 9})) is None
    assert "status" not in bench.api.owner()


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError(404, "NotFound", 'dcpdisaggdeployments.dcpdisagg.io "chat" not found'),
        ApiError(409, "Conflict", "Precondition failed: UID in precondition: 1, UID in object meta: 2"),
        ApiError(422, "Invalid", "metadata.uid: Invalid value: 1: field is immutable"),
    ],
    ids=lambda error: str(error.status),
)
@pytest.mark.parametrize("has_successor", [True, False])
@pytest.mark.parametrize("kind", [DEPLOYMENT_OF_ENGINES.kind, SCALER.kind])
def test_the_status_of_an_object_that_is_gone_is_no_problem(kind: str, refusal: ApiError, has_successor: bool):
    api, write, name = a_status(kind)
    api.remove(kind, "models", name)
    if has_successor:
        api.put({"kind": kind, "metadata": {"name": name, "namespace": "models"}})
    api.refuse["apply", kind] = refusal
    assert write() is None


@pytest.mark.parametrize("kind", [DEPLOYMENT_OF_ENGINES.kind, SCALER.kind])
def test_a_status_that_was_refused_because_another_wrote_it_is_tried_again(kind: str):
    api, write, _ = a_status(kind)
    api.refuse["apply", kind] = ApiError(409, "Conflict", "the object has been modified")
    problem = write()
    assert problem is not None
    assert problem.reason is Reason.API_UNAVAILABLE
    assert "the object has been modified. It is tried again" in problem.message


def test_a_write_that_changes_nothing_is_remembered(bench: Bench):
    bench.execute()
    key, ref = Key("models", "chat"), Ref("Service", "chat")
    observed = bench.cache.snapshot(key)
    assert observed is not None
    assert observed.settled == {}
    # Somebody's admission plugin rewrites a field back and forth: the server answers with what it had.
    live = bench.api.objects["Service", "models", "chat"]
    live["spec"]["ports"][0]["protocol"] = "rewritten"
    live["metadata"]["resourceVersion"] = "999999"
    bench.api.apply = lambda kind, namespace, manifest, subresource=None: bench.api.get(
        kind, namespace, manifest["metadata"]["name"]
    )  # type: ignore[method-assign]
    assert bench.execute() == []
    observed = bench.cache.snapshot(key)
    assert observed is not None
    assert set(observed.settled) == {ref}


def test_a_scaled_workload_is_known_without_waiting_for_the_watch_and_keeps_its_template(bench: Bench):
    bench.execute()
    old = {name for kind, name in bench.api.children() if kind == "Deployment"}
    templates = {name: bench.api.objects["Deployment", "models", name]["spec"]["template"] for name in old}
    for _ in range(6):
        bench.api.run_deployments()
        bench.api.put({**bench.api.owner(), "spec": {**bench.api.owner()["spec"], "image": "acme/engine:2"}})
        for role in ("prefill", "decode"):
            bench.api.owner()["spec"][role]["replicas"] = 2
        bench.api.writes.clear()
        assert bench.execute() == []
        if any(verb == "scale" for verb, _, _ in bench.api.writes):
            break
    scaled = [name for verb, _, name in bench.api.writes if verb == "scale"]
    assert set(scaled) <= old
    assert scaled
    bench.api.writes.clear()
    assert bench.execute(deliver=False) == []
    assert bench.api.writes == []
    assert {name: bench.api.objects["Deployment", "models", name]["spec"]["template"] for name in old} == templates
