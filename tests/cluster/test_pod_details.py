"""Details of pods on the real node: engines on its network side by side, and a model pulled once into a claim."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.operator_process import (
    apply_as_user,
    conditions,
    controller,
    stand_in,
    wait_for,
)
from tests.support.stand_in_hub import COUNT, FAIL, MODULE
from tests.support.stand_ins import first_answer

READY_S = 90.0
HUB = "/stand-in-hub"


@pytest.fixture(scope="module")
def namespace(real: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real.namespace("pods") as name, controller(real, tmp_path_factory.mktemp("controller"), name):
        yield name


def condition(real: Cluster, namespace: str, name: str, kind: str = "Ready") -> dict[str, str]:
    nothing = {"status": "", "reason": "", "message": ""}
    return conditions(real.get("dcpd", name, "-n", namespace)).get(kind, nothing)


def wait_until_ready(real: Cluster, namespace: str, name: str) -> None:
    def is_ready() -> bool:
        body = real.get("dcpd", name, "-n", namespace)
        is_current = body.get("status", {}).get("observedGeneration") == body["metadata"]["generation"]
        return is_current and conditions(body)["Ready"]["status"] == "True"

    wait_for(f"{name} is ready", is_ready, READY_S)


def pods(real: Cluster, namespace: str, name: str, role: str) -> list[dict]:
    selector = f"dcpdisagg.io/name={name},dcpdisagg.io/role={role}"
    found = real.get("pods", "-n", namespace, "-l", selector)["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def host_ports(pod: dict) -> set[int]:
    return {port["hostPort"] for port in pod["spec"]["containers"][0]["ports"] if "hostPort" in port}


def answered_by(real: Cluster, namespace: str, name: str) -> str:
    """Send a prompt to an object's Service; return the prefill pod that computed it."""
    address = real.get("service", name, "-n", namespace)["spec"]["clusterIP"]
    served = first_answer(address, model=name)
    assert served.prefill is not None, served
    return served.prefill["pod"]


def on_host(name: str, **changes) -> dict:
    """An object whose prefill engines are on the node's network; of decode there is one on a network of its own."""
    return stand_in(name, prefill={"hostNetwork": True}, **changes)


