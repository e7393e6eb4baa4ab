"""Decisions of the planner, on a simulated API server: state in, actions out."""

import copy

import pytest

from dcp_operator import names
from dcp_operator.kinds import CHILD_KINDS, DEPLOYMENT, GIVEN_ONCE, JOB, SCALER, SECRET, SERVICE, Ref
from dcp_operator.observed import Observed
from dcp_operator.plan import Apply, Delete, Scale, make_plan, settled, with_hash
from dcp_operator.reasons import Reason
from dcp_operator.target import Operator, Target, resolve_target
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi, observe

OPERATOR = Operator("acme/operator:1")
FRESH = "ZnJlc2g="


def api_with(**changes) -> SimulatedApi:
    api = SimulatedApi()
    api.put(owner(**changes))
    return api


def target_of(observed: Observed, operator: Operator = OPERATOR, now: str = "") -> Target:
    return resolve_target(observed, operator, FRESH, now)


def plan_of(api: SimulatedApi, operator: Operator = OPERATOR, now: str = ""):
    observed = observe(api)
    target = target_of(observed, operator, now)
    assert target.revision is not None, target.violations
    return make_plan(target, observed, now)


def carry_out(api: SimulatedApi, plan) -> None:
    kinds = {kind.kind: kind for kind in CHILD_KINDS}
    for action in plan.actions:
        if isinstance(action, Scale):
            api.scale(kinds[action.ref.kind], "models", action.ref.name, action.uid, action.replicas)
        elif isinstance(action, Apply):
            make = api.create if action.ref.kind in GIVEN_ONCE else api.make
            write = make if action.is_new else api.apply
            write(kinds[action.ref.kind], "models", action.manifest)
        else:
            api.delete(kinds[action.ref.kind], "models", action.ref.name, action.uid)


def settle(api: SimulatedApi, operator: Operator = OPERATOR) -> None:
    """Let operator and Kubernetes take turns until nothing is left to do."""
    for _ in range(10):
        api.run_deployments()
        plan = plan_of(api, operator)
        if not plan.actions:
            return
        carry_out(api, plan)
    raise AssertionError(f"does not settle: {plan.actions}")


def change(api: SimulatedApi, **changes) -> None:
    api.put({**copy.deepcopy(api.owner()), "spec": spec(**changes)})


def deployments(api: SimulatedApi) -> set[str]:
    return {name for kind, name in api.children() if kind == DEPLOYMENT.kind}


NEW_IMAGE = {"image": "acme/engine:2"}


def test_everything_is_made_for_a_new_object_and_what_pods_refer_to_comes_first():
    plan = plan_of(api_with())
    kinds = [action.ref.kind for action in plan.actions]
    pods_begin = kinds.index("Deployment")
    assert {"Secret", "ServiceAccount", "Role", "RoleBinding"} <= set(kinds[:pods_begin])
    assert kinds[pods_begin:] == ["Deployment", "Deployment", "Deployment", "Service", "ControllerRevision"]
    assert all(isinstance(action, Apply) and action.is_new for action in plan.actions)


def test_nothing_is_done_when_nothing_changed():
    api = api_with()
    settle(api)
    assert plan_of(api).actions == ()


def test_a_deleted_child_is_made_again_and_only_that():
    api = api_with()
    settle(api)
    api.remove(SERVICE.kind, "models", "chat")
    assert [(action.ref, action.why) for action in plan_of(api).actions] == [(Ref("Service", "chat"), "missing")]


def test_a_deleted_secret_comes_back_with_the_key_that_the_engines_have():
    api = api_with()
    settle(api)
    key = api.objects[SECRET.kind, "models", "chat-kv"]["data"]["key"]
    observed = observe(api)
    api.remove(SECRET.kind, "models", "chat-kv")
    without = Observed(
        body=observed.body,
        children={ref: child for ref, child in observed.children.items() if ref.kind != SECRET.kind},
        pods=observed.pods,
        remembered_key=observed.kv_key(),
    )
    target = resolve_target(without, OPERATOR, "ANOTHER=")
    (action,) = make_plan(target, without).actions
    assert isinstance(action, Apply)
    assert action.manifest["data"] == {"key": key}


