"""Ports of nodes for engines on the host's network: found without collision, and read again from what exists."""

import asyncio
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_operator import names, ports
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context, render_context, revision_of
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.observed import Key
from dcp_operator.port_ledger import PortLedger
from dcp_operator.ports import FIRST_HOST_PORT, LAST_HOST_PORT, block_size, engine_ports, find_block, host_ports_of
from dcp_operator.reconciler import Reconciler
from dcp_operator.settings import Role
from dcp_operator.target import Operator, Target, resolve_target
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi, observe

RANGE = range(FIRST_HOST_PORT, LAST_HOST_PORT + 1)
CONNECTORS = ("mooncake", "mooncake-upstream", "nixl")


def main_of(deployment: dict) -> dict:
    return deployment["spec"]["template"]["spec"]["containers"][0]


def by_role(manifests, component: str) -> dict:
    (found,) = [
        manifest
        for manifest in manifests
        if manifest["kind"] == "Deployment" and manifest["metadata"]["labels"][names.LABEL_ROLE] == component
    ]
    return found


def on_host(connector: str = "mooncake", **changes) -> dict:
    """Return a change of a spec: both roles on the host's network, decode with two data-parallel ranks."""
    base = spec()
    prefill = {**base["prefill"], "hostNetwork": True}
    decode = {**base["decode"], "parallelism": {"tensor": 1, "data": 2}, "hostNetwork": True}
    router = {"replicas": 0 if connector == "mooncake-upstream" else 1}
    kind = {"type": connector, "protocol": "tcp"}
    return {"kvConnector": kind, "prefill": prefill, "decode": decode, "router": router, **changes}


def target_of(api: SimulatedApi) -> Target:
    target = resolve_target(observe(api), Operator("acme/operator:1"), "ZnJlc2g=")
    assert target.revision is not None, target.violations
    return target


def make(api: SimulatedApi) -> Target:
    """Have the operator's manifests exist, and return what it wanted."""
    target = target_of(api)
    for manifest in target.manifests:
        if manifest["kind"] == "Deployment":
            api.put(
                {**copy.deepcopy(manifest), "metadata": {**manifest["metadata"], "uid": manifest["metadata"]["name"]}}
            )
    return target


class TestFindBlock:
    @given(
        identity=st.text(max_size=20),
        size=st.integers(1, 40),
        taken=st.sets(st.integers(FIRST_HOST_PORT, LAST_HOST_PORT), max_size=30),
    )
    def test_a_block_is_within_the_range_and_free(self, identity: str, size: int, taken: set[int]):
        first = find_block(identity, size, taken)
        assert first is not None
        block = range(first, first + size)
        assert set(block) <= set(RANGE)
        assert taken.isdisjoint(block)
        assert find_block(identity, size, taken) == first

    @given(
        free=st.sets(st.integers(FIRST_HOST_PORT, FIRST_HOST_PORT + 60) | st.just(LAST_HOST_PORT), max_size=40),
        size=st.integers(1, 8),
    )
    def test_one_is_found_exactly_where_there_is_one(self, free: set[int], size: int):
        fits = any(set(range(first, first + size)) <= free for first in RANGE)
        assert (find_block("chat", size, set(RANGE) - free) is not None) == fits

    def test_no_block_is_larger_than_the_range(self):
        assert find_block("chat", len(RANGE), ()) == FIRST_HOST_PORT
        assert find_block("chat", len(RANGE) + 1, ()) is None

    def test_other_names_begin_at_other_places(self):
        assert len({find_block(f"models/chat-{number}", 8, ()) for number in range(100)}) > 95


class TestLayout:
    @pytest.mark.parametrize("connector", CONNECTORS)
    def test_no_two_uses_of_a_block_meet_and_all_are_within_it(self, connector: str):
        stated = Spec.model_validate(spec(**on_host(connector)))
        used = [FIRST_HOST_PORT]
        for role in Role:
            found = engine_ports(stated, role, FIRST_HOST_PORT)
            assert found.api == FIRST_HOST_PORT, "a router looks for the engines of both roles on one port"
            used += [found.group, *range(found.side, found.side + max(1, ports.side_count(stated, role)))]
        assert sorted(used) == list(range(FIRST_HOST_PORT, FIRST_HOST_PORT + block_size(stated)))

    def test_a_pods_own_network_keeps_the_usual_ports_wherever_the_block_is(self):
        stated = Spec.model_validate(spec())
        assert {engine_ports(stated, role, 25000) for role in Role} == {ports.EnginePorts(8000, 8998, 29501)}


