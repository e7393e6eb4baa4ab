"""The local cluster from the outside: commands of a user, pods and Services of a real node."""

import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster.clients import client_environment, clients_folder
from devcluster.paths import CHECKOUT, this_cache
from devcluster.processes import load_records
from devcluster.settings import ENGINE_IMAGE, ENGINE_RUNTIME
from tests.support.cluster import Cluster, cluster, copy_checkout, devcluster, up

_PORT = 8080


def _server_pod(name: str) -> dict:
    write = "mkdir -p /srv && echo served by $HOSTNAME > /srv/index.html; echo started;"
    script = f"{write} trap 'exit 0' TERM; /bin/busybox httpd -f -p {_PORT} -h /srv & wait"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": ENGINE_IMAGE,
                    "command": ["/bin/busybox", "sh", "-c", script],
                    # Ready when it serves, and not as soon as its process runs.
                    "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 1},
                }
            ],
            "terminationGracePeriodSeconds": 2,
        },
    }


@pytest.fixture(scope="module")
def node() -> Cluster:
    return cluster()


@pytest.fixture(scope="module")
def space(node: Cluster) -> Iterator[str]:
    with node.namespace("devcluster") as name:
        yield name


@pytest.fixture(scope="module")
def web(node: Cluster, space: str) -> str:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": _PORT}]},
    }
    node.apply(_server_pod("web"), service, namespace=space)
    node.kubectl("wait", "-n", space, "--for=condition=Ready", "pod/web", "--timeout=60s")
    return "web"


def _fetch(url: str, within_s: float = 15) -> str:
    """The body of an answer; a Service's rules may take a moment after its pod is Ready."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + within_s
    while True:
        try:
            with opener.open(url, timeout=3) as answer:
                return answer.read().decode()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_up_on_a_healthy_cluster_starts_nothing_and_takes_about_a_second(node: Cluster) -> None:
    before = devcluster("status").stdout
    start = time.monotonic()
    said = up()
    took_s = time.monotonic() - start
    assert "running" not in said, said
    assert "is Ready; kubeconfig: " in said
    assert devcluster("status").stdout == before  # the same pids
    assert took_s < 5  # alone on the machine it is 0.3 s


def test_status_lists_every_component_as_running(node: Cluster) -> None:
    result = devcluster("status")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count(" running ") == 7
    assert "node: Ready" in result.stdout
    assert str(CHECKOUT) in result.stdout


def test_env_prints_lines_after_which_kubectl_and_helm_work(node: Cluster) -> None:
    command = 'eval "$("$0" -m devcluster env)" && kubectl get nodes -o name && helm version --short'
    result = subprocess.run(
        ["bash", "-c", command, str(CHECKOUT / ".venv/bin/python")], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert result.stdout.splitlines()[0] == "node/dcp-node", result.stderr
    assert result.stdout.splitlines()[1].startswith("v4.")


def test_the_api_server_is_verified_and_refuses_a_stranger(node: Cluster) -> None:
    text = node.kubeconfig.read_text()
    assert "certificate-authority-data" in text
    assert "insecure" not in text
    assert node.kubeconfig.stat().st_mode & 0o077 == 0
    server = node.kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}")
    direct = urllib.request.ProxyHandler({})
    trusting = ssl.create_default_context(cafile=str(this_cache().cluster.pki / "ca.crt"))
    stranger = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=trusting))
    with pytest.raises(urllib.error.HTTPError, match="403"):
        stranger.open(f"{server}/api/v1/nodes", timeout=5)
    suspicious = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=ssl.create_default_context()))
    with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
        suspicious.open(f"{server}/readyz", timeout=5)


def test_a_pod_has_an_address_logs_and_exec(node: Cluster, space: str, web: str) -> None:
    pod = node.get("pod", web, "-n", space)
    assert pod["status"]["podIP"].startswith("10.244.0.")
    assert node.kubectl("logs", web, "-n", space) == "started\n"
    assert node.kubectl("exec", web, "-n", space, "--", "/bin/busybox", "hostname") == "web\n"
    assert _fetch(f"http://{pod['status']['podIP']}:{_PORT}/") == "served by web\n"


def test_a_service_answers_the_host_another_pod_and_its_own_pod(node: Cluster, space: str, web: str) -> None:
    address = node.get("service", web, "-n", space)["spec"]["clusterIP"]
    assert _fetch(f"http://{address}/") == "served by web\n"
    node.apply(_server_pod("other"), namespace=space)
    node.kubectl("wait", "-n", space, "--for=condition=Ready", "pod/other", "--timeout=60s")
    for client in ("other", web):
        got = node.kubectl("exec", client, "-n", space, "--", "/bin/busybox", "wget", "-qO-", f"http://{address}/")
        assert got == "served by web\n", client


def test_port_forward_reaches_a_pod(node: Cluster, space: str, web: str) -> None:
    kubectl = clients_folder(this_cache()) / "kubectl"
    with subprocess.Popen(
        [kubectl, "port-forward", "-n", space, f"pod/{web}", f":{_PORT}"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **client_environment(this_cache())},
    ) as forward:
        try:
            assert forward.stdout
            port = forward.stdout.readline().split("127.0.0.1:")[1].split()[0]
            assert _fetch(f"http://127.0.0.1:{port}/") == "served by web\n"
        finally:
            forward.terminate()


def test_a_pod_reaches_the_api_server_with_its_service_account(node: Cluster, space: str) -> None:
    script = """
