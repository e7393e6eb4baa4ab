"""A model on a claim: what engines are told of it, and the Job that pulls one into it."""

import copy

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Model, Spec
from dcp_operator.build import Context, model_job, render_context
from dcp_operator.build.model_job import build_model_job, program
from dcp_operator.build.model_source import cache_folder
from dcp_operator.settings import Role
from tests.support.objects import spec

CACHED = {"uri": "hf://acme/tiny", "revision": "v1", "cache": {"claimName": "models"}}
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def context(model: dict | None = None, **changes) -> Context:
    body = spec(**changes)
    body["model"] = {**body["model"], **(CACHED if model is None else model)}
    return Context("chat", "models", Spec.model_validate(body), "acme/operator:1", uid="the-uid")


def job(**changes) -> dict:
    found = build_model_job(context(**changes))
    assert found is not None
    return found


def pod(found: dict) -> dict:
    return found["spec"]["template"]["spec"]


def main(found: dict) -> dict:
    return pod(found)["containers"][0]


def prefill(**template) -> dict:
    return {"parallelism": {"tensor": 1}, "blockSize": 32, "template": {"spec": template}}


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ({"uri": "hf://acme/tiny"}, "acme--tiny"),
        ({"uri": "hf://acme/tiny", "revision": "refs/pr/1"}, "acme--tiny--refs--pr--1"),
        ({"uri": "hf://gpt2"}, "gpt2"),
        ({"uri": "hf://acme/tiny", "cache": {"claimName": "models", "path": "llms/tiny.v1"}}, "llms/tiny.v1"),
    ],
)
def test_a_model_has_a_folder_of_its_own_or_the_stated_one(model: dict, folder: str):
    assert cache_folder(Model.model_validate({"cache": {"claimName": "models"}, **model})) == folder


