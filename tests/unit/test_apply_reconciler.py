"""The loop of tasks: it wakes on events, repairs, backs off and ends, with a simulated API server behind it."""

import asyncio
import base64
import copy
import itertools

import pytest

from dcp_operator import brake
from dcp_operator.brake import FREE
from dcp_operator.catalogue import builtin, read_entries
from dcp_operator.client import ApiError
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, SECRET, SERVICE, Kind
from dcp_operator.observed import Key
from dcp_operator.reconciler import BACKOFF_MAX_S, Reconciler, backoff
from dcp_operator.target import Operator
from tests.support.objects import owner, spec
from tests.support.simulated_api import SimulatedApi

CHAT = Key("models", "chat")


class Loop:
    """A running reconciler, and the watch that tells it what happens."""

    def __init__(self) -> None:
        self.api = SimulatedApi()
        self._keys = itertools.count()
        self.reconciler = self.again()

    def again(self, namespaces: tuple[str, ...] = ()) -> Reconciler:
        """Return a reconciler that knows nothing yet."""
        return Reconciler(
            self.api,  # type: ignore[arg-type] - the simulated server has the same calls
            Operator("acme/operator:1"),
            namespaces=namespaces,
            now=lambda: "2026-01-01T00:00:00Z",
            fresh_key=lambda: base64.b64encode(f"key {next(self._keys)}".encode()).decode(),
        )

    def put(self, body: dict) -> dict:
        stored = self.api.put(body)
        self.tell("MODIFIED", stored)
        return stored

    def tell(self, event: str | None, body: dict) -> None:
        kind = next(kind for kind in WATCHED_KINDS if kind.kind == body["kind"])
        self.reconciler.lists.on_event(kind, event, copy.deepcopy(body))

    async def until(self, condition, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)


