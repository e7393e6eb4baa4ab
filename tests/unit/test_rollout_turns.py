"""Rollouts by the whole loop against a simulated API server: edits at any moment, and what is written for them."""

import asyncio
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_operator import names
from dcp_operator.client import ApiError
from dcp_operator.kinds import DEPLOYMENT, DEPLOYMENT_OF_ENGINES, POD, Kind
from dcp_operator.observed import Key
from dcp_operator.reconciler import Reconciler
from dcp_operator.status import condition_of, ready_condition
from dcp_operator.target import Operator
from tests.support.calls_in_turn import CallsInTurn
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi, observe

CHAT = Key("models", "chat")
NEW = "acme/engine:2"


class Turns:
    """The operator and Kubernetes, one after the other."""

    def __init__(self, **changes: Any) -> None:
        self.api = SimulatedApi()
        self.api.put(owner(**changes))
        self.now = "2026-01-01T00:00:00Z"
        self.reconciler = Reconciler(
            self.api,  # type: ignore[arg-type] - the simulated server has the same calls
            Operator("acme/operator:1"),
            now=lambda: self.now,
            fresh_key=lambda: "ZnJlc2g=",
            calls=CallsInTurn(),
        )

    def close(self) -> None:
        self.reconciler._calls.close()

    def edit(self, **changes: Any) -> None:
        """Change fields of the spec; what is not named stays."""
        body = copy.deepcopy(self.api.owner())
        body["spec"] |= changes
        self.api.put(body)

    def look(self, *, is_done: bool = True) -> None:
        """Deliver all events, then make one pass."""

        async def one_pass() -> bool:
            observe(self.api, cache=self.reconciler._cache)
            return await self.reconciler.reconcile(CHAT)

        assert asyncio.run(one_pass()) == is_done

    def at_the_next_status(self, happens: Callable[[], None], *, after: bool = False) -> None:
        """Have something happen right before the next status is written, or right after, before that is answered."""
        real = self.api.apply

        def apply(kind: Kind, namespace: str, manifest: dict, subresource: str | None = None) -> dict:
            if subresource != "status":
                return real(kind, namespace, manifest, subresource)
            self.api.apply = real  # type: ignore[method-assign]
            if not after:
                happens()
                return real(kind, namespace, manifest, subresource)
            answer = real(kind, namespace, manifest, subresource)
            happens()
            return answer

        self.api.apply = apply  # type: ignore[method-assign]

    def turn(self, *, broken: str = "") -> None:
        self.api.run_deployments(broken=frozenset({broken}))
        self.look()

    def rest(self, *, broken: str = "") -> None:
        """Take turns until a pass writes nothing."""
        for _ in range(40):
            self.api.run_deployments(broken=frozenset({broken}))
            self.api.writes.clear()
            self.look()
            if not self.api.writes:
                return
        raise AssertionError(f"does not come to rest: {self.api.writes}")

    @property
    def status(self) -> dict:
        return self.api.owner()["status"]

    @property
    def revision(self) -> str:
        return self.status["updateRevision"]

    def deployments(self) -> dict[str, dict]:
        return {name: body for (kind, name), body in self.api.children().items() if kind == DEPLOYMENT.kind}

    def replicas(self) -> dict[str, tuple[int, ...]]:
        """Return prefill, decode and router replicas by revision."""
        found: dict[str, dict[str, int]] = {}
        for name, body in self.deployments().items():
            _, component, revision = name.rsplit("-", 2)
            found.setdefault(revision, {})[component] = body["spec"]["replicas"]
        return {
            revision: tuple(each.get(component, 0) for component in names.COMPONENTS)
            for revision, each in found.items()
        }

    def written(self, verb: str = "") -> list[str]:
        return [name for one, kind, name in self.api.writes if kind == DEPLOYMENT.kind and verb in one]


@pytest.fixture
def turns() -> Iterator[Callable[..., Turns]]:
    made: list[Turns] = []

    def make(**changes: Any) -> Turns:
        made.append(Turns(**changes))
        made[-1].rest()
        return made[-1]

    yield make
    for each in made:
        each.close()


def role(name: str, replicas: int, **more: Any) -> dict:
    return {**spec()[name], "replicas": replicas, **more}


