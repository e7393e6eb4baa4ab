"""Details of engine pods: RDMA devices, shared memory, topology, claims, and what else comes through a template."""

import copy

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context, TemplateError, render_context, revision_of
from dcp_operator.build.engine_pod import engine_pod_template
from dcp_operator.settings import Role
from tests.support.objects import spec

GPU = {"accelerator": {"resourceName": "nvidia.com/gpu"}}
RDMA = {"kvConnector": {"protocol": "rdma", "rdma": {"resourceName": "rdma/ib", "count": 2}}}
RACK = "example.com/rack"


def context(**changes) -> Context:
    return Context("chat", "models", Spec.model_validate(spec(**changes)), "acme/operator:1")


def decode(**fields) -> dict:
    return {"decode": {"parallelism": {"tensor": 2, "decodeContext": 2}, "blockSize": 32, **fields}}


def pod(role: Role = Role.DECODE, **changes) -> dict:
    return engine_pod_template(context(**changes), role, "abcd0123")["spec"]


def main(found: dict) -> dict:
    return found["containers"][0]


@pytest.mark.parametrize("role", list(Role))
def test_rdma_devices_are_extended_resources_beside_the_accelerators_and_the_pod_has_no_privileges(role: Role):
    found = pod(role, **RDMA, **GPU)
    ranks = "1" if role is Role.PREFILL else "2"
    devices = {"nvidia.com/gpu": ranks, "rdma/ib": "2"}
    assert main(found)["resources"] == {"limits": devices, "requests": devices}
    security = main(found)["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert security["allowPrivilegeEscalation"] is False
    assert "privileged" not in security
    assert not {"hostNetwork", "hostIPC", "hostPID"} & found.keys()
    assert not [volume for volume in found["volumes"] if "hostPath" in volume]


def test_engines_without_accelerators_get_rdma_devices_all_the_same():
    assert main(pod(**RDMA))["resources"]["limits"] == {"rdma/ib": "2"}


def test_memory_and_cpu_of_a_template_stand_beside_the_devices():
    resources = {"limits": {"memory": "8Gi"}, "requests": {"cpu": "2"}}
    template = {"spec": {"containers": [{"name": "main", "resources": resources}]}}
    found = main(pod(**RDMA, **decode(template=template)))["resources"]
    assert found == {"limits": {"memory": "8Gi", "rdma/ib": "2"}, "requests": {"cpu": "2", "rdma/ib": "2"}}


@pytest.mark.parametrize(
    ("size", "source"), [(None, {"medium": "Memory"}), ("16Gi", {"medium": "Memory", "sizeLimit": "16Gi"})]
)
def test_shared_memory_is_of_the_stated_size_or_of_the_nodes(size: str | None, source: dict):
    found = pod(**decode(sharedMemorySize=size))
    (volume,) = [each for each in found["volumes"] if each["name"] == "dshm"]
    assert volume["emptyDir"] == source
    assert {"name": "dshm", "mountPath": "/dev/shm"} in main(found)["volumeMounts"]


@pytest.mark.parametrize("size", ["0", "0Gi", "0.0"])
def test_shared_memory_of_nothing_is_left_to_the_runtime(size: str):
    found = pod(**decode(sharedMemorySize=size))
    assert "dshm" not in {each["name"] for each in found["volumes"]}
    assert "/dev/shm" not in {each["mountPath"] for each in main(found)["volumeMounts"]}


def near(enforcement: str) -> dict:
    return {"topologyConstraint": {"topologyKey": RACK, "enforcement": enforcement}}


TERM = {
    "labelSelector": {
        "matchLabels": {names.LABEL_NAME: "chat", names.LABEL_REVISION: "abcd0123"},
        "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "In", "values": ["prefill", "decode"]}],
    },
    "topologyKey": RACK,
}


@pytest.mark.parametrize("role", list(Role))
def test_a_required_domain_holds_the_engines_of_one_revision(role: Role):
    assert pod(role, **near("Required"))["affinity"] == {
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}
    }


def test_a_preferred_domain_is_a_preference():
    assert pod(**near("Preferred"))["affinity"] == {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": TERM}]}
    }


def test_an_engine_matches_the_term_of_its_own_pod_and_a_router_does_not():
    """The scheduler takes a pod that matches its own term as the first of its domain."""
    manifests = render_context(context(**near("Required")))
    for manifest in manifests:
        if manifest["kind"] != "Deployment":
            continue
        template = manifest["spec"]["template"]
        labels = template["metadata"]["labels"]
        if labels[names.LABEL_ROLE] == names.ROUTER:
            assert "affinity" not in template["spec"]
            continue
        (term,) = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()
        (roles,) = term["labelSelector"]["matchExpressions"]
        assert labels[names.LABEL_ROLE] in roles["values"]
        assert names.ROUTER not in roles["values"]


def test_the_users_affinity_is_joined_and_not_replaced():
    theirs = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}],
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}],
        },
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "host"}]},
    }
    template = {"spec": {"affinity": copy.deepcopy(theirs)}}
    found = pod(**near("Required"), **decode(template=template))["affinity"]
    assert found["nodeAffinity"] == theirs["nodeAffinity"]
    assert found["podAntiAffinity"] == theirs["podAntiAffinity"]
    assert found["podAffinity"] == {
        "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}, TERM],
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}],
    }
    assert template["spec"]["affinity"] == theirs


def test_an_affinity_that_can_not_be_joined_is_refused_with_its_path():
    template = {"spec": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": "x"}}}}
    where = r"^spec\.decode\.template\.spec\.affinity\.podAffinity\.requiredDuringSchedulingIgnoredDuringExecution: "
    with pytest.raises(TemplateError, match=where):
        pod(**near("Required"), **decode(template=template))


def test_claims_priority_and_tolerations_come_through_the_template():
    claims = [{"name": "nic", "resourceClaimTemplateName": "rdma-nic"}]
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    fields = {
        "resourceClaims": claims,
        "tolerations": tolerations,
        "priorityClassName": "serving",
        "schedulerName": "mine",
        "nodeSelector": {"pool": "gpu"},
        "runtimeClassName": "nvidia",
        "containers": [{"name": "main", "resources": {"claims": [{"name": "nic", "request": "first"}]}}],
    }
    found = pod(**GPU, **decode(template={"spec": fields}))
    for field in ("resourceClaims", "tolerations", "priorityClassName", "schedulerName", "nodeSelector"):
        assert found[field] == fields[field]
    assert found["runtimeClassName"] == "nvidia"
    gpus = {"nvidia.com/gpu": "2"}
    assert main(found)["resources"] == {
        "limits": gpus,
        "requests": gpus,
        "claims": [{"name": "nic", "request": "first"}],
    }


def test_each_pod_of_a_multi_node_engine_asks_for_its_part_of_the_accelerators():
    found = pod(**GPU, **decode(parallelism={"tensor": 8, "decodeContext": 8}, multinode={"nodeCount": 2}))
    assert main(found)["resources"]["limits"] == {"nvidia.com/gpu": "4"}


@pytest.mark.parametrize(
    "changes",
    [
        near("Required"),
        decode(sharedMemorySize="1Gi"),
        {"kvConnector": {"protocol": "tcp", "rdma": {"resourceName": "rdma/ib"}}},
        decode(template={"spec": {"priorityClassName": "serving"}}),
    ],
)
def test_what_the_two_roles_need_not_agree_on_makes_no_new_pair(changes: dict):
    assert revision_of(context(**{**decode(), **changes})) == revision_of(context(**decode()))
