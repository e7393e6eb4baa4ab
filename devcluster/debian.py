"""The local Debian base image for Dockerfiles, made by debootstrap from the machine's own package mirror."""

from pathlib import Path

from devcluster.files import ensure_folder
from devcluster.oci import ImageConfig, write_archive
from devcluster.paths import Cache
from devcluster.progress import Log, heartbeat
from devcluster.settings import BASE_IMAGE, DEBIAN_SUITE
from devcluster.shell import run, succeeds

# python3-venv brings pip into virtual environments without Debian's compilers.
INCLUDED = ("ca-certificates", "python3", "python3-venv")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_GENERATION = 2  # raise it when the recipe below changes what is in the image


def mirror_of(index_targets: str) -> str | None:
    """The site of the suite in the output of ``apt-get indextargets``; None leaves it to debootstrap."""
    for line in index_targets.splitlines():
        site, _, release = line.partition(" ")
        if release.strip() == DEBIAN_SUITE and site.startswith("http"):
            return site
    return None


def _mirror() -> list[str]:
    listing = run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)", "Created-By: Packages"],
        what="asking apt for the Debian mirror",
    )
    mirror = mirror_of(listing)
    return [mirror] if mirror else []


def _fill(folder: Path) -> None:
    root, layer = folder / "rootfs", folder / "layer.tar.gz"
    run(
        ["debootstrap", "--variant=minbase", f"--include={','.join(INCLUDED)}", DEBIAN_SUITE, root, *_mirror()],
        what="debootstrap, fetching Debian packages for the base image,",
        log_file=folder / "debootstrap.log",
    )
    succeeds(["umount", "--lazy", root / "proc"])
    for pattern in (
        "var/cache/apt/archives/*.deb",
        "var/lib/apt/lists/*_*",
        "var/log/bootstrap.log",
        "var/cache/apt/*.bin",
    ):
        for path in root.glob(pattern):
            path.unlink()
    # The fastest compression: the archive is read again and again on this machine, and never travels.
    run(
        ["tar", "--numeric-owner", "--use-compress-program=gzip -1", "-C", root, "-cf", layer, "."],
        what="packing the base image",
    )
    config = ImageConfig(BASE_IMAGE, command=("/bin/sh",), environment={"PATH": _PATH})
    write_archive(folder / "image.tar", config, layer)
    layer.unlink()
    run(["rm", "-rf", "--one-file-system", root], what="removing the unpacked base image")


def ensure_base_archive(cache: Cache, log: Log) -> Path:
    """The OCI archive of the base image; made once, about a minute."""
    folder = cache.images / f"debian-{DEBIAN_SUITE}-{_GENERATION}"
    if not folder.is_dir():
        log(f"making the base image {BASE_IMAGE} with debootstrap: about a minute, once")
        with heartbeat(log, "making the base image"):
            ensure_folder(folder, _fill, log, "the base image", cache.locks / "base-image.lock")
    return folder / "image.tar"