class TestPods:
    @pytest.mark.parametrize("connector", CONNECTORS)
    def test_every_port_of_an_engine_is_the_nodes_and_what_the_connector_is_told(self, connector: str):
        context = Context(
            "chat", "models", Spec.model_validate(spec(**on_host(connector))), "acme/operator:1", host_ports=25000
        )
        manifests = render_context(context)
        for role in Role:
            deployment = by_role(manifests, role)
            pod, main = deployment["spec"]["template"]["spec"], main_of(deployment)
            expected = engine_ports(context.spec, role, 25000)
            assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
            assert all(port["hostPort"] == port["containerPort"] for port in main["ports"])
            sides = range(expected.side, expected.side + ports.side_count(context.spec, role))
            assert [port["containerPort"] for port in main["ports"]] == [25000, *sides]
            assert "--port=25000" in main["args"]
            variables = {variable["name"]: variable.get("value") for variable in main["env"]}
            assert str(expected.side) in variables.values()
            if connector == "mooncake":
                (config,) = [each for each in main["args"] if each.startswith("--kv-transfer-config=")]
                assert f'"api_port":25000,"bootstrap_port":{expected.side}' in config
            assert host_ports_of(deployment) == {25000, *sides}
            assert ports.api_port_of(deployment) == 25000
        if connector != "mooncake-upstream":
            assert "--service-discovery-port=25000" in main_of(by_role(manifests, names.ROUTER))["args"]

    def test_a_role_that_stays_on_its_pods_network_shares_the_http_port_and_takes_none_of_a_node(self):
        changes = on_host()
        changes["decode"].pop("hostNetwork")
        context = Context("chat", "models", Spec.model_validate(spec(**changes)), "o", host_ports=25000)
        manifests = render_context(context)
        decode = by_role(manifests, Role.DECODE)
        assert host_ports_of(decode) == set()
        assert "hostNetwork" not in decode["spec"]["template"]["spec"]
        assert main_of(decode)["ports"][0]["containerPort"] == 25000
        assert host_ports_of(by_role(manifests, Role.PREFILL))

    def test_the_revision_does_not_depend_on_the_ports_but_on_whose_network_it_is(self):
        stated = Spec.model_validate(spec(**on_host()))
        plain = {**on_host(), "prefill": spec()["prefill"]}
        plain["decode"] = {**plain["decode"], "hostNetwork": False}

        def revision(one: Spec, first: int | None) -> str:
            return revision_of(Context("chat", "models", one, "o", host_ports=first))

        assert revision(stated, 25000) == revision(stated, 26000) == revision(stated, None)
        assert revision(Spec.model_validate(spec(**plain)), None) != revision(stated, None)


class TestAssignment:
    def test_what_a_revision_has_it_keeps_and_the_next_one_gets_another(self):
        api = SimulatedApi()
        api.put(owner(**on_host()))
        first = make(api)
        assert first.host_ports
        assert target_of(api).host_ports == first.host_ports
        api.put({**copy.deepcopy(api.owner()), "spec": spec(**on_host(), image="acme/engine:2")})
        second = make(api)
        assert second.revision != first.revision
        assert set(second.host_ports).isdisjoint(first.host_ports)
        api.put({**copy.deepcopy(api.owner()), "spec": spec(**on_host())})
        assert target_of(api).host_ports == first.host_ports, "the old revision's workloads still have their block"

    def test_one_role_left_is_enough_to_remember_the_block(self):
        api = SimulatedApi()
        api.put(owner(**on_host()))
        target = target_of(api)
        decode = by_role(target.manifests, Role.DECODE)
        uid = api.owner()["metadata"]["uid"]
        stated = Spec.model_validate(spec(**on_host()))
        elsewhere = Context("chat", "models", stated, "acme/operator:1", uid=uid, host_ports=29000)
        moved = by_role(render_context(elsewhere), Role.DECODE)
        assert moved["metadata"]["name"] == decode["metadata"]["name"]
        api.put({**moved, "metadata": {**moved["metadata"], "uid": "d"}})
        assert target_of(api).host_ports.start == 29000

    def test_a_block_that_an_earlier_revision_has_is_not_given_to_the_next_one(self):
        api = SimulatedApi()
        api.put(owner(**on_host()))
        wanted = target_of(api).host_ports
        uid = api.owner()["metadata"]["uid"]
        earlier = Spec.model_validate(spec(**on_host(), image="acme/engine:0"))
        there = Context("chat", "models", earlier, "acme/operator:1", uid=uid, host_ports=wanted.start)
        for role in Role:
            body = by_role(render_context(there), role)
            api.put({**body, "metadata": {**body["metadata"], "uid": body["metadata"]["name"]}})
        assert set(target_of(api).host_ports).isdisjoint(wanted)

    def test_without_the_hosts_network_nothing_is_assigned(self):
        api = SimulatedApi()
        api.put(owner())
        assert not target_of(api).host_ports

    def test_a_full_range_is_said_in_words(self, monkeypatch: pytest.MonkeyPatch):
        api = SimulatedApi()
        api.put(owner(**on_host()))
        monkeypatch.setattr(ports, "LAST_HOST_PORT", FIRST_HOST_PORT + 3)
        target = resolve_target(observe(api), Operator("acme/operator:1"), "ZnJlc2g=")
        (finding,) = target.violations
        assert str(finding).startswith("spec.prefill.hostNetwork: true needs 6 successive ports of 20000 to ")
        assert finding.rule == "host-ports"


