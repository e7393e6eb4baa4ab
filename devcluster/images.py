"""The two images that every cluster has, and the way of any image into containerd."""

import hashlib
from pathlib import Path

from devcluster.errors import DevClusterError
from devcluster.oci import ImageConfig, layer_of, write_archive
from devcluster.paths import Cache, ClusterPaths
from devcluster.progress import Log
from devcluster.settings import ENGINE_IMAGE, PAUSE_IMAGE
from devcluster.shell import find_program, run

# As the first process of a pod, a plain `sleep` would ignore SIGTERM, and the pod would take long to end.
_PAUSE = "trap 'exit 0' TERM INT; while :; do sleep 2147483647 & wait $!; done"
_ROOT_FOLDERS = ("bin", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "usr", "var")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Where pause keeps its shell: a runtime may mount the host's folders over /bin and /usr.
_PAUSE_SHELL = "pause/busybox"


def _busybox() -> Path:
    found = find_program("busybox")
    if not found:
        raise DevClusterError(
            "the program busybox is missing (Debian package busybox-static): the pause image holds it"
        )
    return Path(found).resolve()


def ensure_node_images(cache: Cache) -> dict[str, Path]:
    """The archives of the pause image and of the CPU engines' nearly empty image, by image name."""
    busybox = _busybox()
    key = hashlib.sha256(busybox.read_bytes() + _PAUSE.encode() + repr(_ROOT_FOLDERS).encode()).hexdigest()[:12]
    pause, engine = cache.images / f"pause-{key}.tar", cache.images / f"cpu-engine-{key}.tar"
    if not pause.exists():
        config = ImageConfig(PAUSE_IMAGE, entrypoint=(f"/{_PAUSE_SHELL}", "sh", "-c", _PAUSE))
        write_archive(
            pause, config, layer_of(("dev", "etc", "pause", "proc", "sys"), {_PAUSE_SHELL: busybox}, ("tmp",))
        )
    if not engine.exists():
        config = ImageConfig(ENGINE_IMAGE, command=("/bin/sh",), environment={"PATH": _PATH})
        # Without the host's folders over it (any other runtime), the image still has a shell.
        programs = {"bin/busybox": busybox, "bin/sh": busybox}
        write_archive(engine, config, layer_of(_ROOT_FOLDERS, programs, ("tmp", "var/tmp")))
    return {PAUSE_IMAGE: pause, ENGINE_IMAGE: engine}


def full_name(name: str) -> str:
    """The name under which a kubelet looks an image up: with a registry and a tag.

    A first part without a dot, a colon, and that is not "localhost" is no registry: "a/b:1" means "docker.io/a/b:1".
    """
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif not (set(".:") & set(first) or first == "localhost"):
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def ctr(paths: ClusterPaths, *arguments: str | Path, what: str, timeout_s: float | None = None) -> str:
    """Run containerd's client in the namespace that the kubelet uses."""
    return run(
        ["ctr", "--address", paths.containerd_socket, "--namespace", "k8s.io", *arguments],
        what=what,
        timeout_s=timeout_s,
    )


def present_images(paths: ClusterPaths) -> set[str]:
    """Names of the images that containerd has."""
    return set(ctr(paths, "images", "list", "--quiet", what="listing images").split())


def digest(paths: ClusterPaths, image: str) -> str:
    """Return the digest of an image that containerd has, by its full name.

    Raises:
        DevClusterError: containerd has no such image.
    """
    listing = ctr(paths, "images", "list", f"name=={image}", what=f"looking up {image}").splitlines()
    found = [word for line in listing[1:] for word in line.split() if word.startswith("sha256:")]
    if not found:
        raise DevClusterError(f"the image {image} is not in the local cluster; `make image` builds and loads it")
    return found[0]


def import_archive(paths: ClusterPaths, archive: Path, log: Log) -> list[str]:
    """Import an OCI or Docker archive. Returns the names of its images.

    Raises:
        DevClusterError: the file is missing or no image archive.
    """
    if not archive.is_file():
        raise DevClusterError(f"there is no image archive {archive}")
    said = ctr(paths, "images", "import", archive, what=f"importing {archive}")
    names = [line.split()[1].rstrip(".") for line in said.splitlines() if line.startswith("unpacking ")]
    for name in names:
        log(f"image {name} is in the cluster")
    return names
