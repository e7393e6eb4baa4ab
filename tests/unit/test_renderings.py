"""Answers that passes share: they are those of a pass that knows nothing, and each is worked out once."""

import copy

from dcp_operator.catalogue import builtin
from dcp_operator.renderings import KEPT, Renderings
from dcp_operator.target import Operator, Target, resolve_target
from tests.support.objects import spec
from tests.support.simulated_api import SimulatedApi, observe

KEY = "ZnJlc2g="


def stored(api: SimulatedApi, name: str = "chat", **changes) -> None:
    api.put(
        {
            "apiVersion": "dcpdisagg.io/v1alpha1",
            "kind": "DCPDisaggDeployment",
            "metadata": {"name": name, "namespace": "models"},
            "spec": spec(**changes),
        }
    )


def resolve(api: SimulatedApi, known: Renderings | None, operator: Operator, key: str = KEY) -> Target:
    return resolve_target(observe(api), operator, key, "2026-01-01T00:00:00Z", known)


EDITS = {
    "another image": {"image": "acme/engine:2"},
    "more engines": {"prefill": {**spec()["prefill"], "replicas": 3}},
    "back": {},
    "refused": {"decode": {"parallelism": {"tensor": 3, "decodeContext": 2}, "blockSize": 32}},
    "a template that can't be merged": {"prefill": {**spec()["prefill"], "template": {"spec": {"containers": 1}}}},
}


def test_after_any_edit_the_answer_is_that_of_a_pass_that_knows_nothing():
    api, known = SimulatedApi(), Renderings()
    stored(api)
    for edit in ("back", *EDITS, *reversed(EDITS)):
        stored(api, **copy.deepcopy(EDITS[edit]))
        for operator in (Operator("acme/operator:1"), Operator("acme/operator:2", catalogue=builtin())):
            for key in (KEY, "b3RoZXI="):
                assert resolve(api, known, operator, key) == resolve(api, None, operator, key), edit


def test_another_object_of_the_name_gets_its_own_answer():
    api, known = SimulatedApi(), Renderings()
    stored(api)
    resolve(api, known, Operator("acme/operator:1"))
    api.remove("DCPDisaggDeployment", "models", "chat")
    stored(api, image="acme/engine:2")
    operator = Operator("acme/operator:1")
    assert resolve(api, known, operator) == resolve(api, None, operator)


def test_what_was_rendered_is_not_rendered_again():
    api, known, operator = SimulatedApi(), Renderings(), Operator("acme/operator:1")
    stored(api)
    first = resolve(api, known, operator).manifests
    again = resolve(api, known, operator).manifests
    # The history depends on what the cluster holds, and is made each time.
    assert all(one is other for one, other in zip(first[:-1], again[:-1], strict=True))


def test_only_so_many_objects_are_remembered():
    known, operator = Renderings(), Operator("acme/operator:1")
    worlds = [SimulatedApi() for _ in range(KEPT + 1)]
    for number, api in enumerate(worlds):
        stored(api)
        api.owner()["metadata"]["uid"] = f"uid of {number}"
    first = resolve(worlds[0], known, operator).manifests
    for api in worlds[1:]:
        resolve(api, known, operator)
    assert resolve(worlds[0], known, operator).manifests[0] is not first[0]
    assert resolve(worlds[-1], known, operator).manifests[0] is resolve(worlds[-1], known, operator).manifests[0]