def sized(replicas: int, **more: Any) -> dict:
    return {"prefill": role("prefill", replicas, **more), "decode": role("decode", replicas, **more)}


def test_both_roles_move_in_paired_steps_and_one_engine_of_each_at_a_time(turns):
    world = turns(**sized(3))
    a = world.revision
    world.edit(image=NEW)
    seen = [dict(world.replicas())]
    for _ in range(20):
        world.turn()
        if world.replicas() != seen[-1]:
            seen.append(world.replicas())
    b = world.revision
    assert [(one.get(a), one.get(b)) for one in seen] == [
        ((3, 3, 1), None),
        ((3, 3, 1), (1, 1, 1)),
        ((2, 2, 1), (1, 1, 1)),
        ((2, 2, 1), (2, 2, 1)),
        ((1, 1, 1), (2, 2, 1)),
        ((1, 1, 1), (3, 3, 1)),
        # Routers end their requests before their engines go.
        ((1, 1, 0), (3, 3, 1)),
        (None, (3, 3, 1)),
    ]
    assert ready_condition(world.status)["status"] == "True"


def test_an_edit_while_the_one_before_is_reported_is_never_called_ready(turns):
    # The first edit changes no pod, so that what its pass knows calls the object Ready.
    world = turns(transferCheck={"enabled": False})
    a = world.revision
    assert ready_condition(world.status)["status"] == "True"
    world.at_the_next_status(lambda: world.edit(image=NEW))
    world.edit(revisionHistoryLimit=3)
    world.look()
    assert world.status["observedGeneration"] == ready_condition(world.status)["observedGeneration"] == 2
    assert world.api.owner()["metadata"]["generation"] == 3
    world.look()
    assert world.status["observedGeneration"] == 3
    assert ready_condition(world.status)["status"] == "False"
    world.rest()
    assert world.replicas() == {world.revision: (1, 1, 1)}
    assert world.revision != a


def test_no_pod_changes_before_the_status_has_said_so(turns):
    world = turns(transferCheck={"enabled": False})
    a = world.revision

    def refuse() -> None:
        raise ApiError(500, "InternalError", "the store is away")

    world.edit(image=NEW)
    world.api.writes.clear()
    world.at_the_next_status(refuse)
    world.look(is_done=False)
    assert world.api.writes == []
    assert ready_condition(world.status)["status"] == "True"
    world.look()
    assert ready_condition(world.status)["status"] == "False"
    assert set(world.replicas()) == {a, world.revision}


def test_an_object_made_anew_while_the_one_before_is_reported_gets_none_of_its_children(turns):
    world = turns(transferCheck={"enabled": False})
    world.edit(image=NEW)

    def replace() -> None:
        for kind, name in world.api.children():
            world.api.remove(kind, CHAT.namespace, name)
        world.api.remove(DEPLOYMENT_OF_ENGINES.kind, CHAT.namespace, CHAT.name)
        world.api.put(owner(transferCheck={"enabled": False}))
        observe(world.api, cache=world.reconciler._cache)

    world.at_the_next_status(replace, after=True)
    world.look()
    assert world.api.children() == {}
    world.rest()
    uid = world.api.owner()["metadata"]["uid"]
    assert {body["metadata"]["ownerReferences"][0]["uid"] for body in world.api.children().values()} == {uid}


def test_a_revert_in_the_middle_keeps_what_serves_and_removes_the_new(turns):
    world = turns(**sized(3))
    a = world.revision
    world.edit(image=NEW)
    for _ in range(3):
        world.turn()
    b = world.revision
    assert world.replicas() == {a: (2, 2, 1), b: (2, 2, 1)}
    before = {name: body["metadata"]["uid"] for name, body in world.deployments().items() if name.endswith(a)}
    world.edit(image=spec()["image"])
    world.look()
    # What serves of the first is kept, and of the second what the floor needs beside it until the first has grown.
    assert world.replicas() == {a: (2, 2, 1), b: (1, 1, 1)}
    world.rest()
    assert world.replicas() == {a: (3, 3, 1)}
    assert {name: body["metadata"]["uid"] for name, body in world.deployments().items()} == before


