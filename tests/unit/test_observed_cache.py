"""The cache of watched objects: what it believes after events that are late, missing or not about us."""

import base64
import copy

import pytest

from dcp_operator import names
from dcp_operator.api.base import KIND
from dcp_operator.gather import Cache
from dcp_operator.kinds import DEPLOYMENT, DEPLOYMENT_OF_ENGINES, POD, SECRET, SERVICE, Ref
from dcp_operator.observed import Key, essence, stored_key
from tests.support.objects import owner, pod

CHAT = Key("models", "chat")


def service(version: str = "5", uid: str = "service-uid", name: str = "chat", **spec) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "models",
            "uid": uid,
            "resourceVersion": version,
            "labels": {names.LABEL_NAME: "chat"},
            "ownerReferences": [{"kind": KIND, "name": "chat", "uid": "owner-uid", "controller": True}],
        },
        "spec": spec,
    }


def secret(value: str | None = "QQ==", uid: str = "secret-uid") -> dict:
    body = service(uid=uid, name="chat-kv")
    return {**body, "kind": "Secret", "data": {} if value is None else {"key": value}}


@pytest.fixture
def cache() -> Cache:
    cache = Cache()
    cache.store(owner())
    return cache


def test_without_the_object_there_is_no_snapshot():
    cache = Cache()
    assert cache.store(service()) == {CHAT}
    assert cache.snapshot(CHAT) is None
    assert cache.keys() == []


def test_a_snapshot_holds_the_object_its_children_and_its_pods(cache: Cache):
    cache.store(service())
    cache.store(pod("prefill", "r1"))
    observed = cache.snapshot(CHAT)
    assert observed is not None
    assert set(observed.children) == {Ref("Service", "chat")}
    assert len(observed.pods) == 1
    assert observed.generation == 1


def test_a_late_event_does_not_undo_a_newer_one(cache: Cache):
    cache.store(service("7", a=7))
    assert cache.store(service("6", a=6)) == set()
    assert cache.snapshot(CHAT).children[Ref("Service", "chat")].body["spec"] == {"a": 7}


def test_what_is_known_already_wakes_nobody(cache: Cache):
    body = {**owner(), "status": {"some": "thing"}, "metadata": {**owner()["metadata"], "resourceVersion": "7"}}
    assert cache.store(copy.deepcopy(body)) == {CHAT}
    assert cache.store(copy.deepcopy(body)) == set()
    # The same version with more in it: the answer to a scale is not the whole object.
    assert cache.store({**body, "status": {"other": "thing"}}) == {CHAT}


def test_resource_versions_are_compared_as_numbers(cache: Cache):
    cache.store(service("9", a=9))
    cache.store(service("10", a=10))
    assert cache.snapshot(CHAT).children[Ref("Service", "chat")].body["spec"] == {"a": 10}


def test_the_deletion_of_a_predecessor_does_not_remove_its_successor(cache: Cache):
    cache.store(service("9", uid="second"))
    assert cache.drop(service("8", uid="first")) == set()
    assert Ref("Service", "chat") in cache.snapshot(CHAT).children


def test_a_deletion_wakes_the_owner(cache: Cache):
    cache.store(service())
    assert cache.drop(service("6")) == {CHAT}
    assert cache.snapshot(CHAT).children == {}


def test_what_bears_no_name_of_ours_is_not_kept(cache: Cache):
    body = service()
    body["metadata"] |= {"labels": {"app": "theirs"}, "ownerReferences": []}
    assert cache.store(body) == set()
    assert cache.snapshot(CHAT).children == {}


def test_a_list_removes_what_was_deleted_while_no_watch_ran(cache: Cache):
    cache.store(service("5"))
    cache.store(secret())
    assert cache.correct(SERVICE, [], "6", None) == {CHAT}
    assert set(cache.snapshot(CHAT).children) == {Ref("Secret", "chat-kv")}


def test_a_list_leaves_what_is_newer_than_it(cache: Cache):
    cache.store(service("9"))
    assert cache.correct(SERVICE, [], "6", None) == set()
    assert Ref("Service", "chat") in cache.snapshot(CHAT).children


def test_the_list_of_one_namespace_says_nothing_about_another(cache: Cache):
    cache.store(service("5"))
    assert cache.correct(SERVICE, [], "6", "elsewhere") == set()
    assert Ref("Service", "chat") in cache.snapshot(CHAT).children


def test_a_list_of_objects_ends_the_care_for_those_that_are_gone(cache: Cache):
    assert cache.correct(DEPLOYMENT_OF_ENGINES, [], "6", None) == {CHAT}
    assert cache.snapshot(CHAT) is None


def test_the_key_of_a_deleted_secret_is_remembered(cache: Cache):
    cache.store(secret("QQ=="))
    cache.drop(secret("QQ=="))
    assert cache.snapshot(CHAT).kv_key() == "QQ=="


def test_a_key_that_the_user_changed_is_the_one_that_counts(cache: Cache):
    cache.store(secret("QQ=="))
    changed = secret("Qg==")
    changed["metadata"]["resourceVersion"] = "6"
    cache.store(changed)
    assert cache.snapshot(CHAT).kv_key() == "Qg=="


def test_an_object_made_anew_does_not_inherit_the_key_of_its_predecessor(cache: Cache):
    cache.store(secret("QQ=="))
    cache.drop(owner())
    successor = owner()
    successor["metadata"] |= {"uid": "second-uid", "resourceVersion": "9"}
    cache.store(successor)
    assert cache.snapshot(CHAT).kv_key() is None


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"key": "QQ=="}, "QQ=="),
        ({}, None),
        (None, None),
        ({"key": ""}, None),
        ({"key": base64.b64encode(b" \n").decode()}, None),
        ({"key": "not base64"}, None),
        ({"other": "QQ=="}, None),
    ],
)
def test_a_blank_key_is_no_key(data: dict | None, expected: str | None):
    assert stored_key({"data": data}) == expected


