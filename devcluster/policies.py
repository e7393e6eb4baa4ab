"""NetworkPolicies that hold: kube-network-policies beside the cluster, for who asks for it.

The node's own network is a plain bridge and lets everyone through. Who asks gets policies enforced for the length of a
block, on every pod of the cluster: the kernel hands the program the first packets of each connection, and it decides
from the policies. Connections that the machine's own root opens are let through, as those of kubelet's probes are.

The program's own rules need a kernel with nft_queue. A few of iptables do the same on more kernels; without anyone who
decides they let everyone through.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from devcluster import gobuild, processes
from devcluster.errors import DevClusterError
from devcluster.files import locked, write_text
from devcluster.paths import Cache
from devcluster.progress import Log
from devcluster.settings import APISERVER, LOOPBACK, NODE_NAME, POD_SUBNET
from devcluster.shell import last_words, run, succeeds
from devcluster.tools import Tools

Manifest = dict[str, Any]

_NAME = "kube-network-policies"
_ACCOUNT = "dcp-network-policies"
_NAMESPACE = "kube-system"
_RBAC = "rbac.authorization.k8s.io"
#: Number of the kernel's queue; nobody else on a node of ours uses one.
_QUEUE = 98
#: Queues of the kernel that somebody listens to, by their number at the beginning of a line.
_QUEUES = Path("/proc/net/netfilter/nfnetlink_queue")
#: `devcluster.network` removes chains with such a name when the cluster goes.
_CHAIN = "KUBE-DCP-POLICIES"
#: It removes its rules from the kernel when it is interrupted, and takes some seconds for it.
_STOP_S = 15.0
_START_S = 30.0
#: The program logs in as a pod does: by files below /run, which it alone must see.
_IN_ITS_OWN_RUN = """
mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$1" /run/secrets/kubernetes.io/serviceaccount/token
cp "$2" /run/secrets/kubernetes.io/serviceaccount/ca.crt
shift 2
exec "$@"
"""


def ensure_program(cache: Cache, log: Log) -> Path:
    """Build the program unless the cache has it. Returns its folder."""
    go_version = gobuild.installed_go(cache)
    folder = gobuild.module_folder(cache, gobuild.NETPOL, go_version)
    if not folder.is_dir():
        gobuild.ensure_binaries(cache, gobuild.NETPOL, go_version, log)
        gobuild.drop_build_cache(cache, log)
    return folder


@contextlib.contextmanager
def enforced(cache: Cache, log: Log) -> Iterator[None]:
    """Enforce the cluster's NetworkPolicies until the block ends; one at a time on a machine. The cluster must be up.

    Raises:
        DevClusterError: the program can't be built, or does not run.
    """
    binaries = ensure_program(cache, log)
    with locked(cache.locks / "netpol.lock", log, "enforced policies"):
        tools, paths = Tools(cache), cache.cluster
        _stop(cache)
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": account()})
        tools.kubectl("apply", "--server-side", "-f", "-", stdin=document)
        with contextlib.ExitStack() as at_end:
            at_end.callback(tools.kubectl, "delete", "-f", "-", "--ignore-not-found", "--wait=false", stdin=document)
            token = paths.config / f"{_NAME}.token"
            write_text(token, tools.kubectl("create", "token", _ACCOUNT, "-n", _NAMESPACE), mode=0o600)
            log_file = paths.logs / f"{_NAME}.log"
            log_file.unlink(missing_ok=True)
            argv = command(binaries, token, paths.pki / "ca.crt")
            where = {"KUBERNETES_SERVICE_HOST": APISERVER.address, "KUBERNETES_SERVICE_PORT": str(APISERVER.number)}
            process = processes.start(_NAME, argv, "", log_file, paths.records, where)
            at_end.callback(process.poll)
            at_end.callback(_stop, cache)
            deadline = time.monotonic() + _START_S
            while not is_listening(_QUEUES.read_text()):
                if process.poll() is not None or time.monotonic() > deadline:
                    said = last_words(log_file.read_text("utf-8", "replace"))
                    raise DevClusterError(f"{_NAME} does not enforce policies: {said}")
                time.sleep(0.1)
            for rule in rules():
                _iptables(*rule)
            yield


def command(binaries: Path, token: Path, authority: Path) -> list[str]:
    """The command line of the program, in a mount namespace of its own with the files of a pod's account."""
    arguments = [
        f"--hostname-override={NODE_NAME}",
        f"--nfqueue-id={_QUEUE}",
        # Who crashes holds up nobody.
        "--fail-open",
        "--disable-nri",
        # For kernels before 6.12, and for names only, which no policy here is about.
        "--netfilter-bug-1766-fix=false",
        f"--metrics-bind-address={LOOPBACK}:0",
    ]
    shell = ["unshare", "--mount", "sh", "-ec", _IN_ITS_OWN_RUN, "sh", str(token), str(authority)]
    return [*shell, str(binaries / _NAME), *arguments]


def is_listening(queues: str) -> bool:
    """Whether the program takes packets, from the kernel's list of queues."""
    return any(line.split()[:1] == [str(_QUEUE)] for line in queues.splitlines())


def rules() -> list[list[str]]:
    """The rules, as arguments of iptables: new connections to pods, after Services have become pods' addresses."""
    to_pods = ["-p", "tcp", "-d", POD_SUBNET]
    return [
        ["-N", _CHAIN],
        ["-A", _CHAIN, "-m", "owner", "--uid-owner", "0", "-j", "RETURN"],
        ["-A", _CHAIN, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "RETURN"],
        ["-A", _CHAIN, *to_pods, "-j", "NFQUEUE", "--queue-num", str(_QUEUE), "--queue-bypass"],
        ["-A", "POSTROUTING", "-j", _CHAIN],
    ]


def _iptables(*arguments: str) -> None:
    run(["iptables", "-w", "-t", "mangle", *arguments], what="iptables, for the rules of enforced policies,")


def account() -> list[Manifest]:
    """The account that the program logs in with, which may read what it decides from."""
    metadata = {"name": _ACCOUNT}
    subject = {"kind": "ServiceAccount", "name": _ACCOUNT, "namespace": _NAMESPACE}
    rules = [
        {"apiGroups": [""], "resources": ["pods", "namespaces", "nodes"], "verbs": ["list", "watch"]},
        {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["list", "watch"]},
    ]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**metadata, "namespace": _NAMESPACE}},
        {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": _ACCOUNT},
            "subjects": [subject],
        },
    ]


def _stop(cache: Cache) -> None:
    for undo in (["-D", "POSTROUTING", "-j", _CHAIN], ["-F", _CHAIN], ["-X", _CHAIN]):
        # Nothing is there after a stop that was complete.
        succeeds(["iptables", "-w", "-t", "mangle", *undo])
    paths = cache.cluster
    record = processes.load_records(paths.records).get(_NAME)
    if record is None:
        return
    processes.interrupt(record, _STOP_S)
    processes.stop([record], grace_s=1)
    (paths.records / f"{_NAME}.json").unlink(missing_ok=True)