def test_engines_of_both_roles_read_the_claim_and_ask_no_hub():
    manifests = render_context(context({**CACHED, "authSecretName": "hf-token"}))
    engines = [
        each
        for each in manifests
        if each["kind"] == "Deployment" and each["metadata"]["labels"][names.LABEL_ROLE] in set(Role)
    ]
    assert len(engines) == 2
    for engine in engines:
        container = engine["spec"]["template"]["spec"]["containers"][0]
        assert "--model=/models/acme--tiny--v1" in container["args"]
        assert not [arg for arg in container["args"] if arg.startswith("--revision")]
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
        assert "HF_TOKEN" not in {each["name"] for each in container["env"]}
        (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/models"]
        assert mount["readOnly"] is True
        (volume,) = [each for each in engine["spec"]["template"]["spec"]["volumes"] if each["name"] == mount["name"]]
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_the_job_comes_before_the_engines_and_goes_with_its_owner():
    manifests = render_context(context())
    kinds = [each["kind"] for each in manifests]
    assert kinds.index("Job") < kinds.index("Deployment")
    (found,) = [each for each in manifests if each["kind"] == "Job"]
    assert found["metadata"]["ownerReferences"][0]["uid"] == "the-uid"
    assert found["metadata"]["labels"][names.LABEL_NAME] == "chat"
    assert found["spec"]["template"]["metadata"]["labels"][names.LABEL_NAME] == "chat"
    assert found["spec"]["template"]["metadata"]["labels"][names.LABEL_ROLE] == "model"


@pytest.mark.parametrize("model", [{"uri": "hf://acme/tiny", "cache": None}, {"uri": "pvc://models/tiny"}])
def test_without_a_cache_there_is_no_job(model: dict):
    assert "Job" not in {each["kind"] for each in render_context(context(model))}


def test_the_job_writes_to_the_claim_what_the_engines_read():
    found = job(model={**CACHED, "authSecretName": "hf-token"})
    container = main(found)
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["DCP_MODEL_REPOSITORY"] == "acme/tiny"
    assert env["DCP_MODEL_REVISION"] == "v1"
    assert env["DCP_MODEL_FOLDER"] == "/models/acme--tiny--v1"
    (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hf-token", "key": "token"}}
    assert container["volumeMounts"] == [{"name": "model", "mountPath": "/models"}]
    assert pod(found)["volumes"] == [{"name": "model", "persistentVolumeClaim": {"claimName": "models"}}]
    assert container["image"] == "acme/engine:1"
    assert container["command"] == ["python3", "-c", program()]
    assert pod(found)["restartPolicy"] == "Never"
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_the_job_asks_the_hub_whatever_engines_are_told_and_kubernetes_expands_nothing_in_its_program():
    offline = prefill(containers=[{"name": "main", "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}]}])
    assert {"name": "HF_HUB_OFFLINE", "value": "0"} in main(job(prefill=offline))["env"]
    assert "$(" not in program()


def test_a_branch_that_is_not_stated_is_not_passed_on():
    assert "DCP_MODEL_REVISION" not in {each["name"] for each in main(job(model={**CACHED, "revision": None}))["env"]}


def test_the_job_has_of_prefills_pod_what_decides_where_it_runs_and_how_it_reaches_the_hub():
    container = {
        "name": "main",
        "command": ["/opt/engine/bin/python3.12", "-m", "mine"],
        "env": [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}, {"name": "DCP_MODEL_JOB", "value": "x"}],
        "envFrom": [{"configMapRef": {"name": "proxy"}}],
        "securityContext": {"runAsUser": 1000},
        "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        "resources": {"limits": {"memory": "1500Gi", "rdma/ib": 1}, "claims": [{"name": "gpu"}]},
        "readinessProbe": {"periodSeconds": 1},
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
    }
    template = prefill(
        containers=[{"name": "side", "image": "s"}, container],
        initContainers=[{"name": "first", "image": "s"}],
        nodeSelector={"pool": "gpu"},
        tolerations=[TOLERATION],
        imagePullSecrets=[{"name": "registry"}],
        securityContext={"fsGroup": 1000},
        runtimeClassName="nvidia",
        priorityClassName="serving",
        serviceAccountName="reader",
        resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
        terminationGracePeriodSeconds=900,
        hostNetwork=True,
        affinity={"podAffinity": {}},
        volumes=[{"name": "ca", "configMap": {"name": "ca"}}],
    )
    found = job(prefill=template)
    kept = pod(found)
    assert [each["name"] for each in kept["containers"]] == ["main"]
    for field in ("nodeSelector", "tolerations", "imagePullSecrets", "securityContext", "runtimeClassName"):
        assert kept[field] == template["template"]["spec"][field]
    assert (kept["priorityClassName"], kept["serviceAccountName"]) == ("serving", "reader")
    for field in (
        "initContainers",
        "resourceClaims",
        "terminationGracePeriodSeconds",
        "hostNetwork",
        "affinity",
    ):
        assert field not in kept
    assert [each["name"] for each in kept["volumes"]] == ["ca", "model"]
    own = main(found)
    assert own["command"][0] == "/opt/engine/bin/python3.12"
    assert own["resources"] == {"requests": {"cpu": "100m", "memory": "256Mi"}}
    assert own["securityContext"]["runAsUser"] == 1000
    assert own["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    env = {each["name"]: each.get("value") for each in own["env"]}
    assert env["HF_ENDPOINT"] == "https://hub.example.com"
    assert env["DCP_MODEL_JOB"] == "chat"
    assert own["envFrom"] == container["envFrom"]
    assert [each["mountPath"] for each in own["volumeMounts"]] == ["/etc/ca", "/models"]
    assert not {"readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "ports"} & own.keys()


def test_a_command_that_is_no_python_does_not_become_the_jobs():
    template = prefill(containers=[{"name": "main", "command": ["vllm", "serve"]}])
    assert main(job(prefill=template))["command"][0] == "python3"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {**CACHED, "revision": "v2"}},
        {"model": {**CACHED, "uri": "hf://acme/other"}},
        {"model": {**CACHED, "cache": {"claimName": "others"}}},
        {"model": {**CACHED, "authSecretName": "hf-token"}},
        {"image": "acme/engine:2"},
        {"prefill": prefill(nodeSelector={"pool": "gpu"})},
        {"prefill": prefill(containers=[{"name": "main", "command": ["/opt/engine/bin/python3"]}])},
    ],
)
def test_another_job_has_another_name_because_none_can_be_changed(changes: dict):
    first, second = job(), job(**changes)
    assert first["metadata"]["name"] != second["metadata"]["name"]
    assert first["metadata"]["name"].startswith("chat-model-")


def test_another_text_of_the_program_leaves_a_pull_that_is_under_way_alone(monkeypatch: pytest.MonkeyPatch):
    before = job()
    monkeypatch.setattr(model_job, "program", lambda: "print('of the next release')")
    after = job()
    assert main(after)["command"] == ["python3", "-c", "print('of the next release')"]
    assert after["metadata"] == before["metadata"]


@pytest.mark.parametrize("changes", [{"router": {"replicas": 3}}, {"prefill": {**prefill(), "replicas": 3}}])
def test_what_the_job_does_not_depend_on_leaves_it_alone(changes: dict):
    assert job(**{"prefill": prefill(), **copy.deepcopy(changes)}) == job(prefill=prefill())
