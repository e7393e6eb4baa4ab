"""Kinds that a cluster need not know: found when they come, followed while they are there, left when they go."""

import asyncio
import base64
from typing import Any

import pytest

from dcp_operator import names, optional_kinds, watches
from dcp_operator.client import ApiError
from dcp_operator.gather import Cache
from dcp_operator.kinds import LEADER_WORKER_SET, POD
from dcp_operator.observed import Key
from dcp_operator.optional_kinds import OptionalKind
from dcp_operator.reconciler import Reconciler
from dcp_operator.target import Operator
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi
from tests.support.watch_source import Listener, Server, named, until, watch_threads


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_kinds, "ASK_S", 0.01)
    for name in ("AGAIN_S", "RETRY_S", "RETRY_MAX_S"):
        monkeypatch.setattr(watches, name, 0.01)


def looked_after_by(api: SimulatedApi) -> Reconciler:
    return Reconciler(
        api,  # type: ignore[arg-type] - the simulated server has the same calls
        Operator("acme/operator:1"),
        now=lambda: "2026-01-01T00:00:00Z",
        fresh_key=lambda: base64.b64encode(b"key").decode(),
    )


def wide() -> dict[str, Any]:
    decode = {**spec()["decode"], "multinode": {"nodeCount": 2}}
    return owner(decode=decode)


def reason(api: SimulatedApi) -> str:
    said = {each["type"]: each for each in api.owner().get("status", {}).get("conditions", [])}
    return said.get("Ready", {}).get("reason", "")


def sets(api: SimulatedApi) -> list[str]:
    return [name for kind, _, name in api.objects if kind == LEADER_WORKER_SET.kind]


def test_an_object_waits_for_its_kind_and_loses_nothing_by_its_absence():
    async def scenario() -> None:
        api = SimulatedApi()
        api.put(wide())
        reconciler = looked_after_by(api)
        await reconciler.start()
        await until(lambda: reason(api) == "GroupsUnavailable")
        roles = {name.split("-")[1] for kind, name in api.children() if kind == "Deployment"}
        assert roles == {"prefill", "router"}
        assert sets(api) == []
        api.served.add(LEADER_WORKER_SET.kind)
        await until(lambda: sets(api))
        await until(lambda: reason(api) not in ("", "GroupsUnavailable"))
        # The definition goes, and with it every object of the kind.
        api.served.clear()
        for name in sets(api):
            api.remove(LEADER_WORKER_SET.kind, "models", name)
        await until(lambda: reason(api) == "GroupsUnavailable")
        await reconciler.stop()

    asyncio.run(scenario())


def test_a_group_is_written_about_before_its_leader_is_deleted():
    async def scenario() -> None:
        api = SimulatedApi()
        api.served.add(LEADER_WORKER_SET.kind)
        body = wide()
        body["spec"]["decode"]["multinode"]["restartBackoff"] = {"baseDelaySeconds": 1, "maxDelaySeconds": 1}
        api.put(body)
        reconciler = looked_after_by(api)
        # The clock stands still, so that a pause that has begun would never end.
        await reconciler.start()
        await until(lambda: sets(api))
        for index, ended in ((0, "Running"), (1, "Failed")):
            labels = {
                **names.labels("chat", "decode" if index == 0 else "decode-worker"),
                names.LABEL_GROUP_SET: sets(api)[0],
                names.LABEL_GROUP_INDEX: "0",
                names.LABEL_WORKER_INDEX: str(index),
            }
            metadata = {"name": f"pod-{index}", "namespace": "models", "labels": labels}
            metadata["annotations"] = {names.ANNOTATION_GROUP_SIZE: "2"}
            api.put({"kind": "Pod", "metadata": metadata, "status": {"phase": ended}})
            stored = api.objects["Pod", "models", f"pod-{index}"]
            reconciler.lists.on_event(POD, "ADDED", dict(stored))
        await until(lambda: ("annotate", LEADER_WORKER_SET.kind, sets(api)[0]) in api.writes)
        assert ("delete", "Pod", "pod-0") not in api.writes
        noted = api.objects[LEADER_WORKER_SET.kind, "models", sets(api)[0]]["metadata"]["annotations"]
        assert "pod pod-1 ended for good" in noted[names.ANNOTATION_GROUP_RESTARTS]
        await reconciler.stop()

    asyncio.run(scenario())


def following(server: Server, told: Listener, namespaces: tuple[str | None, ...] = (None,)) -> OptionalKind:
    async def run(function: Any, *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)

    return OptionalKind(server, told, LEADER_WORKER_SET, namespaces, run)


