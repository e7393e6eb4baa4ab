"""LeaderWorkerSet in the local cluster: its controller as a process on this machine, for who asks for it.

Engines that span several pods are groups of a LeaderWorkerSet. No cluster has its controller unless somebody installs
it, so it is no component of the node: tests install it, and remove it, to see both. Definitions and webhooks are those
of the Go module that the controller is built from. Its webhooks are served, at the address of the node's bridge: that
for pods makes the label of a pod's group and the variables that name its leader, without which a group is no group.
"""

import base64
import os
from pathlib import Path
from typing import Any

import yaml

from devcluster import gobuild, pki
from devcluster.files import write_text
from devcluster.paths import Cache, ClusterPaths
from devcluster.progress import Log
from devcluster.settings import GATEWAY, LOOPBACK

Manifest = dict[str, Any]

_DEFINITIONS = ("leaderworkersets.yaml", "disaggregatedsets.yaml")
#: 1.3 MB of YAML each: seconds with the loader in Python, tenths of a second with libyaml's.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Label of every pod of a LeaderWorkerSet.
_SET_NAME = "leaderworkerset.sigs.k8s.io/name"
_SERVER = pki.Identity("lws-webhook", "lws-webhook", addresses=(GATEWAY,))


def ensure_program(cache: Cache, log: Log) -> Path:
    """Build the controller unless the cache has it. Returns the folder with program, definitions and webhooks."""
    go_version = gobuild.installed_go(cache)
    folder = gobuild.module_folder(cache, gobuild.LWS, go_version)
    if not folder.is_dir():
        gobuild.ensure_binaries(cache, gobuild.LWS, go_version, log)
        gobuild.drop_build_cache(cache, log)
    return folder


def definitions(folder: Path) -> list[Manifest]:
    """The CustomResourceDefinitions that the controller works with."""
    return [yaml.load((folder / name).read_text(), _LOADER) for name in _DEFINITIONS]  # noqa: S506 - a safe loader


def webhooks(folder: Path, port: int, authority_pem: bytes) -> list[Manifest]:
    """The webhook configurations, for a controller that listens on `port` of the node's bridge.

    As in the project's own installation, pods of others are not sent to it.
    """
    found: list[Manifest] = []
    for document in yaml.safe_load_all((folder / "webhooks.yaml").read_text()):
        for webhook in document["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {
                "url": f"https://{GATEWAY}:{port}{path}",
                "caBundle": base64.b64encode(authority_pem).decode(),
            }
            if any("pods" in rule["resources"] for rule in webhook["rules"]):
                webhook["objectSelector"] = {"matchExpressions": [{"key": _SET_NAME, "operator": "Exists"}]}
        document["metadata"]["name"] = f"lws-{document['metadata']['name']}"
        found.append(document)
    return found


def make_certificate(paths: ClusterPaths, folder: Path) -> bytes:
    """Make the webhook's certificate and key in `folder`, as the controller looks for them. Returns the authority's."""
    pki.ensure_leaf(paths, _SERVER)
    for name, source in (("tls.crt", f"{_SERVER.name}.crt"), ("tls.key", f"{_SERVER.name}.key")):
        write_text(folder / name, (paths.pki / source).read_text(), mode=0o600)
    return (paths.pki / "ca.crt").read_bytes()


def configuration(certificates: Path, webhook_port: int, health_port: int) -> str:
    """The controller's configuration file: one copy of it runs, and it makes no certificates itself."""
    document = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": GATEWAY, "port": webhook_port, "certDir": str(certificates)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"{LOOPBACK}:{health_port}"},
    }
    return yaml.safe_dump(document, sort_keys=False)


def command(folder: Path, configuration_file: Path) -> list[str]:
    """The command line of the controller."""
    return [str(folder / "lws"), f"--config={configuration_file}", "--zap-log-level=info"]


def environment(paths: ClusterPaths) -> dict[str, str]:
    """The variables that the controller is started with: the cluster's kubeconfig, and no proxy."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return kept | {"KUBECONFIG": str(paths.kubeconfig)}
