"""Nodes that only say that they run pods, by kwok: load tests of thousands of pods fit on a small machine.

kwok is no part of a cluster. Who asks for fake nodes gets them for the length of a block: it is built on first use,
runs beside the cluster, and takes its nodes along when it ends. A taint keeps ordinary pods away from them;
`place` makes a pod's template go there and nowhere else.
"""

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from devcluster import gobuild, processes
from devcluster.errors import DevClusterError
from devcluster.files import locked, write_text
from devcluster.paths import Cache
from devcluster.progress import Log
from devcluster.shell import last_words
from devcluster.tools import Tools

Manifest = dict[str, Any]

#: Label and taint of the nodes.
MARK = "kwok.x-k8s.io/node"
MARK_VALUE = "fake"
#: Annotation of a pod: how long it takes to be Ready, in Go's notation, as in "3s".
READY_AFTER = "kwok.x-k8s.io/ready-after"
_NAME = "kwok"
#: Addresses of fake pods: none that the cluster uses for its own.
_CIDR = "10.160.0.0/12"
_READY_S = 60.0


def place(template: Manifest, ready_after_s: float = 0.0) -> Manifest:
    """Return a pod template that runs on fake nodes only, and is Ready so many seconds after it was bound to one."""
    result = copy.deepcopy(template)
    if ready_after_s:
        annotations = result.setdefault("metadata", {}).setdefault("annotations", {})
        annotations[READY_AFTER] = f"{ready_after_s * 1000:.0f}ms"
    spec = result.setdefault("spec", {})
    spec["nodeSelector"] = {MARK: MARK_VALUE}
    spec["tolerations"] = [{"key": MARK, "operator": "Equal", "value": MARK_VALUE, "effect": "NoSchedule"}]
    return result