def test_a_kind_that_goes_and_comes_back_is_followed_again():
    async def scenario() -> None:
        server, told = Server(), Listener()
        kind = following(server, told)
        await kind.look()
        server.refusal = ApiError(404, "NotFound", "the server could not find the requested resource")
        server.changes.put(server.refusal)
        await until(lambda: not any(watch_threads()))
        server.refusal = None
        await kind.look()
        server.changes.put(("ADDED", named("again", "40")))
        await until(lambda: told.events == [("ADDED", "again")])
        server.served = False
        await kind.look()
        assert told.lists[-1] == []
        assert "needs LeaderWorkerSet" in str(told.why[-1])
        await until(lambda: not any(watch_threads()))

    asyncio.run(scenario())


def test_a_kind_that_the_operator_may_not_list_is_not_there_and_stops_nothing():
    async def scenario() -> None:
        server, told = Server(), Listener()
        server.refusal = ApiError(403, "Forbidden", "leaderworkersets is forbidden")
        await following(server, told).look()
        assert told.why == [
            "the operator may not work with leaderworkersets: leaderworkersets is forbidden. Upgrade its Helm release"
        ]

    asyncio.run(scenario())


def test_what_is_known_of_a_kind_that_is_refused_stays():
    async def scenario() -> None:
        server, told = Server(), Listener()
        server.items = [named("a", "5")]
        kind = following(server, told)
        await kind.look()
        server.closed = {None}
        server.changes.put(ApiError(403, "Forbidden", "leaderworkersets is forbidden"))
        await until(lambda: not any(watch_threads()))
        await kind.look()
        assert "may not work with leaderworkersets" in str(told.places[None])
        assert told.lists == [["a"]]
        server.closed = set()
        await kind.look()
        assert told.places == {None: None}
        kind.end()

    asyncio.run(scenario())


def test_a_namespace_that_refuses_takes_the_kind_from_no_other():
    async def scenario() -> None:
        server, told = Server(), Listener()
        server.closed = {"closed"}
        kind = following(server, told, ("closed", "open"))
        await kind.look()
        assert told.places["open"] is None
        assert "forbidden in closed" in str(told.places["closed"])
        server.changes.put(("ADDED", named("a", "12")))
        await until(lambda: told.events == [("ADDED", "a")])
        server.closed = set()
        await kind.look()
        assert told.places == {"closed": None, "open": None}
        await until(lambda: len(watch_threads()) == 2)
        # One that closes later ends its own watch, not that of the other.
        server.closed = {"open"}

        def one_is_left() -> bool:
            server.changes.put(ApiError(410, "Expired", "too old resource version"))
            return len(watch_threads()) == 1

        await until(one_is_left)
        await kind.look()
        assert told.places["closed"] is None
        assert "forbidden in open" in str(told.places["open"])
        server.changes.put(("ADDED", named("b", "14")))
        await until(lambda: told.events[-1] == ("ADDED", "b"))
        kind.end()
        await until(lambda: not any(watch_threads()))

    asyncio.run(scenario())


def test_a_kind_is_missing_to_the_objects_of_the_namespace_that_refuses_alone():
    cache = Cache()
    for namespace in ("closed", "open"):
        cache.store(
            owner(namespace=namespace) | {"metadata": {**owner(namespace=namespace)["metadata"], "uid": namespace}}
        )
    assert cache.say_unavailable(LEADER_WORKER_SET, "closed", "refused")
    assert not cache.say_unavailable(LEADER_WORKER_SET, "closed", "refused")

    def missing(namespace: str) -> dict[str, str]:
        observed = cache.snapshot(Key(namespace, "chat"))
        assert observed is not None
        return dict(observed.unavailable)

    assert (missing("closed"), missing("open")) == ({LEADER_WORKER_SET.kind: "refused"}, {})
    assert cache.say_unavailable(LEADER_WORKER_SET, "closed", None)
    assert missing("closed") == {}
    cache.say_unavailable(LEADER_WORKER_SET, None, "not there")
    assert missing("open") == {LEADER_WORKER_SET.kind: "not there"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_whose_thread_has_died_is_seen_and_begun_anew():
    class Fatal(BaseException):
        pass

    async def scenario() -> None:
        server, told = Server(), Listener()
        kind = following(server, told)
        server.fatal = Fatal()
        await kind.look()
        await until(kind.problems)
        assert kind.problems() == ["the watch of leaderworkersets in all namespaces has died"]
        server.fatal = None
        await kind.look()
        assert kind.problems() == []
        server.changes.put(("ADDED", named("again", "40")))
        await until(lambda: told.events == [("ADDED", "again")])
        kind.end()

    asyncio.run(scenario())
