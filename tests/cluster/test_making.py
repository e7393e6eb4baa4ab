"""How children come into being on the real API server: in one call, and never over what has their name already."""

from collections.abc import Iterator
from typing import Any

import pytest

from dcp_operator import names
from dcp_operator.client import Api, ApiError
from dcp_operator.kinds import (
    CHILD_KINDS,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    GIVEN_ONCE,
    JOB,
    NETWORK_POLICY,
    ROLE,
    ROLE_BINDING,
    SCALER,
    SECRET,
    SERVICE,
    Kind,
)
from dcp_operator.observed import essence
from tests.support.cluster import Cluster

Body = dict[str, Any]

_LABELS = {"app": "made"}
_POD = {"metadata": {"labels": _LABELS}, "spec": {"containers": [{"name": "main", "image": "acme.invalid/engine:1"}]}}
#: What beside its name an object of a kind needs.
_REST: dict[Kind, Body] = {
    SECRET: {"data": {"key": "c2VjcmV0"}},
    ROLE: {"rules": []},
    ROLE_BINDING: {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "made"}},
    NETWORK_POLICY: {"spec": {"podSelector": {"matchLabels": _LABELS}}},
    DISRUPTION_BUDGET: {"spec": {"minAvailable": 1, "selector": {"matchLabels": _LABELS}}},
    JOB: {"spec": {"suspend": True, "template": {**_POD, "spec": {**_POD["spec"], "restartPolicy": "Never"}}}},
    DEPLOYMENT: {"spec": {"replicas": 0, "selector": {"matchLabels": _LABELS}, "template": _POD}},
    SERVICE: {"spec": {"ports": [{"port": 80}], "selector": _LABELS}},
    SCALER: {"spec": {"replicas": 1}},
    CONTROLLER_REVISION: {"revision": 1, "data": {"spec": {}}},
}


def manifest(kind: Kind, owner: str) -> Body:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": "made", "labels": {"owner": owner}},
        **_REST.get(kind, {}),
    }


@pytest.fixture(scope="module")
def api(real: Cluster) -> Iterator[Api]:
    with pytest.MonkeyPatch.context() as patch:
        # The client library reads KUBECONFIG once, when it is imported.
        patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(real.kubeconfig))
        client = Api()
    yield client
    client.close()


@pytest.mark.parametrize("kind", CHILD_KINDS, ids=lambda kind: kind.plural)
def test_a_child_is_made_where_its_name_is_free_and_nothing_is_written_where_it_is_not(
    api: Api, namespace: str, kind: Kind
):
    is_given_once = kind.kind in GIVEN_ONCE
    make = api.create if is_given_once else api.make
    made = make(kind, namespace, manifest(kind, "ours"))
    managers = {(each["manager"], each["operation"]) for each in made["metadata"]["managedFields"]}
    # What is applied later takes out what it says no longer: the fields have to be ours as applied ones.
    assert ((names.FIELD_MANAGER, "Apply") in managers) is not is_given_once
    with pytest.raises(ApiError) as refused:
        make(kind, namespace, manifest(kind, "another"))
    assert refused.value.status == 409
    found = api.get(kind, namespace, "made")
    assert found is not None
    assert (found["metadata"]["uid"], essence(found)) == (made["metadata"]["uid"], essence(made))


def test_what_was_made_and_is_not_applied_any_more_goes(api: Api, namespace: str):
    first = manifest(SECRET, "ours")
    first["metadata"]["name"] = "shrinks"
    first["metadata"]["annotations"] = {"feature": "on"}
    api.make(SECRET, namespace, first)
    del first["metadata"]["annotations"]
    assert "annotations" not in api.apply(SECRET, namespace, first)["metadata"]