def test_a_new_key_is_kept_and_touches_no_workload():
    api = api_with()
    settle(api)
    secret = copy.deepcopy(api.objects[SECRET.kind, "models", "chat-kv"])
    api.put({**secret, "data": {"key": "bmV3"}})
    assert {action.ref.kind for action in plan_of(api).actions} == {SECRET.kind}
    settle(api)
    assert api.objects[SECRET.kind, "models", "chat-kv"]["data"] == {"key": "bmV3"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), 5),
        (("spec", "template", "spec", "containers", 0, "image"), "evil:1"),
        (("spec", "template", "spec", "containers", 0, "args"), []),
        (("metadata", "labels"), {names.LABEL_NAME: "chat"}),
        (("metadata", "annotations"), {}),
    ],
)
def test_an_edit_by_hand_is_undone(path: tuple, value: object):
    api = api_with()
    settle(api)
    name = min(deployments(api))
    body = copy.deepcopy(api.objects[DEPLOYMENT.kind, "models", name])
    *steps, last = path
    place = body
    for step in steps:
        place = place[step]
    place[last] = value
    api.put(body)
    (action,) = plan_of(api).actions
    assert action.ref == Ref("Deployment", name)
    assert action.why.endswith(("differs", "has to be 1"))
    settle(api)


def test_a_field_that_the_operator_stops_setting_is_noticed():
    manifest = {"kind": "Service", "metadata": {"name": "a", "labels": {}}, "spec": {"a": 1, "b": 2}}
    fewer = {"kind": "Service", "metadata": {"name": "a", "labels": {}}, "spec": {"a": 1}}
    assert with_hash(manifest)["metadata"]["annotations"] != with_hash(fewer)["metadata"]["annotations"]


def test_an_object_that_is_being_deleted_gets_nothing():
    api = api_with()
    body = copy.deepcopy(api.owner())
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.put(body)
    assert plan_of(api).actions == ()


def test_a_child_that_is_being_deleted_is_waited_for():
    api = api_with()
    settle(api)
    body = copy.deepcopy(api.objects[SERVICE.kind, "models", "chat"])
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    body["spec"] = {}
    api.put(body)
    assert plan_of(api).actions == ()


def test_somebody_elses_object_with_our_name_is_left_alone_and_said():
    api = api_with()
    metadata = {"name": "chat", "namespace": "models", "labels": {names.LABEL_NAME: "chat"}, "uid": "theirs"}
    api.put({"kind": "Service", "metadata": metadata, "spec": {}})
    plan = plan_of(api)
    assert Ref("Service", "chat") not in [action.ref for action in plan.actions]
    assert [problem.reason for problem in plan.blocked] == [Reason.NAME_TAKEN]


def test_what_is_no_longer_wanted_is_deleted_by_its_uid():
    api = api_with()
    settle(api)
    mine = {"uid": api.owner()["metadata"]["uid"], "controller": True}
    metadata = {
        "name": "chat-extra",
        "namespace": "models",
        "labels": {names.LABEL_NAME: "chat"},
        "ownerReferences": [mine],
    }
    extra = api.put({"kind": "Service", "metadata": metadata, "spec": {}})
    assert plan_of(api).actions == (
        Delete(Ref("Service", "chat-extra"), extra["metadata"]["uid"], "not wanted any more"),
    )


def test_the_same_write_is_not_made_twice_where_the_server_stores_something_else():
    api = api_with()
    settle(api)
    service = copy.deepcopy(api.objects[SERVICE.kind, "models", "chat"])
    service["spec"]["ports"][0]["protocol"] = "rewritten by the server"
    api.put(service)
    observed = observe(api)
    target = target_of(observed)
    (action,) = make_plan(target, observed).actions
    assert isinstance(action, Apply)
    record = settled(action.manifest, observed.children[action.ref].body)
    known = Observed(observed.body, observed.children, observed.pods, settled={action.ref: record})
    assert make_plan(target, known).actions == ()