def test_a_pod_is_kept_without_its_spec():
    cache = Cache()
    cache.store(owner())
    cache.store({**pod("prefill", "r1"), "spec": {"containers": ["much"]}})
    assert "spec" not in cache.snapshot(CHAT).pods[0]


def test_the_essence_of_a_deployment_leaves_out_what_kubernetes_counts():
    body = {
        "kind": DEPLOYMENT.kind,
        "metadata": {"name": "a", "resourceVersion": "1", "generation": 1, "annotations": {}},
        "spec": {"replicas": 1},
        "status": {"replicas": 0},
    }
    later = {
        **body,
        "metadata": {
            **body["metadata"],
            "resourceVersion": "2",
            "generation": 2,
            "annotations": {"deployment.kubernetes.io/revision": "2"},
        },
        "status": {"replicas": 1},
    }
    assert essence(body) == essence(later)
    assert essence(body) != essence({**later, "spec": {"replicas": 2}})


def test_kinds_have_the_paths_of_the_api():
    assert SECRET.path("ns", "a") == "/api/v1/namespaces/ns/secrets/a"
    assert POD.path() == "/api/v1/pods"
    assert DEPLOYMENT.path("ns") == "/apis/apps/v1/namespaces/ns/deployments"
    assert (
        DEPLOYMENT_OF_ENGINES.path("ns", "a", "status")
        == "/apis/dcpdisagg.io/v1alpha1/namespaces/ns/dcpdisaggdeployments/a/status"
    )


def test_a_child_whose_label_was_changed_still_belongs_to_its_owner(cache: Cache):
    cache.store(service())
    changed = service("6")
    changed["metadata"]["labels"] = {names.LABEL_NAME: "other"}
    assert cache.store(changed) == {CHAT}
    assert cache.snapshot(CHAT).children[Ref("Service", "chat")].labels == {names.LABEL_NAME: "other"}


def test_a_pod_whose_label_was_changed_leaves_its_object_and_both_are_woken(cache: Cache):
    cache.store(pod("prefill", "r1"))
    changed = pod("prefill", "r1", owner_name="other", name="chat-prefill-r1-abcde", uid="pod-prefill")
    changed["metadata"]["resourceVersion"] = "6"
    assert cache.store(changed) == {CHAT, Key("models", "other")}
    assert cache.snapshot(CHAT).pods == ()


def test_a_successor_takes_the_place_of_what_had_its_name(cache: Cache):
    cache.store(service("5", uid="first"))
    cache.store(service("9", uid="second"))
    assert cache.snapshot(CHAT).children[Ref("Service", "chat")].uid == "second"
    assert cache.drop(service("6", uid="first")) == set()


def test_a_stale_list_does_not_bring_back_what_was_deleted_meanwhile(cache: Cache):
    cache.store(service("5"))
    cache.drop(service("7"))
    assert cache.correct(SERVICE, [service("5")], "6", None) == set()
    assert cache.snapshot(CHAT).children == {}


def test_a_late_answer_to_a_write_does_not_bring_back_what_is_gone_and_its_object_is_looked_at(cache: Cache):
    # The event of its making was merged into that of its end: the cache has never seen it.
    assert cache.drop(service("7")) == {CHAT}
    assert cache.store(service("6")) == set()
    assert cache.snapshot(CHAT).children == {}


def test_what_a_list_lacks_stays_gone_for_whatever_is_older_than_the_list(cache: Cache):
    cache.store(service("5"))
    cache.correct(SERVICE, [], "9", None)
    assert cache.store(service("8")) == set()
    assert cache.snapshot(CHAT).children == {}


def test_a_pod_that_lost_its_label_and_has_it_again_is_back(cache: Cache):
    cache.store(pod("prefill", "r1"))
    cache.drop({**pod("prefill", "r1"), "metadata": {**pod("prefill", "r1")["metadata"], "resourceVersion": "7"}})
    again = pod("prefill", "r1")
    again["metadata"]["resourceVersion"] = "8"
    assert cache.store(again) == {CHAT}
    assert len(cache.snapshot(CHAT).pods) == 1


def test_a_label_that_was_taken_away_is_not_given_back_by_a_late_event(cache: Cache):
    cache.store(pod("prefill", "r1"))
    without = pod("prefill", "r1")
    without["metadata"] |= {"labels": {}, "resourceVersion": "7"}
    assert cache.store(without) == {CHAT}
    late = pod("prefill", "r1")
    late["metadata"]["resourceVersion"] = "6"
    assert cache.store(late) == set()
    assert cache.snapshot(CHAT).pods == ()


def test_a_late_event_of_a_predecessor_does_not_take_the_place_of_its_successor(cache: Cache):
    cache.store(service("5", uid="first"))
    cache.store(service("9", uid="second"))
    assert cache.store(service("6", uid="first")) == set()
    assert cache.snapshot(CHAT).children[Ref("Service", "chat")].uid == "second"


def test_the_memory_of_what_is_gone_has_an_end(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dcp_operator.gather._GONE_KEPT", 3)
    for number in range(10):
        cache.drop(service("7", uid=f"uid-{number}", name=f"service-{number}"))
    assert list(cache._gone) == ["uid-7", "uid-8", "uid-9"]