import os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}/api"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(folder + "token").read()})
print(urllib.request.urlopen(request, context=ssl.create_default_context(cafile=folder + "ca.crt")).status)
"""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "caller"},
        "spec": {
            "runtimeClassName": ENGINE_RUNTIME,
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": ENGINE_IMAGE, "command": ["python3", "-c", script]}],
        },
    }
    node.apply(pod, namespace=space)
    node.kubectl("wait", "-n", space, "--for=jsonpath={.status.phase}=Succeeded", "pod/caller", "--timeout=60s")
    assert node.kubectl("logs", "caller", "-n", space) == "200\n"


def test_the_engine_runtime_lends_the_hosts_libraries_read_only(node: Cluster, space: str) -> None:
    script = "touch /usr/written 2>&1; ls /opt; head -1 /proc/1/comm"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "lender"},
        "spec": {
            "runtimeClassName": ENGINE_RUNTIME,
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": ENGINE_IMAGE, "command": ["/bin/bash", "-c", script]}],
        },
    }
    node.apply(pod, namespace=space)
    node.kubectl("wait", "-n", space, "--for=jsonpath={.status.phase}=Succeeded", "pod/lender", "--timeout=60s")
    said = node.kubectl("logs", "lender", "-n", space)
    assert "Read-only file system" in said
    assert "cpu-engine-models" in said
    assert not Path("/usr/written").exists()


def test_pod_security_is_enforced(node: Cluster, space: str) -> None:
    # The label comes with the namespace: an admission plugin learns of a later one in its own time.
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    with node.namespace("restricted", labels) as name, pytest.raises(AssertionError, match="violates PodSecurity"):
        node.apply(_server_pod("refused"), namespace=name)


def test_nothing_of_the_cluster_listens_on_the_machines_network_cards(node: Cluster) -> None:
    ours = {f"pid={record.pid}," for record in load_records(this_cache().cluster.records).values()}
    listing = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listing.splitlines() if any(pid in line for pid in ours)]
    assert {fields[3].rsplit(":", 1)[0] for fields in lines} == {"127.0.0.1", "10.244.0.1"}


def test_a_second_checkout_is_refused_in_words_that_name_the_first(node: Cluster, tmp_path: Path) -> None:
    second = copy_checkout(tmp_path / "second")
    before = devcluster("status").stdout
    for command in (["up"], ["down"], ["env"], ["load-image", "x.tar"]):
        result = devcluster(*command, cwd=second)
        assert result.returncode == 2, command
        assert "Traceback" not in result.stderr
        assert f"from {CHECKOUT}" in result.stderr
        assert "has been running since 20" in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr
    assert devcluster("status", cwd=second).stdout == before


def test_an_image_built_from_a_dockerfile_runs(node: Cluster, space: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE_IMAGE=debian:bookworm-slim\nFROM ${BASE_IMAGE}\nARG WORD\nCOPY note /note\n"
        'RUN echo "$WORD" >> /note && python3 -c "import venv"\nUSER 65532\nCMD ["cat", "/note"]\n'
    )
    (tmp_path / "note").write_text("copied\n")
    tag = "devcluster-test/built:1"
    result = devcluster("build-image", str(tmp_path / "Dockerfile"), str(tmp_path), tag, "--build-arg", "WORD=given")
    assert result.returncode == 0, result.stderr
    container = {"name": "main", "image": tag, "imagePullPolicy": "Never"}
    spec = {"restartPolicy": "Never", "containers": [container]}
    node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "built"}, "spec": spec}, namespace=space)
    node.kubectl("wait", "-n", space, "--for=jsonpath={.status.phase}=Succeeded", "pod/built", "--timeout=60s")
    assert node.kubectl("logs", "built", "-n", space) == "copied\ngiven\n"
    again = devcluster("build-image", str(tmp_path / "Dockerfile"), str(tmp_path), tag, "--build-arg", "WORD=given")
    assert "is unchanged and in the cluster" in again.stderr


def test_a_failing_dockerfile_ends_in_one_sentence_with_its_last_words(node: Cluster, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nRUN echo went wrong here >&2; exit 7\n")
    result = devcluster("build-image", str(tmp_path / "Dockerfile"), str(tmp_path), "devcluster-test/broken:1")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "exit status 7" in result.stderr.splitlines()[-1]


def test_logs_prints_the_end_of_a_components_log(node: Cluster) -> None:
    result = devcluster("logs", "kube-apiserver", "--lines", "3")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 4
    assert result.stdout.startswith("# /")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["load-image", "/nowhere/image.tar"], "there is no image archive /nowhere/image.tar"),
        (["build-image", "/nowhere/Dockerfile", "/", "a/b:1"], "there is no Dockerfile /nowhere/Dockerfile"),
    ],
)
def test_a_wrong_argument_ends_in_one_sentence(node: Cluster, arguments: list[str], words: str) -> None:
    result = devcluster(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_is_no_image_is_refused_in_words(node: Cluster, tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_text("no archive")
    result = devcluster("load-image", str(tmp_path / "image.tar"))
    assert result.returncode == 2
    assert "importing" in result.stderr
    assert "Traceback" not in result.stderr