def secret_of(loop: Loop) -> dict:
    return loop.api.objects[SECRET.kind, "models", "chat-kv"]


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_an_object_that_exists_at_the_start_is_looked_after(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        kinds = {kind for kind, _ in loop.api.children()}
        assert {"Secret", "Deployment", "Service", "ControllerRevision"} <= kinds
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_an_event_before_everything_is_listed_makes_nothing(loop: Loop):
    async def scenario() -> None:
        loop.tell("ADDED", loop.api.put(owner()))
        await asyncio.sleep(0.05)
        assert loop.api.writes == []

    asyncio.run(scenario())


def test_a_deleted_child_is_made_again(loop: Loop):
    async def scenario() -> None:
        await loop.reconciler.start()
        loop.put(owner())
        await loop.until(lambda: (SERVICE.kind, "chat") in loop.api.children())
        await loop.until(lambda: "status" in loop.api.owner())
        service = loop.api.objects[SERVICE.kind, "models", "chat"]
        loop.api.remove(SERVICE.kind, "models", "chat")
        loop.tell("DELETED", service)
        await loop.until(lambda: (SERVICE.kind, "chat") in loop.api.children())
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_a_deletion_that_no_event_told_is_found_when_the_watch_begins_anew(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        loop.api.remove(SERVICE.kind, "models", "chat")
        other = {"kind": "Service", "metadata": {"name": "x", "namespace": "models", "uid": "x"}, "spec": {}}
        loop.tell(None, loop.api.put(other))
        await loop.until(lambda: (SERVICE.kind, "chat") in loop.api.children())
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_many_events_are_few_passes(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        passes = 0
        real = loop.reconciler.reconcile

        async def counted(key: Key) -> bool:
            nonlocal passes
            passes += 1
            await asyncio.sleep(0.05)
            return await real(key)

        loop.reconciler.reconcile = counted  # type: ignore[method-assign]
        for _ in range(100):
            loop.reconciler.wake(CHAT)
        await asyncio.sleep(0.3)
        assert passes <= 2
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_an_edit_during_a_pass_is_not_reported_as_done(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        real = loop.api.apply

        def edited_meanwhile(*arguments, **keywords):
            loop.api.apply = real  # type: ignore[method-assign]
            edited = {**copy.deepcopy(loop.api.owner()), "spec": spec(image="acme/engine:2")}
            stored = loop.api.put(edited)
            loop.reconciler._cache.store(stored)
            return real(*arguments, **keywords)

        loop.api.apply = edited_meanwhile  # type: ignore[method-assign]
        await loop.until(lambda: loop.api.owner().get("status", {}).get("observedGeneration") == 2)
        assert all(condition["observedGeneration"] == 2 for condition in loop.api.owner()["status"]["conditions"])
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_the_task_ends_with_the_object(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        gone = loop.api.owner()
        loop.api.remove(DEPLOYMENT_OF_ENGINES.kind, "models", "chat")
        loop.tell("DELETED", gone)
        await loop.until(lambda: not loop.reconciler._tasks)
        assert not loop.reconciler._wakers
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_a_defect_in_one_pass_ends_neither_its_object_nor_the_others(loop: Loop, caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        loop.api.put(owner("chat"))
        loop.api.put(owner("other"))
        real = loop.reconciler.reconcile
        failed = []

        async def defective(key: Key) -> bool:
            if key.name == "chat" and not failed:
                failed.append(key)
                raise RuntimeError("a defect")
            return await real(key)

        loop.reconciler.reconcile = defective  # type: ignore[method-assign]
        await loop.reconciler.start()
        await loop.until(lambda: all("status" in loop.api.owner(name) for name in ("chat", "other")))
        await loop.reconciler.stop()

    asyncio.run(scenario())
    assert "pass failed object=models/chat" in caplog.text


def test_a_body_that_no_snapshot_can_be_made_of_ends_no_care(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        cache = loop.reconciler._cache
        real, failed = cache.snapshot, []

        def defective(key: Key) -> None:
            failed.append(key)
            raise ValueError("a defect")

        cache.snapshot = defective  # type: ignore[method-assign]
        await loop.reconciler.start()
        await loop.until(lambda: failed)
        await asyncio.sleep(0.05)
        assert not loop.reconciler._tasks[CHAT].done()
        cache.snapshot = real  # type: ignore[method-assign]
        await loop.until(lambda: "status" in loop.api.owner())
        await loop.reconciler.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("pause_s", [0.01, 60.0], ids=["by itself", "by the next event"])
def test_care_that_a_defect_ended_is_begun_anew(
    loop: Loop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, pause_s: float
):
    monkeypatch.setattr("dcp_operator.reconciler.BACKOFF_MAX_S", pause_s)

    async def scenario() -> None:
        loop.api.put(owner())
        real = loop.reconciler._attend

        async def defective(key: Key, waker: asyncio.Event) -> None:
            loop.reconciler._attend = real  # type: ignore[method-assign]
            raise RuntimeError("a defect")

        loop.reconciler._attend = defective  # type: ignore[method-assign]
        await loop.reconciler.start()
        await loop.until(lambda: "care ended" in caplog.text)
        if pause_s > 1:
            loop.reconciler.wake(CHAT)
        await loop.until(lambda: "status" in loop.api.owner())
        await loop.reconciler.stop()

    asyncio.run(scenario())
    assert "object=models/chat" in caplog.text


def test_what_cannot_be_listed_keeps_the_loop_from_starting(loop: Loop):
    def refuse(*arguments) -> None:
        raise ApiError(403, "Forbidden", 'User "x" cannot list resource "secrets"')

    loop.api.list = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(ApiError, match="cannot list"):
        asyncio.run(loop.reconciler.start())


def test_a_key_whose_secret_lost_its_label_is_found_after_a_restart(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        await loop.reconciler.stop()
        secret = loop.api.objects[SECRET.kind, "models", "chat-kv"]
        before = secret["data"]["key"]
        secret["metadata"]["labels"] = {}
        loop.api.writes.clear()

        restarted = loop.again()
        await restarted.start()
        await loop.until(lambda: secret_of(loop)["metadata"]["labels"])
        await restarted.stop()
        assert secret_of(loop)["data"]["key"] == before
        assert [(verb, kind) for verb, kind, _ in loop.api.writes] == [("make", SECRET.kind), ("apply", SECRET.kind)]

    asyncio.run(scenario())


def test_a_secret_of_that_name_that_is_somebody_elses_gives_no_key(loop: Loop):
    async def scenario() -> None:
        metadata = {"name": "chat-kv", "namespace": "models", "labels": {}}
        loop.api.put({"kind": SECRET.kind, "metadata": metadata, "data": {"key": "dGhlaXJz"}})
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        await loop.reconciler.stop()
        assert loop.reconciler._cache.snapshot(CHAT).kv_key() is None

    asyncio.run(scenario())


def test_a_key_that_can_not_be_read_is_not_replaced_and_it_is_said(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        await loop.reconciler.stop()
        secret = loop.api.objects[SECRET.kind, "models", "chat-kv"]
        secret["metadata"]["labels"] = {}
        before = copy.deepcopy(secret)

        def refuse(*arguments) -> None:
            raise ApiError(403, "Forbidden", 'User "x" cannot get resource "secrets"')

        loop.api.get = refuse  # type: ignore[method-assign,assignment]
        restarted = loop.again()
        await restarted.start()
        await loop.until(lambda: loop.api.owner()["status"]["conditions"][0]["reason"] == "PermissionDenied")
        await restarted.stop()
        assert secret_of(loop) == before
        ready = loop.api.owner()["status"]["conditions"][0]
        assert "could not apply Secret chat-kv" in ready["message"]

    asyncio.run(scenario())


def test_another_controller_that_undoes_each_write_is_not_raced_and_the_rest_is_cared_for(
    loop: Loop, caplog, monkeypatch: pytest.MonkeyPatch
):
    # Long enough for all that has to happen before the next write, however slow the machine is.
    monkeypatch.setattr(brake, "FIRST_S", 4.0)
    rewrites = 0

    async def scenario() -> None:
        nonlocal rewrites
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())

        async def rewrite_service() -> None:
            nonlocal rewrites
            while True:
                service = copy.deepcopy(loop.api.objects[SERVICE.kind, "models", "chat"])
                if service["spec"]["selector"] != {"theirs": "1"}:
                    service["spec"]["selector"] = {"theirs": "1"}
                    loop.put(service)
                    rewrites += 1
                await asyncio.sleep(0.01)

        rival = asyncio.create_task(rewrite_service())
        await loop.until(lambda: "undone again and again" in caplog.text and rewrites == FREE + 1)
        secret = secret_of(loop)
        loop.api.remove(SECRET.kind, "models", "chat-kv")
        loop.tell("DELETED", secret)
        before = rewrites
        await loop.until(lambda: (SECRET.kind, "chat-kv") in loop.api.children())
        assert rewrites == before
        # The next write is due after four seconds, and the one after that eight seconds later.
        await loop.until(lambda: rewrites > before)
        await asyncio.sleep(0.5)
        rival.cancel()
        await loop.reconciler.stop()

    asyncio.run(scenario())
    assert rewrites == FREE + 2
    assert "object=models/chat child=Service chat why=spec.selector" in caplog.text


def test_children_that_are_deleted_one_after_another_are_all_made_again_at_once(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        for kind, name in sorted(loop.api.children()) * 5:
            gone = loop.api.objects[kind, "models", name]
            loop.api.remove(kind, "models", name)
            loop.tell("DELETED", gone)
            await loop.until(lambda child=(kind, name): child in loop.api.children(), timeout_s=5.0)
        await loop.reconciler.stop()

    asyncio.run(scenario())


class Closed:
    """Namespaces where some kinds can't be listed."""

    def __init__(self, loop: Loop) -> None:
        self.places: set[tuple[str, str]] = set()
        self._list = loop.api.list
        loop.api.list = self.list  # type: ignore[method-assign,assignment]

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> tuple[list[dict], str]:
        if (kind.kind, namespace) in self.places:
            raise ApiError(403, "Forbidden", f'User "x" cannot list resource "{kind.plural}" in "{namespace}"')
        return self._list(kind, namespace, selector)


def test_a_namespace_without_the_role_does_not_keep_the_others_from_being_looked_after(
    loop: Loop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dcp_operator.lists.REFUSED_RETRY_S", 0.1)
    caplog.set_level("INFO")
    # What can be seen of it is not judged as long as its children can't be.
    places = {(kind.kind, "gone") for kind in WATCHED_KINDS if kind is not DEPLOYMENT_OF_ENGINES}

    async def scenario() -> None:
        closed = Closed(loop)
        closed.places = set(places)
        loop.api.put(owner())
        loop.api.put(owner("other", "gone"))
        loop.reconciler = loop.again(("gone", "models"))
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        await asyncio.sleep(0.3)
        assert "status" not in loop.api.owner("other")
        closed.places = set()
        await loop.until(lambda: "status" in loop.api.owner("other"))
        await loop.reconciler.stop()

    asyncio.run(scenario())
    refused = [record.getMessage() for record in caplog.records if "namespace=gone" in record.getMessage()]
    assert len(refused) == 2
    assert 'cannot list resource "secrets" in "gone"' in refused[0]
    assert "Role" in refused[0]
    assert "looked after" in refused[1]


def test_a_role_that_goes_while_the_operator_runs_leaves_the_lists_of_the_others_alone(loop: Loop):
    async def scenario() -> None:
        closed = Closed(loop)
        loop.api.put(owner())
        loop.reconciler = loop.again(("gone", "models"))
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        closed.places = {(SERVICE.kind, "gone")}
        loop.api.remove(SERVICE.kind, "models", "chat")
        await loop.reconciler.lists.refresh(SERVICE)
        await loop.until(lambda: (SERVICE.kind, "chat") in loop.api.children())
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_pauses_grow_and_have_an_end():
    pauses = [backoff(failures) for failures in range(1, 12)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == backoff(10**6) == BACKOFF_MAX_S


@pytest.mark.parametrize("turns", range(4))
def test_care_ends_when_it_is_told_to_even_if_the_object_was_woken_that_moment(loop: Loop, turns: int):
    async def scenario() -> None:
        loop.api.put(owner())
        real, made = loop.reconciler.reconcile, []

        async def with_a_due_time(key: Key) -> bool:
            done = await real(key)
            loop.reconciler._look_again_in(key, 60.0)
            made.append(key)
            return done

        loop.reconciler.reconcile = with_a_due_time  # type: ignore[method-assign]
        await loop.reconciler.start()
        await loop.until(lambda: made and not loop.reconciler._due_s)
        # It waits until it is due, or is woken.
        (care,) = loop.reconciler._tasks.values()
        loop.reconciler.wake_all()
        for _ in range(turns):
            await asyncio.sleep(0)
        care.cancel()
        async with asyncio.timeout(10):
            await asyncio.wait([care])
        assert care.done()
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_a_pass_that_does_not_end_is_reported_by_the_liveness_probe(loop: Loop, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        loop.api.put(owner())
        hanging = asyncio.Event()

        async def hangs(key: Key) -> bool:
            await hanging.wait()
            return True

        loop.reconciler.reconcile = hangs  # type: ignore[method-assign]
        await loop.reconciler.start()
        await asyncio.sleep(0.05)
        assert loop.reconciler.problems() == []
        monkeypatch.setattr("dcp_operator.calls.STUCK_S", 0.01)
        assert loop.reconciler.problems() == ["reconciling does not end for: models/chat"]
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_a_dead_watch_of_an_optional_kind_fails_the_probe(loop: Loop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dcp_operator.optional_kinds.OptionalKind.problems", lambda _: ["the watch has died"])
    assert loop.reconciler.problems() == ["the watch has died"]


def test_a_model_that_the_catalogue_learns_of_makes_the_condition_certain(loop: Loop):
    def compatible() -> str:
        conditions = loop.api.owner().get("status", {}).get("conditions", [])
        return next((entry["status"] for entry in conditions if entry["type"] == "ConfigCompatible"), "")

    async def scenario() -> None:
        loop.api.put(owner(model={"uri": "hf://acme/tiny"}))
        await loop.reconciler.start()
        await loop.until(lambda: compatible() == "Unknown")
        learned = {"attention": "gqa", "attentionHeads": 4, "kvHeads": 1, "layers": 4, "headSize": 64}
        models, problems = read_entries({"models": [{"names": ["acme/tiny"], **learned}]})
        assert problems == []
        loop.reconciler.use_catalogue(builtin().with_models(models))
        await loop.until(lambda: compatible() == "True")
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_in_steady_state_many_passes_write_nothing_and_record_no_event(loop: Loop):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        for _ in range(4):
            loop.api.run_deployments()
            for body in list(loop.api.objects.values()):
                if body["kind"] in {kind.kind for kind in WATCHED_KINDS}:
                    loop.tell("MODIFIED", body)
            await asyncio.sleep(0.3)
        await loop.until(lambda: loop.api.owner()["status"]["conditions"][0]["status"] == "True")
        assert [event["reason"] for event in loop.api.events] == ["PodsPending", "Serving"]
        writes = len(loop.api.writes)
        for _ in range(50):
            assert await loop.reconciler.reconcile(CHAT)
        assert len(loop.api.writes) == writes
        assert len(loop.api.events) == 2
        await loop.reconciler.stop()

    asyncio.run(scenario())


def test_a_watch_that_does_not_tell_what_a_list_shows_fails_the_probe_until_it_tells_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        loop.api.put(owner())
        await loop.reconciler.start()
        await loop.until(lambda: "status" in loop.api.owner())
        await loop.reconciler.lists.refresh(SERVICE)
        monkeypatch.setattr("dcp_operator.lists.SILENT_S", -1.0)
        assert loop.reconciler.problems() == [], "what the operator wrote itself is no news"
        service = copy.deepcopy(loop.api.objects[SERVICE.kind, "models", "chat"])
        service["metadata"]["labels"]["theirs"] = "1"
        stored = loop.api.put(service)
        await loop.reconciler.lists.refresh(SERVICE)
        assert loop.reconciler.problems() == ["a list shows news that the watch does not tell, of: services"]
        loop.tell("MODIFIED", stored)
        assert loop.reconciler.problems() == []
        await loop.reconciler.stop()

    asyncio.run(scenario())