def test_engines_of_two_objects_and_of_two_revisions_share_a_node_and_its_network(real: Cluster, namespace: str):
    for name in ("one", "two"):
        apply_as_user(real, namespace, on_host(name))
    for name in ("one", "two"):
        wait_until_ready(real, namespace, name)
    (one,), (two,) = (pods(real, namespace, name, "prefill") for name in ("one", "two"))
    assert one["status"]["podIP"] == two["status"]["podIP"] == one["status"]["hostIP"]
    assert one["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert len(host_ports(one)) == len(host_ports(two)) == 2
    assert host_ports(one).isdisjoint(host_ports(two))
    for name, pod in (("one", one), ("two", two)):
        assert answered_by(real, namespace, name) == pod["metadata"]["name"]

    # The next revision takes over beside the old one, on the same node: its ports are others.
    apply_as_user(real, namespace, on_host("one", decode_told={"latency_s": 0.01}))
    wait_until_ready(real, namespace, "one")
    (new,) = pods(real, namespace, "one", "prefill")
    assert new["metadata"]["labels"]["dcpdisagg.io/revision"] != one["metadata"]["labels"]["dcpdisagg.io/revision"]
    assert host_ports(new).isdisjoint(host_ports(one) | host_ports(two))
    assert answered_by(real, namespace, "one") == new["metadata"]["name"]

    # Two engines of one role are never on one node.
    manifest = on_host("two")
    manifest["spec"]["prefill"]["replicas"] = 2
    apply_as_user(real, namespace, manifest)
    wait_for(
        "the second engine finds no free ports",
        lambda: "free ports" in condition(real, namespace, "two", "PrefillReady")["message"],
        READY_S,
    )
    assert condition(real, namespace, "two", "PrefillReady")["reason"] == "Unschedulable"
    real.kubectl("delete", "dcpd", "one", "two", "-n", namespace, "--wait=false")


@pytest.fixture
def claim(real: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """The folder of a claim `models`, which any user may write to."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "models"
    folder.mkdir()
    folder.chmod(0o777)
    name, size = f"models-{namespace}", {"storage": "1Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    real.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                **common,
                "capacity": size,
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": namespace, "name": "models"},
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": namespace},
            "spec": {**common, "volumeName": name, "resources": {"requests": size}},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "hub", "namespace": namespace},
            "data": {"huggingface_hub.py": MODULE},
        },
    )
    yield folder
    real.kubectl("delete", "pvc", "models", "-n", namespace, "--wait=false")
    real.kubectl("delete", "pv", name, "--wait=false")


def cached(*, fails: str | None = None) -> dict:
    """An object whose model is pulled into the claim by a stand-in for the hub's client."""
    manifest = stand_in("cached")
    manifest["spec"]["model"]["cache"] = {"claimName": "models"}
    # The first engine of a domain has no neighbour yet: the scheduler takes it, as it matches its own term.
    manifest["spec"]["topologyConstraint"] = {"topologyKey": "kubernetes.io/hostname", "enforcement": "Required"}
    manifest["spec"]["decode"]["sharedMemorySize"] = "16Mi"
    template = manifest["spec"]["prefill"]["template"]["spec"]
    template["volumes"] = [{"name": "hub", "configMap": {"name": "hub"}}]
    (main,) = template["containers"]
    main["volumeMounts"] = [{"name": "hub", "mountPath": HUB}]
    main["env"] += [{"name": "PYTHONPATH", "value": HUB}, {"name": COUNT, "value": "/models/pulls"}]
    main["env"] += [{"name": FAIL, "value": fails}] if fails is not None else []
    return manifest


def jobs(real: Cluster, namespace: str) -> list[dict]:
    return real.get("jobs", "-n", namespace)["items"]


def test_a_model_is_pulled_once_for_all_engines_and_they_wait_for_it(real: Cluster, namespace: str, claim: Path):
    apply_as_user(real, namespace, cached(fails="401 Client Error: no token"))
    wait_for(
        "the failure is said",
        lambda: condition(real, namespace, "cached")["reason"] == "ModelPullFailed",
        READY_S,
    )
    said = condition(real, namespace, "cached")["message"]
    assert "acme/tiny can't be pulled: OSError: 401 Client Error: no token" in said
    assert not [pod for role in ("prefill", "decode", "router") for pod in pods(real, namespace, "cached", role)]
    assert not (claim / "acme--tiny").exists(), "a pull that failed leaves no model"

    apply_as_user(real, namespace, cached())
    wait_until_ready(real, namespace, "cached")
    (job,) = jobs(real, namespace)
    assert {entry["type"] for entry in job["status"]["conditions"]} >= {"Complete"}
    assert (claim / "pulls").read_text().splitlines() == ["acme/tiny commit-of-None"]
    assert (claim / "acme--tiny" / "weights" / "model.safetensors").read_text() == "weights"
    for role in ("prefill", "decode"):
        (pod,) = pods(real, namespace, "cached", role)
        listed = real.kubectl("exec", pod["metadata"]["name"], "-n", namespace, "-c", "main", "--", "ls", "/models")
        assert "acme--tiny" in listed
        assert "--model=/models/acme--tiny" in pod["spec"]["containers"][0]["args"]
        assert "requiredDuringSchedulingIgnoredDuringExecution" in pod["spec"]["affinity"]["podAffinity"]
        mount = next(each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["mountPath"] == "/models")
        assert mount["readOnly"] is True

    # More engines pull nothing more.
    manifest = cached()
    manifest["spec"]["decode"]["replicas"] = 2
    apply_as_user(real, namespace, manifest)
    wait_until_ready(real, namespace, "cached")
    assert len((claim / "pulls").read_text().splitlines()) == 1

    # Without the cache the Job goes, and what it brought stays.
    manifest["spec"]["model"]["uri"] = "pvc://models/acme--tiny"
    del manifest["spec"]["model"]["cache"]
    apply_as_user(real, namespace, manifest)
    wait_for("the Job goes", lambda: not jobs(real, namespace), READY_S)
    wait_until_ready(real, namespace, "cached")
    assert (claim / "acme--tiny" / "config.json").exists()
    real.kubectl("delete", "dcpd", "cached", "-n", namespace, "--wait=false")
    assert json.loads((claim / "acme--tiny" / ".dcp-model.json").read_text())["repository"] == "acme/tiny"