def test_of_a_b_c_within_seconds_b_goes_and_a_serves_until_c_does(turns):
    world = turns(**sized(2))
    a = world.revision
    world.edit(image=NEW)
    world.look()
    b = world.revision
    world.edit(image="acme/engine:3")
    world.look()
    c = world.revision
    for _ in range(2):
        world.look()
    # Nothing of b is ready, so that its engines make room for those of c.
    assert b not in world.replicas()
    assert (world.replicas()[a], world.replicas()[c][:2]) == ((2, 2, 1), (1, 1))
    world.rest()
    assert world.replicas() == {c: (2, 2, 1)}


def test_a_replicas_only_edit_and_five_rapid_ones_never_change_the_revision(turns):
    world = turns(**sized(1))
    before = world.revision
    uids = {name: body["metadata"]["uid"] for name, body in world.deployments().items()}
    templates = {name: body["spec"]["template"] for name, body in world.deployments().items()}
    for count in (2, 5, 3, 4, 2):
        world.edit(**sized(count), router={"replicas": count})
        world.look()
        assert world.revision == before
        assert world.replicas() == {before: (count, count, count)}
    world.rest()
    assert {name: body["metadata"]["uid"] for name, body in world.deployments().items()} == uids
    assert {name: body["spec"]["template"] for name, body in world.deployments().items()} == templates


def test_a_sidecar_of_one_role_changes_that_roles_deployment_in_place_and_nothing_else(turns):
    world = turns(**sized(2))
    before = world.revision
    uids = {name: body["metadata"]["uid"] for name, body in world.deployments().items()}
    sidecar = {"spec": {"containers": [{"name": "sidecar", "image": "acme/sidecar:2"}]}}
    world.api.writes.clear()
    world.edit(decode=role("decode", 2, template=sidecar))
    world.look()
    assert world.revision == before
    assert world.written() == [f"chat-decode-{before}"]
    decode = world.deployments()[f"chat-decode-{before}"]["spec"]
    assert decode["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "acme/sidecar:2" in [each["image"] for each in decode["template"]["spec"]["containers"]]
    world.rest()
    assert {name: body["metadata"]["uid"] for name, body in world.deployments().items()} == uids


@pytest.mark.parametrize(
    "edit",
    [
        {"decode": role("decode", 1, kvCacheInterleaveSize=8)},
        {"decode": role("decode", 1, parallelism={"tensor": 2, "decodeContext": 1})},
        {"prefill": role("prefill", 1, extraArgs=["--enforce-eager"])},
        {"image": NEW},
    ],
    ids=["interleave", "parallel sizes", "an argument of one role", "image"],
)
def test_an_edit_of_what_engines_run_replaces_both_roles_beside_the_old_ones(turns, edit):
    world = turns()
    a = world.revision
    world.edit(**edit)
    world.look()
    assert world.revision != a
    assert world.replicas() == {a: (1, 1, 1), world.revision: (1, 1, 1)}
    world.rest()
    assert world.replicas() == {world.revision: (1, 1, 1)}


def test_a_paused_object_begins_nothing_and_goes_on_when_it_is_resumed(turns):
    world = turns(**sized(2))
    a = world.revision
    world.edit(image=NEW, paused=True)
    world.rest()
    assert world.replicas() == {a: (2, 2, 1)}
    progressing = condition_of(world.status, "Progressing")
    assert "paused" in progressing["message"]
    world.edit(paused=False)
    world.rest()
    assert world.replicas() == {world.revision: (2, 2, 1)}
    assert a not in world.replicas()


def test_a_pause_in_the_middle_holds_both_revisions_and_scaling_goes_on(turns):
    world = turns(**sized(3))
    a = world.revision
    world.edit(image=NEW)
    for _ in range(3):
        world.turn()
    b = world.revision
    held = world.replicas()
    assert set(held) == {a, b}
    world.edit(paused=True)
    world.rest()
    assert world.replicas() == held
    world.edit(**sized(5))
    world.rest()
    prefill = {revision: counts[0] for revision, counts in world.replicas().items()}
    assert prefill[b] == held[b][0]
    assert sum(prefill.values()) == 5
    world.edit(paused=False)
    world.rest()
    assert world.replicas() == {b: (5, 5, 1)}


def test_while_paused_a_changed_template_is_held_too_and_a_scale_is_not(turns):
    world = turns()
    before = {name: body["spec"]["template"] for name, body in world.deployments().items()}
    world.edit(decode=role("decode", 2, template={"spec": {"priorityClassName": "high"}}), paused=True)
    world.rest()
    assert {name: body["spec"]["template"] for name, body in world.deployments().items()} == before
    assert world.replicas() == {world.revision: (1, 2, 1)}
    world.edit(paused=False)
    world.rest()
    decode = world.deployments()[f"chat-decode-{world.revision}"]["spec"]["template"]
    assert decode["spec"]["priorityClassName"] == "high"


def find_no_node(world: Turns, revision: str) -> None:
    """Do what the scheduler does where accelerators are missing for the engines of a revision."""
    for (kind, _, name), body in world.api.objects.items():
        if kind == POD.kind and revision in name and "-router-" not in name:
            body["status"] = {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                    }
                ],
            }


