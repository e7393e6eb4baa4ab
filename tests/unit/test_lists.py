"""What the operator knows of the cluster: every kind is listed and followed, and what ends begins anew."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest

from dcp_operator import lists, watches
from dcp_operator.client import ApiError
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.handlers import build_registry
from dcp_operator.health import Health
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES, LEADER_WORKER_SET, OPTIONAL_KINDS, POD, SECRET, SERVICE, Kind
from dcp_operator.names import LABEL_NAME
from dcp_operator.observed import Key
from dcp_operator.reconciler import Reconciler, num_connections
from dcp_operator.target import Operator
from tests.support.objects import owner
from tests.support.simulated_api import SimulatedApi
from tests.support.watch_source import until, watch_threads

FOLLOWED = [kind for kind in WATCHED_KINDS if kind is not DEPLOYMENT_OF_ENGINES]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AGAIN_S", "RETRY_S", "RETRY_MAX_S"):
        monkeypatch.setattr(watches, name, 0.01)
    for name in ("FOLLOW_S", "REFUSED_RETRY_S", "RELIST_S"):
        monkeypatch.setattr(lists, name, 0.05)
    yield
    # Threads of one test are not counted by the next one.
    asyncio.run(until(lambda: not watch_threads()))


class Api(SimulatedApi):
    """A server whose watches tell what the test has them tell, and that refuses what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, queue.Queue[tuple[str, dict[str, Any]] | BaseException]] = {
            kind.kind: queue.Queue() for kind in (*WATCHED_KINDS, *OPTIONAL_KINDS)
        }
        #: The kinds and namespaces that were watched, in order.
        self.watched: list[tuple[str, str | None]] = []
        #: What a list of a kind in a namespace is answered with.
        self.no_list: dict[tuple[str, str | None], ApiError] = {}

    def list(self, kind: Kind, namespace: str | None, label_selector: str = "") -> tuple[list[dict[str, Any]], str]:
        if (kind.kind, namespace) in self.no_list:
            raise self.no_list[kind.kind, namespace]
        return super().list(kind, namespace, label_selector)

    def watch(
        self, kind: Kind, namespace: str | None, label_selector: str, version: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        self.watched.append((kind.kind, namespace))
        while True:
            try:
                news = self.told[kind.kind].get(timeout=0.2)
            except queue.Empty:
                return
            if isinstance(news, BaseException):
                raise news
            yield news


def looked_after_by(api: Api, *namespaces: str) -> Reconciler:
    return Reconciler(
        api,  # type: ignore[arg-type] - the simulated server has the same calls
        Operator("acme/operator:1"),
        namespaces=namespaces,
        now=lambda: "2026-01-01T00:00:00Z",
        fresh_key=lambda: "a2V5",
    )


@asynccontextmanager
async def at_rest(api: Api) -> AsyncIterator[Reconciler]:
    """Look after one object of a server, which has its children and its status already."""
    api.put(owner())
    reconciler = looked_after_by(api)
    await reconciler.start()
    try:
        await until(lambda: "status" in api.owner())
        yield reconciler
    finally:
        await reconciler.stop()


def refused(kind: Kind) -> ApiError:
    return ApiError(403, "Forbidden", f'User "x" cannot list resource "{kind.plural}"')


def test_kopf_watches_the_object_and_nothing_else():
    registry = build_registry(looked_after_by(Api()), Health())
    assert isinstance(registry, kopf.OperatorRegistry)
    watched = {str(handler.selector.any_name) for handler in registry._watching.get_all_handlers()}
    assert watched == {DEPLOYMENT_OF_ENGINES.plural}


def test_every_other_kind_is_followed_once_in_each_namespace_and_has_a_connection():
    async def scenario() -> None:
        api = Api()
        reconciler = looked_after_by(api, "models", "research")
        await reconciler.start()
        assert sorted(watch_threads()) == sorted(f"watch {kind.plural}" for kind in FOLLOWED for _ in range(2))
        # Eight threads for the passes, and an optional kind that comes is followed, too.
        assert num_connections(("models", "research")) == 8 + len(watch_threads()) + 2
        await reconciler.stop()
        await until(lambda: not watch_threads())

    asyncio.run(scenario())


def test_what_a_watch_tells_is_looked_at():
    async def scenario() -> None:
        api = Api()
        async with at_rest(api):
            service = api.objects[SERVICE.kind, "models", "chat"]
            api.remove(SERVICE.kind, "models", "chat")
            api.told[SERVICE.kind].put(("DELETED", service))
            await until(lambda: (SERVICE.kind, "chat") in api.children())

    asyncio.run(scenario())


def test_a_deletion_while_a_watch_was_cut_is_found_by_the_list_that_follows():
    async def scenario() -> None:
        api = Api()
        async with at_rest(api):
            api.remove(SERVICE.kind, "models", "chat")
            api.told[SERVICE.kind].put(ApiError(0, "Unreachable", "the watch of services was cut"))
            await until(lambda: (SERVICE.kind, "chat") in api.children())

    asyncio.run(scenario())


def test_a_start_that_fails_is_tried_again_and_follows_nothing_twice():
    async def scenario() -> None:
        api = Api()
        api.put(owner())
        api.no_list[POD.kind, None] = ApiError(500, "InternalError", "etcd is away")
        reconciler = looked_after_by(api)
        for _ in range(2):
            with pytest.raises(ApiError, match="etcd is away"):
                await reconciler.start()
        assert not reconciler.lists.is_started
        assert api.writes == []
        api.no_list.clear()
        await reconciler.start()
        await until(lambda: "status" in api.owner())
        assert sorted(watch_threads()) == sorted(f"watch {kind.plural}" for kind in FOLLOWED)
        await reconciler.stop()
        await until(lambda: not watch_threads())

    asyncio.run(scenario())


def test_a_kind_that_is_refused_in_the_whole_cluster_is_waited_for_in_words_and_followed_again(
    caplog: pytest.LogCaptureFixture,
):
    async def scenario() -> None:
        api = Api()
        async with at_rest(api) as reconciler:
            api.no_list[SERVICE.kind, None] = refused(SERVICE)
            api.told[SERVICE.kind].put(refused(SERVICE))
            await until(lambda: "watch services" not in watch_threads())
            await until(lambda: "list failed kind=services" in caplog.text)
            # It is asked for again and again, and said once.
            await asyncio.sleep(0.3)
            assert caplog.text.count("list failed kind=services") == 1
            assert reconciler.problems() == []
            api.no_list.clear()
            api.remove(SERVICE.kind, "models", "chat")
            await until(lambda: (SERVICE.kind, "chat") in api.children())
            assert "watch services" in watch_threads()

    asyncio.run(scenario())


def test_a_namespace_that_refuses_later_is_said_once_and_followed_again_when_it_does_not(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO")

    async def scenario() -> None:
        api = Api()
        reconciler = looked_after_by(api, "gone", "models")
        await reconciler.start()
        api.no_list = {(kind.kind, "gone"): refused(kind) for kind in (SECRET, SERVICE)}
        for kind in (SECRET, SERVICE):
            # Whichever of the two namespaces' watches takes it: one of them is refused, the other begins anew.
            for _ in range(20):
                api.told[kind.kind].put(refused(kind))
        await until(lambda: all(watch_threads().count(f"watch {kind.plural}") == 1 for kind in (SECRET, SERVICE)))
        await until(lambda: "namespace is not looked after namespace=gone" in caplog.text)
        api.no_list.clear()
        await until(lambda: all(watch_threads().count(f"watch {kind.plural}") == 2 for kind in (SECRET, SERVICE)))
        await until(lambda: "namespace is looked after from now on namespace=gone" in caplog.text)
        await reconciler.stop()

    asyncio.run(scenario())
    assert caplog.text.count("namespace is not looked after") == 1


def test_a_list_that_is_refused_while_the_watch_goes_on_leaves_that_watch_alone(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")

    async def scenario() -> None:
        api = Api()
        reconciler = looked_after_by(api, "gone", "models")
        await reconciler.start()
        before = {thread.ident for thread in threading.enumerate() if thread.name.startswith("watch ")}
        api.no_list = {(SERVICE.kind, "gone"): refused(SERVICE)}
        await reconciler.lists.refresh(SERVICE)
        assert "namespace is not looked after namespace=gone" in caplog.text
        api.no_list.clear()
        await until(lambda: "namespace is looked after from now on namespace=gone" in caplog.text)
        assert {thread.ident for thread in threading.enumerate() if thread.name.startswith("watch ")} == before
        await reconciler.stop()

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_whose_thread_has_died_fails_the_probe_and_is_begun_anew(monkeypatch: pytest.MonkeyPatch):
    class Fatal(BaseException):
        pass

    monkeypatch.setattr(lists, "FOLLOW_S", 0.5)

    async def scenario() -> None:
        api = Api()
        reconciler = looked_after_by(api)
        await reconciler.start()
        api.told[POD.kind].put(Fatal())
        await until(reconciler.problems)
        assert reconciler.problems() == ["the watch of pods in all namespaces has died"]
        await until(lambda: "watch pods" in watch_threads())
        assert reconciler.problems() == []
        await reconciler.stop()

    asyncio.run(scenario())


def test_a_watch_that_begins_anew_owes_nothing_any_more(monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        api = Api()
        async with at_rest(api) as reconciler:
            service = api.objects[SERVICE.kind, "models", "chat"]
            api.put(
                {**service, "metadata": {**service["metadata"], "labels": {**service["metadata"]["labels"], "a": "b"}}}
            )
            await reconciler.lists.refresh(SERVICE)
            monkeypatch.setattr(lists, "SILENT_S", -1.0)
            assert reconciler.problems() == ["a list shows news that the watch does not tell, of: services"]
            api.told[SERVICE.kind].put(ApiError(0, "Unreachable", "no answer in time"))
            await until(lambda: not reconciler.problems())

    asyncio.run(scenario())


def test_what_no_watch_tells_is_found_by_the_comparison_with_lists(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lists, "RESYNC_S", 0.1)

    async def scenario() -> None:
        api = Api()
        api.served.add(LEADER_WORKER_SET.kind)
        async with at_rest(api) as reconciler:
            api.remove(SERVICE.kind, "models", "chat")
            await until(lambda: (SERVICE.kind, "chat") in api.children())
            labels = {LABEL_NAME: "chat"}
            metadata = {"name": "chat-group", "namespace": "models", "labels": labels}
            api.put({"kind": LEADER_WORKER_SET.kind, "metadata": metadata, "spec": {}})
            await until(
                lambda: "chat-group" in {ref.name for ref in reconciler._cache.snapshot(Key("models", "chat")).children}
            )

    asyncio.run(scenario())