class TestRevisions:
    def test_the_new_one_is_made_beside_the_old(self):
        api = api_with()
        settle(api)
        before = deployments(api)
        change(api, **NEW_IMAGE)
        carry_out(api, plan_of(api))
        assert before < deployments(api)
        assert len(deployments(api)) == 6

    def test_the_old_one_stays_while_the_new_one_is_not_ready(self):
        api = api_with()
        settle(api)
        old = deployments(api)
        change(api, **NEW_IMAGE)
        revision = target_of(observe(api)).revision
        for _ in range(3):
            carry_out(api, plan_of(api))
            api.run_deployments(broken=frozenset({revision or ""}))
        assert old < deployments(api)

    def test_of_the_old_one_the_engines_go_after_the_last_router(self):
        api = api_with()
        settle(api)
        old = {name.rsplit("-", 1)[1] for name in deployments(api)}.pop()
        change(api, **NEW_IMAGE)
        carry_out(api, plan_of(api))
        api.run_deployments()
        router = copy.deepcopy(api.objects["Pod", "models", f"chat-router-{old}-0"])
        plan = plan_of(api)
        assert [action.ref.name for action in plan.actions] == [f"chat-router-{old}"]
        carry_out(api, plan)
        # Its pod ends its requests, which takes a while.
        router["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": []}
        api.put(router)
        assert plan_of(api).actions == ()
        api.remove("Pod", "models", f"chat-router-{old}-0")
        names_ = {action.ref.name for action in plan_of(api).actions}
        assert names_ == {f"chat-prefill-{old}", f"chat-decode-{old}"}

    def test_the_old_one_goes_when_the_new_one_is_complete(self):
        api = api_with()
        settle(api)
        old = deployments(api)
        change(api, **NEW_IMAGE)
        settle(api)
        assert len(deployments(api)) == 3
        assert not old & deployments(api)

    def test_a_revert_in_the_middle_keeps_what_serves_and_removes_the_new(self):
        api = api_with()
        settle(api)
        old = deployments(api)
        change(api, **NEW_IMAGE)
        carry_out(api, plan_of(api))
        change(api)
        settle(api)
        assert deployments(api) == old

    def test_of_a_b_c_within_seconds_b_goes_at_once_and_a_when_c_is_complete(self):
        api = api_with()
        settle(api)
        a = deployments(api)
        change(api, **NEW_IMAGE)
        carry_out(api, plan_of(api))
        b = deployments(api) - a
        change(api, image="acme/engine:3")
        carry_out(api, plan_of(api))
        carry_out(api, plan_of(api))
        assert a < deployments(api)
        assert not b & deployments(api)
        settle(api)
        assert len(deployments(api)) == 3
        assert not a & deployments(api)

    def test_an_old_revision_that_is_down_for_a_moment_is_not_given_up(self):
        api = api_with()
        settle(api)
        old = deployments(api)
        change(api, **NEW_IMAGE)
        carry_out(api, plan_of(api))
        everything = {names_.rsplit("-", 1)[1] for names_ in deployments(api)}
        api.run_deployments(broken=frozenset(everything))
        carry_out(api, plan_of(api))
        assert old < deployments(api)

    def test_after_a_revert_what_does_not_serve_gives_its_accelerators_back(self):
        api = api_with()
        settle(api)
        a = deployments(api)
        change(api, **NEW_IMAGE)
        carry_out(api, plan_of(api))
        b = deployments(api) - a
        api.run_deployments(broken=frozenset(name.rsplit("-", 1)[1] for name in b))
        # Back to the first, and one engine more: there is no room for it while the second holds its accelerators.
        change(api, prefill={**spec()["prefill"], "replicas": 2})
        carry_out(api, plan_of(api))
        api.run_deployments(broken=frozenset(name.rsplit("-", 1)[1] for name in b))
        waits = api.objects["Pod", "models", next(f"{name}-1" for name in a if "prefill" in name)]
        waits["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        # It may become ready yet; after a minute nobody counts on it.
        assert plan_of(api).actions == ()
        plan = plan_of(api, now="2026-01-01T01:00:00Z")
        assert {action.why for action in plan.actions} == {"does not serve, and another revision does"}
        assert {action.ref.name for action in plan.actions} < b
        carry_out(api, plan)
        settle(api)
        assert deployments(api) == a

    def test_an_old_one_whose_router_is_away_for_a_moment_is_not_given_up(self):
        api = api_with()
        settle(api)
        old = deployments(api)
        change(api, **NEW_IMAGE)
        carry_out(api, plan_of(api))
        api.run_deployments()
        new = (deployments(api) - old).pop().rsplit("-", 1)[1]
        late = api.objects["Pod", "models", f"chat-prefill-{new}-0"]
        late["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        api.remove("Pod", "models", next(f"{name}-0" for name in old if "router" in name))
        assert plan_of(api).actions == ()
        # The same when the one that is partly up is old itself by now.
        change(api, image="acme/engine:3")
        carry_out(api, plan_of(api))
        carry_out(api, plan_of(api))
        assert old < deployments(api)

    @pytest.mark.parametrize(
        ("metadata", "status", "remains"),
        [
            ({}, {"phase": "Failed", "reason": "Evicted"}, False),
            ({}, {"phase": "Succeeded"}, False),
            ({"deletionTimestamp": "2026-01-01T00:01:00Z"}, {"phase": "Running"}, True),
            ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, {"phase": "Running"}, False),
            (
                {"deletionTimestamp": "2026-01-01T00:00:00Z"},
                {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
                True,
            ),
        ],
        ids=["evicted", "ended", "in its grace period", "on a dead node", "late but ready"],
    )
    def test_the_engines_wait_for_routers_that_can_still_have_requests(
        self, metadata: dict, status: dict, remains: bool
    ):
        api = api_with()
        settle(api)
        old = deployments(api).pop().rsplit("-", 1)[1]
        change(api, **NEW_IMAGE)
        carry_out(api, plan_of(api))
        api.run_deployments()
        router = copy.deepcopy(api.objects["Pod", "models", f"chat-router-{old}-0"])
        carry_out(api, plan_of(api))
        router["metadata"] |= {**metadata, "ownerReferences": []}
        api.put({**router, "status": status})
        observed = observe(api)
        target = target_of(observed)
        plan = make_plan(target, observed, now="2026-01-01T00:00:30Z")
        assert bool(plan.actions) is not remains

    def test_a_scale_makes_no_new_revision(self):
        api = api_with()
        settle(api)
        before = deployments(api)
        change(api, prefill={**spec()["prefill"], "replicas": 3}, router={"replicas": 2})
        settle(api)
        assert deployments(api) == before

    def test_an_upgrade_of_the_operator_writes_nothing(self):
        api = api_with()
        settle(api)
        assert plan_of(api, Operator("acme/operator:2", "Always")).actions == ()

    def test_a_new_revision_is_made_with_the_new_operator_image(self):
        api = api_with()
        settle(api)
        change(api, **NEW_IMAGE)
        settle(api, Operator("acme/operator:2"))
        images = {
            body["spec"]["template"]["spec"]["containers"][0]["image"]
            for (kind, name), body in api.children().items()
            if kind == DEPLOYMENT.kind and "router" in name
        }
        assert images == {"acme/operator:2"}

    def test_scaled_to_zero_it_is_complete_without_a_ready_router(self):
        api = api_with()
        settle(api)
        change(api, prefill={**spec()["prefill"], "replicas": 0}, **NEW_IMAGE)
        settle(api)
        assert len(deployments(api)) == 3


class TestAutoscaling:
    prefill = {"parallelism": {"tensor": 1}, "blockSize": 32, "scaling": {"minReplicas": 2, "maxReplicas": 4}}  # noqa: RUF012

    def ask(self, api: SimulatedApi, replicas: int) -> None:
        body = copy.deepcopy(api.objects[SCALER.kind, "models", "chat-prefill"])
        api.put({**body, "spec": {"replicas": replicas}})

    def engines(self, api: SimulatedApi) -> list[int]:
        bodies = (api.objects[DEPLOYMENT.kind, "models", name] for name in deployments(api) if "prefill" in name)
        return [body["spec"]["replicas"] for body in bodies]

    def test_a_role_begins_with_its_minimum(self):
        api = api_with(prefill=self.prefill)
        settle(api)
        assert (self.engines(api), api.objects[SCALER.kind, "models", "chat-prefill"]["spec"]) == ([2], {"replicas": 2})

    @pytest.mark.parametrize(("asked", "engines"), [(4, 4), (3, 3), (9, 4), (0, 2)])
    def test_what_the_autoscaler_asks_for_is_run_within_the_bounds_and_its_number_is_left_alone(self, asked, engines):
        api = api_with(prefill=self.prefill)
        settle(api)
        self.ask(api, asked)
        settle(api)
        assert self.engines(api) == [engines]
        assert api.objects[SCALER.kind, "models", "chat-prefill"]["spec"] == {"replicas": asked}

    def test_switching_scaling_on_takes_no_engine_away(self):
        api = api_with(prefill={"parallelism": {"tensor": 1}, "blockSize": 32, "replicas": 3})
        settle(api)
        change(api, prefill=self.prefill)
        settle(api)
        assert (self.engines(api), api.objects[SCALER.kind, "models", "chat-prefill"]["spec"]) == ([3], {"replicas": 3})

    def test_a_scaler_that_was_deleted_comes_back_with_what_runs(self):
        api = api_with(prefill=self.prefill)
        settle(api)
        self.ask(api, 4)
        settle(api)
        api.remove(SCALER.kind, "models", "chat-prefill")
        settle(api)
        assert (self.engines(api), api.objects[SCALER.kind, "models", "chat-prefill"]["spec"]) == ([4], {"replicas": 4})

    def test_switching_scaling_off_deletes_the_scaler(self):
        api = api_with(prefill=self.prefill)
        settle(api)
        change(api, prefill={"parallelism": {"tensor": 1}, "blockSize": 32, "replicas": 3})
        settle(api)
        assert (SCALER.kind, "chat-prefill") not in api.children()
        assert self.engines(api) == [3]

    def test_labels_and_owner_of_a_scaler_are_repaired_without_its_number(self):
        api = api_with(prefill=self.prefill)
        settle(api)
        body = copy.deepcopy(api.objects[SCALER.kind, "models", "chat-prefill"])
        del body["metadata"]["labels"]["app.kubernetes.io/managed-by"]
        api.put({**body, "spec": {"replicas": 3}})
        action = next(each for each in plan_of(api).actions if each.ref.kind == SCALER.kind)
        assert isinstance(action, Apply)
        assert "spec" not in action.manifest
        settle(api)
        after = api.objects[SCALER.kind, "models", "chat-prefill"]
        assert (after["metadata"]["labels"]["app.kubernetes.io/managed-by"], after["spec"]) == (
            "dcp-operator",
            {"replicas": 3},
        )


class TestModelJob:
    model = {"uri": "hf://acme/tiny", "cache": {"claimName": "models"}}  # noqa: RUF012

    def job(self, api: SimulatedApi) -> dict:
        (body,) = [copy.deepcopy(body) for (kind, _), body in api.children().items() if kind == JOB.kind]
        return body

    def with_job(self) -> SimulatedApi:
        body = spec()
        api = api_with(model={**body["model"], **self.model})
        carry_out(api, plan_of(api))
        return api

    def test_what_admission_made_of_a_jobs_pods_is_left_alone_because_nobody_can_change_it(self):
        api = self.with_job()
        body = self.job(api)
        body["spec"]["template"]["spec"] |= {"nodeSelector": {"pool": "spot"}, "containers": []}
        body["spec"]["backoffLimit"] = 0
        api.put(body)
        assert [action for action in plan_of(api).actions if action.ref.kind == JOB.kind] == []

    def test_labels_and_owner_of_a_job_are_repaired_without_its_pods(self):
        api = self.with_job()
        body = self.job(api)
        del body["metadata"]["labels"]["app.kubernetes.io/managed-by"]
        api.put(body)
        (action,) = [each for each in plan_of(api).actions if each.ref.kind == JOB.kind]
        assert isinstance(action, Apply)
        assert "spec" not in action.manifest
        carry_out(api, plan_of(api))
        after = self.job(api)
        assert after["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "dcp-operator"
        assert after["spec"] == body["spec"]


def test_a_refused_object_has_no_revision_and_no_manifests_and_says_all_that_is_wrong():
    decode = {"parallelism": {"tensor": 3, "decodeContext": 2}, "blockSize": 32, "kvCacheInterleaveSize": 7}
    target = target_of(observe(api_with(decode=decode)))
    assert target.revision is None
    assert target.manifests == ()
    assert {"dcp-divides-tp", "interleave-divides-block"} <= {finding.rule for finding in target.violations}


def test_a_stored_object_of_an_older_schema_is_refused_in_words():
    api = api_with()
    body = copy.deepcopy(api.owner())
    body["spec"]["prefil"] = {}
    api.put(body)
    target = target_of(observe(api))
    assert target.revision is None
    assert "spec.prefil" in str(target.violations[0])