def test_with_one_engine_a_role_and_no_spare_accelerator_it_says_why_and_what_to_set(turns):
    world = turns()
    a = world.revision
    world.edit(image=NEW)
    world.look()
    b = world.revision
    for _ in range(3):
        world.api.run_deployments(broken=frozenset({b}))
        find_no_node(world, b)
        world.look()
    assert world.replicas() == {a: (1, 1, 1), b: (1, 1, 1)}
    said = condition_of(world.status, "Ready")
    assert said["reason"] == "Unschedulable"
    waits = world.status["rollout"]["waitingFor"]
    assert "no node can take 1 prefill and 1 decode engines" in waits
    assert "set maxUnavailable to 1, which lets old engines go first" in waits
    # As it says: the old engines go, and the new ones come where they were.
    world.edit(rolloutStrategy={"maxSurge": 0, "maxUnavailable": 1})
    world.look()
    world.api.run_deployments(broken=frozenset({b}))
    find_no_node(world, b)
    world.look()
    assert a not in world.replicas()
    world.rest()
    assert world.replicas() == {b: (1, 1, 1)}
    assert ready_condition(world.status)["status"] == "True"


def test_a_broken_new_revision_is_never_rolled_out_and_takes_nothing_away(turns):
    world = turns(**sized(3))
    a = world.revision
    world.edit(image=NEW)
    world.look()
    b = world.revision
    for _ in range(6):
        world.turn(broken=b)
    assert world.replicas() == {a: (3, 3, 1), b: (1, 1, 1)}
    world.now = "2026-01-02T00:00:00Z"
    world.rest(broken=b)
    assert world.replicas() == {a: (3, 3, 1), b: (1, 1, 1)}
    waits = world.status["rollout"]["waitingFor"]
    assert waits == (
        f"1 prefill and 1 decode engines of revision {b} have to become ready before more of revision {a} may go"
    )


def test_routers_follow_the_shares_of_their_revisions(turns):
    world = turns(**sized(4), router={"replicas": 4})
    a = world.revision
    world.edit(image=NEW)
    routers = []
    for _ in range(30):
        world.turn()
        found = world.replicas()
        routers.append((found.get(a, (0, 0, 0))[2], found[world.revision][2]))
    assert list(dict.fromkeys(routers)) == [(4, 1), (3, 1), (3, 2), (2, 2), (2, 3), (1, 3), (1, 4), (0, 4)]


def test_old_workloads_are_scaled_and_their_templates_never_touched(turns):
    world = turns(**sized(3))
    a = world.revision
    templates = {name: body["spec"]["template"] for name, body in world.deployments().items()}
    world.edit(image=NEW, prefill=role("prefill", 3, template={"spec": {"priorityClassName": "high"}}))
    for _ in range(3):
        world.api.run_deployments()
        world.api.writes.clear()
        world.look()
        assert not [name for name in world.written("apply") if name.endswith(a)]
    assert {name: body["spec"]["template"] for name, body in world.deployments().items() if a in name} == templates


def test_a_long_rollout_is_not_braked(turns):
    world = turns(**sized(12))
    world.edit(image=NEW)
    for _ in range(44):
        world.turn()
    assert world.replicas() == {world.revision: (12, 12, 1)}