def node(name: str) -> Manifest:
    """Return a fake node that takes any number of pods."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {MARK: MARK_VALUE, "kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": MARK, "value": MARK_VALUE, "effect": "NoSchedule"}]},
    }


def stages() -> list[Manifest]:
    """Return what kwok does: nodes are Ready, pods are after the time in their annotation, deleted pods go at once."""
    is_ready = '.status.conditions.[] | select( .type == "Ready" ) | .status'
    gone = ".metadata.deletionTimestamp"
    return [
        _stage("node-ready", "Node", [_matches(is_ready, "NotIn", "True")], {"statusTemplate": _NODE_STATUS}),
        _stage(
            "pod-ready",
            "Pod",
            [
                _matches(gone, "DoesNotExist"),
                _matches(".status.phase", "In", "Pending"),
                _matches(is_ready, "NotIn", "True"),
            ],
            {"statusTemplate": _POD_STATUS},
            {"durationMilliseconds": 0, "durationFrom": {"expressionFrom": f'.metadata.annotations["{READY_AFTER}"]'}},
        ),
        _stage("pod-delete", "Pod", [_matches(gone, "Exists")], {"delete": True}),
    ]


@contextlib.contextmanager
def fake_nodes(cache: Cache, log: Log, *names: str) -> Iterator[None]:
    """Run kwok with these nodes, Ready, until the block ends; one at a time on a machine. The cluster must be up."""
    binaries = gobuild.ensure_binaries(cache, gobuild.KWOK, gobuild.installed_go(cache), log)
    with locked(cache.locks / "kwok.lock", log, "fake nodes"):
        paths, tools = cache.cluster, Tools(cache)
        # What an earlier block left that was killed.
        _stop(cache)
        tools.kubectl("delete", "node", "-l", f"{MARK}={MARK_VALUE}", "--wait=false")
        config, log_file = paths.config / "kwok.yaml", paths.logs / f"{_NAME}.log"
        write_text(config, yaml.safe_dump_all(stages(), sort_keys=False))
        argv = (
            str(binaries / "kwok"),
            f"--kubeconfig={paths.kubeconfig}",
            f"--config={config}",
            f"--manage-nodes-with-label-selector={MARK}={MARK_VALUE}",
            f"--cidr={_CIDR}",
            "--node-ip=10.160.0.1",
            "--node-lease-duration-seconds=40",
            "--v=WARN",
        )
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": [node(name) for name in names]})
        process = processes.start(_NAME, argv, "", log_file, paths.records, {})
        try:
            tools.kubectl("apply", "--server-side", "-f", "-", stdin=document)
            _wait_until_ready(
                tools, names, lambda: process.poll() is None, lambda: log_file.read_text("utf-8", "replace")
            )
            yield
        finally:
            # Their pods go with them: nobody else would answer for these.
            tools.kubectl("delete", "node", *names, "--ignore-not-found", "--wait=false")
            process.terminate()
            process.wait()
            (paths.records / f"{_NAME}.json").unlink(missing_ok=True)


def _stop(cache: Cache) -> None:
    paths = cache.cluster
    record = processes.load_records(paths.records).get(_NAME)
    if record is not None:
        processes.stop([record], grace_s=5)
        (paths.records / f"{_NAME}.json").unlink(missing_ok=True)


def _wait_until_ready(tools: Tools, names: tuple[str, ...], lives: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        listed = json.loads(tools.kubectl("get", "nodes", "-l", f"{MARK}={MARK_VALUE}", "-o", "json"))["items"]
        if {item["metadata"]["name"] for item in listed if _is_ready(item)} >= set(names):
            return
        if not lives():
            raise DevClusterError(f"kwok ended right after its start: {last_words(said())}")
        if time.monotonic() > deadline:
            raise DevClusterError(f"fake nodes are not Ready after {_READY_S:.0f} s: {last_words(said())}")
        time.sleep(0.2)


def _is_ready(item: Manifest) -> bool:
    conditions = item.get("status", {}).get("conditions", [])
    tainted = [taint["key"] for taint in item.get("spec", {}).get("taints", []) if taint["key"] != MARK]
    return not tainted and any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _stage(
    name: str, kind: str, expressions: list[Manifest], what: Manifest, delay: Manifest | None = None
) -> Manifest:
    spec: Manifest = {
        "resourceRef": {"apiGroup": "v1", "kind": kind},
        "selector": {"matchExpressions": expressions},
        "next": what,
    }
    if delay is not None:
        spec["delay"] = delay
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name}, "spec": spec}


def _matches(key: str, operator: str, *values: str) -> Manifest:
    return {"key": key, "operator": operator, **({"values": list(values)} if values else {})}


_NODE_STATUS = """\
{{ $now := Now }}
conditions:
- type: Ready
  status: "True"
  reason: Fake
  message: kwok answers for this node
  lastHeartbeatTime: {{ $now | Quote }}
  lastTransitionTime: {{ $now | Quote }}
addresses:
- type: InternalIP
  address: {{ NodeIP | Quote }}
- type: Hostname
  address: {{ NodeName | Quote }}
allocatable:
  cpu: 10k
  memory: 100Ti
  pods: 1M
capacity:
  cpu: 10k
  memory: 100Ti
  pods: 1M
phase: Running
"""

_POD_STATUS = """\
{{ $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
conditions:
{{ range $type := list "Initialized" "ContainersReady" "Ready" }}
- type: {{ $type }}
  status: "True"
  lastTransitionTime: {{ $now | Quote }}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  started: true
  restartCount: 0
  state:
    running:
      startedAt: {{ $now | Quote }}
{{ end }}
{{ with .spec.initContainers }}
initContainerStatuses:
{{ range . }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  restartCount: 0
  state:
    terminated:
      exitCode: 0
      reason: Completed
      startedAt: {{ $now | Quote }}
      finishedAt: {{ $now | Quote }}
{{ end }}
{{ end }}
{{ with PodIPsWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace }}
podIP: {{ index . 0 | Quote }}
podIPs:
- ip: {{ index . 0 | Quote }}
{{ end }}
"""
