"""``up``: from whatever is there to a Ready node."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from devcluster import (
    api,
    cgroups,
    clients,
    components,
    converge,
    gobuild,
    images,
    network,
    packages,
    pki,
    preflight,
    processes,
)
from devcluster.containerd import engine_mounts, present, render_base_spec
from devcluster.errors import DevClusterError
from devcluster.files import write_text
from devcluster.owner import Owner, Verdict, judge, load_owner, running_elsewhere
from devcluster.paths import CHECKOUT, Cache, ClusterPaths
from devcluster.progress import Log
from devcluster.settings import ENGINE_RUNTIME, NODE_NAME
from devcluster.shell import find_program, run
from devcluster.teardown import remove_cluster
from devcluster.tools import Tools

# Memory, logs, image layers and volumes of pods of a running cluster.
_CLUSTER_DISK_BYTES = 3 * 10**9
_NODE_READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is on disk before the first process starts."""

    binaries: Mapping[str, Path]  # folder by Go module
    containerd: Path
    archives: Mapping[str, Path]  # image archive by image name


def verdict(paths: ClusterPaths) -> tuple[Verdict, Owner | None]:
    """What a state folder holds, seen from this checkout."""
    owner = load_owner(paths.owner)
    alive = {name: processes.is_alive(record) for name, record in processes.load_records(paths.records).items()}
    decided = judge(
        owner,
        checkout=str(CHECKOUT),
        checkout_exists=owner is not None and Path(owner.checkout).is_dir(),
        alive=alive,
        anything_there=paths.root.exists(),
    )
    return decided, owner


def _other_cluster(cache: Cache) -> ClusterPaths | None:
    """The machine's cluster when it lies in another cache."""
    root = network.bridge_owner()
    return ClusterPaths(root) if root is not None and root != cache.cluster.root else None


def refuse_foreign(cache: Cache) -> Verdict:
    """The verdict on this cache's cluster, unless the machine's running one belongs to another checkout or cache.

    Raises:
        DevClusterError: it does; the message says since when it runs and from where.
    """
    decided, owner = verdict(cache.cluster)
    if decided is Verdict.FOREIGN and owner:
        raise DevClusterError(running_elsewhere(owner))
    other = _other_cluster(cache)
    if decided is not Verdict.OURS and other is not None:
        theirs, their_owner = verdict(other)
        if theirs in (Verdict.OURS, Verdict.FOREIGN) and their_owner:
            raise DevClusterError(running_elsewhere(their_owner, cache=other.root.parent))
    return decided


def up(cache: Cache, log: Log, engine: Callable[[], Path | None]) -> None:
    """Bring the cluster to a Ready node, starting only what does not run as it should.

    Args:
        cache: the machine's cache. The caller has checked the machine and holds the cluster lock.
        log: progress lines.
        engine: gives the folder of the CPU engines' environment, made if that is wanted; None when there is none.
    """
    paths = cache.cluster
    decided = refuse_foreign(cache)
    if decided is not Verdict.OURS:
        _clear_remains(cache, decided, log)
    prepared = _prepare(cache, log)
    environment = engine() or _environment_in_use(paths)
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.root.chmod(0o700)
    if decided is not Verdict.OURS:
        preflight.check_kernel(paths.root)
        preflight.check_addresses()
        _claim(paths)
    plan = components.plan(paths, _installed(paths, prepared), _base_spec(cache, environment))
    pki.ensure_pki(paths)
    network.ensure_bridge(paths.root)
    cgroups.prepare()
    started = converge.converge(paths, plan, log)
    _load_node_images(paths, prepared.archives, log)
    if started or api.node_problem(paths):
        _wait_for_node(paths, plan, log)
    _apply_runtime_class(cache)
    log(f"the node {NODE_NAME} is Ready; kubeconfig: {paths.kubeconfig}")