def workload(uid: str, *numbers: int) -> dict:
    main = {"name": "main", "ports": [{"containerPort": 80}, *({"containerPort": n, "hostPort": n} for n in numbers)]}
    return {"metadata": {"uid": uid}, "spec": {"template": {"spec": {"containers": [main]}}}}


class TestLedger:
    def test_what_others_have_or_are_about_to_have_is_taken_and_ones_own_is_not(self):
        ledger, chat, code = PortLedger(), Key("models", "chat"), Key("models", "code")
        ledger.see(chat, workload("a", 20000, 20001))
        ledger.lend(code, range(20010, 20012))
        assert ledger.taken_from(code) == {20000, 20001}
        assert ledger.taken_from(chat) == {20010, 20011}
        assert ledger.taken_from(Key("other", "chat")) == {20000, 20001, 20010, 20011}

    def test_what_is_gone_or_given_up_is_free(self):
        ledger, chat, other = PortLedger(), Key("models", "chat"), Key("models", "other")
        ledger.see(chat, workload("a", 20000))
        ledger.see(chat, workload("b", 20001))
        ledger.lend(chat, [20002])
        ledger.forget("a")
        ledger.see(chat, workload("b"))
        ledger.lend(chat, ())
        assert ledger.taken_from(other) == set()


#: Among so many, several searches begin within another's block.
OBJECTS = 80


def blocks(api: SimulatedApi) -> dict[str, frozenset[int]]:
    """Return the ports of nodes that each object's workloads have."""
    found: dict[str, frozenset[int]] = {}
    for (kind, _, _), body in api.objects.items():
        if kind == "Deployment" and host_ports_of(body):
            name = body["metadata"]["labels"][names.LABEL_NAME]
            found[name] = found.get(name, frozenset()) | host_ports_of(body)
    return found


def reconciler(api: SimulatedApi) -> Reconciler:
    return Reconciler(
        api,  # type: ignore[arg-type] - the simulated server has the same calls
        Operator("acme/operator:1"),
        now=lambda: "2026-01-01T00:00:00Z",
        fresh_key=lambda: "ZnJlc2g=",
    )


def test_objects_that_come_at_once_get_ports_of_their_own_and_a_restart_changes_none():
    api = SimulatedApi()
    changes = on_host()
    changes["decode"] = {**changes["decode"], "parallelism": {"tensor": 2, "data": 12}}
    keys = [Key("models", f"chat-{number}") for number in range(OBJECTS)]
    size = block_size(Spec.model_validate(spec(**changes)))

    async def once(which: Reconciler) -> None:
        for kind in WATCHED_KINDS:
            await which.lists.refresh(kind)
        # All passes run at the same time: each writes while others choose.
        await asyncio.gather(*map(which.reconcile, keys))
        await which.stop()

    for key in keys:
        api.put(owner(key.name, **changes))
    asyncio.run(once(reconciler(api)))
    found = blocks(api)
    assert len(found) == OBJECTS
    assert sum(map(len, found.values())) == len(frozenset().union(*found.values()))
    revisions = {
        body["metadata"]["labels"][names.LABEL_NAME]: body["metadata"]["labels"][names.LABEL_REVISION]
        for (kind, _, _), body in api.objects.items()
        if kind == "Deployment"
    }
    alone = [find_block(f"{key}/{revisions[key.name]}", size, ()) for key in keys]
    wanted = [port for first in alone if first is not None for port in range(first, first + size)]
    assert len(set(wanted)) < len(wanted), "the test means nothing if no two of them want the same port"
    writes = len(api.writes)
    asyncio.run(once(reconciler(api)))
    assert blocks(api) == found
    assert [write for write in api.writes[writes:] if write[1] == "Deployment"] == []
