"""Where the cache and the running cluster keep their files."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Cache:
    """The machine-wide cache: what is costly to make, and the state of the one cluster that may run."""

    root: Path

    @property
    def binaries(self) -> Path:
        """Built Go programs, one folder per key."""
        return self.root / "bin"

    @property
    def clients(self) -> Path:
        """The kubectl and helm programs, one folder per key."""
        return self.root / "clients"

    @property
    def go(self) -> Path:
        """Go's own caches; they are deleted when everything is built."""
        return self.root / "go"

    @property
    def images(self) -> Path:
        """Image archives that need no rebuild."""
        return self.root / "images"

    @property
    def buildah(self) -> Path:
        """The storage of buildah."""
        return self.root / "buildah"

    @property
    def traces_of_builds(self) -> Path:
        """A note that exists while a build may leave files outside of the cache."""
        return self.root / "traces-of-builds.json"

    @property
    def locks(self) -> Path:
        """Lock files; they stay."""
        return self.root / "locks"

    @property
    def models(self) -> Path:
        """Tiny models for the CPU engines."""
        return self.root / "models"

    @property
    def crashes(self) -> Path:
        """Tracebacks of unexpected errors."""
        return self.root / "crashes"

    @property
    def cluster(self) -> "ClusterPaths":
        """The state of the running cluster."""
        return ClusterPaths(self.root / "cluster")


@dataclass(frozen=True, slots=True)
class ClusterPaths:
    """Everything that belongs to one running cluster; ``down`` deletes the folder."""

    root: Path

    @property
    def owner(self) -> Path:
        """Who started the cluster, as JSON."""
        return self.root / "owner.json"

    @property
    def records(self) -> Path:
        """One JSON file per component: pid, start time, digest of what it was started with."""
        return self.root / "processes"

    @property
    def logs(self) -> Path:
        """One log file per component."""
        return self.root / "logs"

    @property
    def config(self) -> Path:
        """Rendered configuration files."""
        return self.root / "config"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.root / "pki"

    @property
    def serving(self) -> Path:
        """Certificates that components sign for themselves, for their health ports on loopback."""
        return self.root / "serving"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.root / "kubeconfig"

    @property
    def clients(self) -> Path:
        """What kubectl and helm keep for themselves."""
        return self.root / "clients"

    @property
    def etcd(self) -> Path:
        """The data of etcd."""
        return self.root / "etcd"

    @property
    def containerd(self) -> Path:
        """Root, state and socket of containerd."""
        return self.root / "containerd"

    @property
    def containerd_socket(self) -> Path:
        """The socket of containerd."""
        return self.containerd / "containerd.sock"

    @property
    def kubelet(self) -> Path:
        """The kubelet's root folder: volumes of pods."""
        return self.root / "kubelet"

    @property
    def pod_logs(self) -> Path:
        """Logs of containers."""
        return self.root / "pod-logs"

    @property
    def cni(self) -> Path:
        """Network configuration and leases of pod addresses."""
        return self.root / "cni"


def find_cache(environ: Mapping[str, str]) -> Cache:
    """The cache named by ``DCP_DISAGG_CACHE``, else ``~/.cache/dcp-disagg``."""
    named = environ.get("DCP_DISAGG_CACHE", "").strip()
    return Cache(Path(named).expanduser().resolve() if named else Path.home().resolve() / ".cache" / "dcp-disagg")


def this_cache() -> Cache:
    """The cache of this process."""
    return find_cache(os.environ)