def _clear_remains(cache: Cache, decided: Verdict, log: Log) -> None:
    other = _other_cluster(cache)
    if decided is Verdict.REMAINS or other is not None:
        log("clearing what a dead cluster left")
    if other is not None:
        remove_cluster(other, log)
    if decided is Verdict.REMAINS:
        remove_cluster(cache.cluster, log)


def _prepare(cache: Cache, log: Log) -> Prepared:
    go_version = gobuild.installed_go(cache)
    missing = [module for module in gobuild.MODULES if not gobuild.module_folder(cache, module, go_version).is_dir()]
    for module in missing:
        gobuild.check_go(go_version, module)
    if missing or not cache.cluster.root.exists():
        building_bytes = max((module.disk_bytes for module in missing), default=0)
        preflight.check_disk(cache.root, building_bytes + _CLUSTER_DISK_BYTES)
    packages.ensure_packages(log)
    clients.ensure_clients(cache, log)
    binaries = {module.name: gobuild.ensure_binaries(cache, module, go_version, log) for module in gobuild.MODULES}
    if missing:
        gobuild.drop_build_cache(cache, log)
    containerd = find_program("containerd")
    if containerd is None:
        raise DevClusterError("the program containerd is missing (Debian package containerd)")
    return Prepared(binaries, Path(containerd), images.ensure_node_images(cache))


def _claim(paths: ClusterPaths) -> None:
    since = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    write_text(paths.owner, Owner(str(CHECKOUT), since, processes.boot_id()).to_json())


def _installed(paths: ClusterPaths, prepared: Prepared) -> components.Installed:
    network.save_kernel_settings(paths.root / "kernel-settings.json")
    return components.Installed(
        kubernetes=prepared.binaries[gobuild.KUBERNETES.name],
        node=prepared.binaries[gobuild.NODE.name],
        containerd=prepared.containerd,
        cgroup_v2=cgroups.is_v2(),
        bridged_packets_filtered=network.prepare_kernel(),
    )


def _environment_in_use(paths: ClusterPaths) -> Path | None:
    """The engines' environment that this cluster mounts by an earlier ``up``."""
    note = paths.root / "engine-environment"
    environment = Path(note.read_text()) if note.exists() else None
    return environment if environment and environment.is_dir() else None


def _base_spec(cache: Cache, environment: Path | None) -> str:
    cache.models.mkdir(parents=True, exist_ok=True)
    base_prefix = None
    if environment is not None:
        write_text(cache.cluster.root / "engine-environment", str(environment))
        interpreter = environment / "bin" / "python"
        question = "import sys; print(sys.base_prefix)"
        base_prefix = Path(run([interpreter, "-ISc", question], what=f"asking {interpreter} for its prefix").strip())
    default_spec = json.loads(run(["ctr", "oci", "spec"], what="asking containerd for its default runtime spec"))
    return render_base_spec(default_spec, present(engine_mounts(environment, base_prefix, cache.models)))


def _load_node_images(paths: ClusterPaths, archives: Mapping[str, Path], log: Log) -> None:
    have = images.present_images(paths)
    for name, archive in archives.items():
        if name not in have:
            images.import_archive(paths, archive, log)


def _wait_for_node(paths: ClusterPaths, plan: tuple[components.Component, ...], log: Log) -> None:
    deadline, said = time.monotonic() + _NODE_READY_S, ""
    while problem := api.node_problem(paths):
        if problem != said:
            log(f"waiting: {problem}")
            said = problem
        converge.check_alive(paths, plan)
        if time.monotonic() > deadline:
            raise DevClusterError(
                f"the node is not Ready after {_NODE_READY_S:.0f} s: {problem}; "
                f"see `python -m devcluster logs kubelet`, or start afresh with `python -m devcluster down`"
            )
        time.sleep(0.1)


def _apply_runtime_class(cache: Cache) -> None:
    name = ENGINE_RUNTIME
    if (api.get(cache.cluster, f"/apis/node.k8s.io/v1/runtimeclasses/{name}") or {}).get("handler") == name:
        return
    manifest = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": name}
    Tools(cache).kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))
