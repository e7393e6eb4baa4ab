"""Which engines go first when a role gets smaller: by what their own pages of metrics say."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_operator import names
from dcp_operator.apply import Applier
from dcp_operator.client import ApiError
from dcp_operator.gather import Cache
from dcp_operator.kinds import POD, Ref
from dcp_operator.load import COST, Engine, candidates, cost_patches, load_of
from dcp_operator.plan import Apply, Plan
from tests.support.objects import owner, pod
from tests.support.simulated_api import SimulatedApi, observe

REVISION = "0a1b2c3d"


def workload(role: str = "prefill", replicas: int = 3, port: int = 8000) -> dict:
    main = {"name": "main", "ports": [{"name": "http", "containerPort": port}]}
    return {
        "kind": "Deployment",
        "metadata": {
            "name": names.workload("chat", role, REVISION),
            "namespace": "models",
            "labels": names.labels("chat", role, REVISION),
            "ownerReferences": [
                {"uid": "owner-uid", "controller": True, "kind": "DCPDisaggDeployment", "name": "chat"}
            ],
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": names.selector("chat", role, REVISION)},
            "template": {"spec": {"containers": [main]}},
        },
    }


def ready_pod(number: int, role: str = "prefill", address: str | None = None, **metadata) -> dict:
    result = pod(role, REVISION, name=f"p{number}", ready=True, **metadata)
    result["status"]["podIP"] = address or f"10.0.0.{number}"
    return result


def cluster(*bodies: dict) -> SimulatedApi:
    api = SimulatedApi()
    uid = api.put(owner())["metadata"]["uid"]
    for body in bodies:
        for reference in body["metadata"].get("ownerReferences", []):
            reference["uid"] = uid if reference["uid"] == "owner-uid" else reference["uid"]
        api.put(body)
    return api


def chosen_among(api: SimulatedApi, replicas: int, role: str = "prefill") -> list[str]:
    ref = Ref("Deployment", names.workload("chat", role, REVISION))
    return sorted(engine.url for engine in candidates(observe(api), ref, replicas))


URLS = [f"http://10.0.0.{number}:8000/metrics" for number in (1, 2, 3)]


def test_the_engines_of_a_workload_that_gets_smaller_are_asked_on_the_port_that_it_states():
    pods = [ready_pod(number) for number in (1, 2, 3)]
    assert chosen_among(cluster(workload(), *pods), 2) == URLS
    assert chosen_among(cluster(workload(port=20000), *pods), 1) == [url.replace("8000", "20000") for url in URLS]


def test_an_address_of_six_is_put_in_brackets():
    pods = [ready_pod(1, address="fd00::1"), ready_pod(2)]
    assert chosen_among(cluster(workload(replicas=2), *pods), 1) == [URLS[1], "http://[fd00::1]:8000/metrics"]


@pytest.mark.parametrize("replicas", [0, 3, 4])
def test_nobody_is_asked_where_all_stay_or_all_go(replicas: int):
    assert chosen_among(cluster(workload(), *(ready_pod(number) for number in (1, 2, 3))), replicas) == []


def test_nobody_is_asked_where_pods_that_are_not_ready_are_enough():
    starting = pod("prefill", REVISION, name="p3")
    assert chosen_among(cluster(workload(), ready_pod(1), ready_pod(2), starting), 2) == []
    assert chosen_among(cluster(workload(), ready_pod(1), ready_pod(2), starting), 1) == URLS[:2]


def test_pods_that_go_already_or_belong_to_others_are_no_choice():
    going = ready_pod(3, deletionTimestamp="2026-01-01T00:00:00Z")
    others = [ready_pod(4, role="decode"), pod("prefill", "ffffffff", name="p5", ready=True)]
    assert chosen_among(cluster(workload(), ready_pod(1), ready_pod(2), going, *others), 1) == URLS[:2]


@pytest.mark.parametrize("role", ["router"])
def test_routers_are_no_engines(role: str):
    pods = [ready_pod(number, role=role) for number in (1, 2, 3)]
    assert chosen_among(cluster(workload(role), *pods), 1, role) == []


def test_a_workload_of_somebody_else_is_left_alone():
    theirs = workload()
    theirs["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert chosen_among(cluster(theirs, ready_pod(1), ready_pod(2), ready_pod(3)), 1) == []


def page(running: float, waiting: float = 0, held: float | None = 0, engine: int = 0) -> str:
    labels = f'{{engine="{engine}",model_name="chat"}}'
    lines = [f"vllm:num_requests_running{labels} {running}", f"vllm:num_requests_waiting{labels} {waiting}"]
    return "\n".join([*lines, *([f"vllm:dcp_kv_pinned_requests{labels} {held}"] if held is not None else [])])


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (page(1, 2, 4), 7),
        (page(1, 2, None), 3),
        (page(1) + "\n" + page(2, engine=1), 3),
        (page(float("nan")), None),
        (page(float("inf")), None),
        (page(-1), None),
        ("vllm:num_requests_running 1", None),
        ("vllm:num_requests_running x\nvllm:num_requests_waiting 0", None),
        ("", None),
        (None, None),
    ],
)
def test_the_load_is_what_runs_waits_and_is_held(text: str | None, load: float | None):
    assert load_of(text) == load


LOADS = st.dictionaries(
    st.sampled_from([f"p{number}" for number in range(9)]),
    st.one_of(st.none(), st.floats(0, 2**40, allow_nan=False)),
    min_size=1,
)


@given(LOADS, st.data())
def test_whoever_has_less_costs_less_and_silence_costs_most(loads: dict[str, float | None], data: st.DataObject):
    before = {name: data.draw(st.sampled_from([None, "0", "1", "7", "2147483647"])) for name in loads}
    engines = [
        Engine(
            {"metadata": {"name": name, "namespace": "models", "uid": name, "annotations": {COST: old} if old else {}}},
            "",
        )
        for name, old in before.items()
    ]
    patches = {patch["metadata"]["name"]: patch["metadata"]["annotations"] for patch in cost_patches(engines, loads)}
    costs = {name: int(patches.get(name, {}).get(COST) or before[name] or 0) for name in loads}
    assert all(0 <= cost < 2**31 for cost in costs.values())
    assert all(patches[name][COST] != (before[name] or "0") for name in patches), "what is so already is not written"
    for one, first in loads.items():
        for other, second in loads.items():
            if first is not None and second is not None and first <= second:
                assert costs[one] <= costs[other]
            if first is not None and second is None:
                assert costs[one] < costs[other]


class Bench:
    """The writer with engines whose pages a test decides."""

    def __init__(self, pages: dict[str, str]) -> None:
        self.api = cluster(workload(), *(ready_pod(number) for number in (1, 2, 3)))
        self.asked: list[list[str]] = []
        self.pages = pages
        self.cache = Cache()
        self.applier = Applier(self.api, self.cache, self._run, self._read)

    async def _run(self, function, *arguments):
        return function(*arguments)

    async def _read(self, urls):
        self.asked.append(sorted(urls))
        return [self.pages.get(url, "") for url in urls]

    def scale_to(self, replicas: int) -> list:
        before = self.api.objects["Deployment", "models", names.workload("chat", "prefill", REVISION)]
        manifest = {**workload(replicas=replicas), "metadata": before["metadata"]}
        self.api.writes.clear()
        plan = Plan((Apply(manifest, "spec.replicas differs", is_new=False),))
        return asyncio.run(self.applier.execute(plan, observe(self.api, cache=self.cache)))

    @property
    def replicas(self) -> int:
        return self.api.objects["Deployment", "models", names.workload("chat", "prefill", REVISION)]["spec"]["replicas"]

    def costs(self) -> dict[str, str | None]:
        pods = {name: body for (kind, _, name), body in self.api.objects.items() if kind == POD.kind}
        return {name: body["metadata"].get("annotations", {}).get(COST) for name, body in sorted(pods.items())}


def test_costs_are_on_the_pods_before_their_workload_gets_smaller():
    bench = Bench({URLS[0]: page(5), URLS[1]: page(0), URLS[2]: page(1, 1)})
    assert bench.scale_to(1) == []
    assert bench.asked == [URLS]
    assert bench.costs() == {"p1": "5", "p2": None, "p3": "2"}
    assert [kind for _, kind, _ in bench.api.writes] == ["Pod", "Pod", "Deployment"]
    assert bench.replicas == 1


def test_engines_that_do_not_answer_never_keep_a_role_from_getting_smaller(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    bench = Bench({URLS[0]: page(5)})
    assert bench.scale_to(2) == []
    assert bench.costs() == {"p1": "5", "p2": "6", "p3": "6"}
    assert "load unknown object=models/chat pods=p2,p3" in caplog.text


@pytest.mark.parametrize(("status", "tries"), [(0, 1), (429, 1), (503, 1), (404, 3), (409, 3)])
def test_an_api_server_that_has_no_time_is_asked_for_no_further_cost(status: int, tries: int):
    bench = Bench({URLS[0]: page(5), URLS[1]: page(3), URLS[2]: page(1)})
    tried = []
    real = bench.api.apply

    def refusing(kind, *arguments, **keywords):
        if kind is not POD:
            return real(kind, *arguments, **keywords)
        tried.append(kind)
        raise ApiError(status, "No", "not now")

    bench.api.apply = refusing  # type: ignore[method-assign]
    assert bench.scale_to(1) == []
    assert (len(tried), bench.replicas) == (tries, 1)


def test_nor_do_pods_that_can_not_be_written_to(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    bench = Bench({URLS[0]: page(5), URLS[1]: page(0), URLS[2]: page(1)})
    bench.api.refuse["apply", "Pod"] = ApiError(409, "Conflict", "the uid is another")
    assert bench.scale_to(2) == []
    assert bench.replicas == 2
    assert "cost not set object=models/chat pod=p1 error=the uid is another" in caplog.text


def test_a_role_that_grows_asks_nobody():
    bench = Bench({})
    bench.scale_to(4)
    assert bench.asked == []
