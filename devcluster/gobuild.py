"""Builds the Go programs of the node once, into a folder of the cache named by everything that decides the result."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import DevClusterError
from devcluster.files import ensure_folder, locked
from devcluster.paths import Cache
from devcluster.progress import Log, heartbeat
from devcluster.settings import KUBERNETES_VERSION
from devcluster.shell import find_program, run

_HERE = Path(__file__).resolve().parent
_STRIP = "-s -w"


@dataclass(frozen=True, slots=True)
class GoProgram:
    """A program and the import path of its main package."""

    name: str
    package: str


@dataclass(frozen=True, slots=True)
class GoFile:
    """A file of a Go module that is kept beside the programs: the module's name, the path in it, the name here."""

    module: str
    path: str
    name: str


@dataclass(frozen=True, slots=True)
class GoModule:
    """A folder with go.mod and go.sum whose ``tool`` lines name programs; no Go code of ours."""

    name: str
    folder: Path
    ldflags: str
    programs: tuple[GoProgram, ...]
    disk_bytes: int  # free space that a build needs, for Go's caches and the binaries
    minutes: float  # on two cores, for the progress line
    files: tuple[GoFile, ...] = ()

    @property
    def requirement(self) -> str:
        """The ``go`` line of go.mod, as in "1.26.0"."""
        return required_go((self.folder / "go.mod").read_text())


_KUBERNETES_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
_CNI = "github.com/containernetworking/plugins/plugins"

KUBERNETES = GoModule(
    "kubernetes",
    _HERE / "kubernetes",
    f"{_STRIP} -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
    tuple(GoProgram(name, f"k8s.io/kubernetes/cmd/{name}") for name in _KUBERNETES_PROGRAMS),
    disk_bytes=8 * 10**9,
    minutes=8,
)
NODE = GoModule(
    "node",
    _HERE / "node",
    _STRIP,
    (
        GoProgram("etcd", "go.etcd.io/etcd/server/v3"),
        GoProgram("bridge", f"{_CNI}/main/bridge"),
        GoProgram("loopback", f"{_CNI}/main/loopback"),
        GoProgram("host-local", f"{_CNI}/ipam/host-local"),
        GoProgram("portmap", f"{_CNI}/meta/portmap"),
    ),
    disk_bytes=2 * 10**9,
    minutes=1.5,
)
#: Fake nodes for load tests: no part of a cluster, built by the first who asks for them (`devcluster.fake_nodes`).
KWOK = GoModule(
    "kwok",
    _HERE / "kwok",
    _STRIP,
    (GoProgram("kwok", "sigs.k8s.io/kwok/cmd/kwok"),),
    disk_bytes=3 * 10**9,
    minutes=3,
)
#: What enforces NetworkPolicies: no part of a cluster, built by the first who asks for it (`devcluster.policies`).
NETPOL = GoModule(
    "netpol",
    _HERE / "netpol",
    _STRIP,
    (GoProgram("kube-network-policies", "sigs.k8s.io/kube-network-policies/cmd"),),
    disk_bytes=3 * 10**9,
    minutes=3.5,
)
_LWS = "sigs.k8s.io/lws"
#: LeaderWorkerSet, for engines that span several pods: no part of a cluster, built by the first who asks for it
#: (`devcluster.groups`).
LWS = GoModule(
    "lws",
    _HERE / "lws",
    _STRIP,
    (GoProgram("lws", f"{_LWS}/cmd"),),
    disk_bytes=3 * 10**9,
    minutes=2.5,
    files=(
        GoFile(_LWS, "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml", "leaderworkersets.yaml"),
        # The same program looks after these too, and does not start without them.
        GoFile(_LWS, "config/crd/bases/disaggregatedset.x-k8s.io_disaggregatedsets.yaml", "disaggregatedsets.yaml"),
        GoFile(_LWS, "config/webhook/manifests.yaml", "webhooks.yaml"),
    ),
)
#: What every cluster needs.
MODULES = (NODE, KUBERNETES)


def required_go(go_mod: str) -> str:
    """The version in the ``go`` line of a go.mod."""
    found = re.search(r"^go (\S+)$", go_mod, re.MULTILINE)
    if not found:
        raise DevClusterError("a go.mod of the local cluster has no go line; restore the file from git")
    return found.group(1)


def parse_go_version(text: str) -> tuple[int, ...] | None:
    """The numbers in the output of ``go version`` or in a go line: "go1.26.8" gives (1, 26, 8). None: unreadable."""
    found = re.search(r"(?:^|go)(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else None


def module_key(go_mod: bytes, go_sum: bytes, go_version: str, ldflags: str, names: tuple[str, ...] = ()) -> str:
    """The name of a module's folder in the cache: a hash of what decides what is in it.

    `names` are those of the files that are kept beside the programs.
    """
    digest = hashlib.sha256()
    kept = tuple(name.encode() for name in names)
    for part in (go_mod, go_sum, go_version.encode(), ldflags.encode(), b"CGO_ENABLED=0 -trimpath", *kept):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:16]


def go_environment(cache: Cache, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for every call of go.

    Go counts its own use in files of the user's configuration folder, by no other switch than that folder's place. The
    user's settings (``go env -w``, as for a proxy) are still read from where they are.
    """
    configured = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return {
        "GOENV": environ.get("GOENV") or f"{configured}/go/env",
        "XDG_CONFIG_HOME": str(cache.root / "go-config"),
        # A newer toolchain is never fetched behind the user's back.
        "GOTOOLCHAIN": "local",
    }


def installed_go(cache: Cache) -> str:
    """The output of ``go version``.

    Raises:
        DevClusterError: go is missing.
    """
    if not find_program("go"):
        needed = max((module.requirement for module in MODULES), key=lambda text: parse_go_version(text) or ())
        raise DevClusterError(f"go is not on PATH: building Kubernetes and etcd needs Go {needed} or newer")
    return run(["go", "version"], what="asking for the version of Go", env=go_environment(cache, os.environ)).strip()


def check_go(go_version: str, module: GoModule) -> None:
    """Refuse a Go that is older than the module's go line."""
    have, need = parse_go_version(go_version), parse_go_version(module.requirement)
    if have is None or need is None or have < need:
        raise DevClusterError(
            f"building {module.name} needs Go {module.requirement} or newer, and the one on PATH says: {go_version}"
        )


def module_folder(cache: Cache, module: GoModule, go_version: str) -> Path:
    """Where the module's binaries are, or will be."""
    go_mod, go_sum = (module.folder / "go.mod").read_bytes(), (module.folder / "go.sum").read_bytes()
    kept = tuple(file.name for file in module.files)
    return cache.binaries / f"{module.name}-{module_key(go_mod, go_sum, go_version, module.ldflags, kept)}"


def _builder(cache: Cache, module: GoModule, log: Log) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        env = go_environment(cache, os.environ) | {
            "CGO_ENABLED": "0",
            "GOFLAGS": "-mod=readonly -modcacherw",
            "GOCACHE": str(cache.go / "build"),
            "GOMODCACHE": str(cache.go / "mod"),
        }
        for program in module.programs:
            log(f"building {program.name}")
            with heartbeat(log, f"building {program.name}"):
                run(
                    [
                        "go",
                        "build",
                        "-trimpath",
                        "-ldflags",
                        module.ldflags,
                        "-o",
                        folder / program.name,
                        program.package,
                    ],
                    what=f"go, building {program.name} with modules from the Go module proxy,",
                    env=env,
                    cwd=module.folder,
                )
        for file in module.files:
            where = run(
                ["go", "list", "-m", "-f", "{{.Dir}}", file.module],
                what=f"go, looking for the files of {file.module},",
                env=env,
                cwd=module.folder,
            ).strip()
            # The module cache is read-only, and is deleted once everything is built.
            (folder / file.name).write_bytes((Path(where) / file.path).read_bytes())

    return fill


def ensure_binaries(cache: Cache, module: GoModule, go_version: str, log: Log) -> Path:
    """Build the module's programs unless the cache has them. Returns their folder."""
    folder = module_folder(cache, module, go_version)
    if not folder.is_dir():
        check_go(go_version, module)
        log(f"building {', '.join(program.name for program in module.programs)}: about {module.minutes:g} min, once")
        ensure_folder(folder, _builder(cache, module, log), log, f"the build of {module.name}", cache.locks / "go.lock")
    return folder


def drop_build_cache(cache: Cache, log: Log) -> None:
    """Delete Go's caches of the build, several gigabytes: the binaries are what is worth keeping."""
    with locked(cache.locks / "go.lock", log, "another build"):
        shutil.rmtree(cache.go, ignore_errors=True)
