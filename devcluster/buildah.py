"""Builds a Dockerfile without a Docker engine: buildah, on a base image made by debootstrap, into containerd."""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from devcluster import images
from devcluster.debian import ensure_base_archive
from devcluster.errors import DevClusterError
from devcluster.files import locked, read_json, write_text
from devcluster.paths import Cache
from devcluster.progress import Log, heartbeat
from devcluster.settings import BASE_IMAGE
from devcluster.shell import run, succeeds
from devcluster.traces import cleared_afterwards

_POLICY = '{"default":[{"type":"insecureAcceptAnything"}]}\n'


def declared_arguments(dockerfile: str) -> set[str]:
    """Names in the ``ARG`` lines of a Dockerfile's text, with or without a default."""
    lines = re.findall(r"^\s*ARG\s+(.+)$", dockerfile, re.MULTILINE | re.IGNORECASE)
    return {word.split("=", 1)[0] for line in lines for word in line.split()}


def build_options(dockerfile: str, given: Sequence[str], environ: Mapping[str, str], bundle: Path | None) -> list[str]:
    """Options of ``buildah build``: build arguments, and the machine's certificate authorities as a build secret.

    Args:
        dockerfile: its text. ``ARG BASE_IMAGE`` is answered with the local Debian image, ``ARG PIP_INDEX_URL`` with the
            caller's variable of that name.
        given: arguments as NAME=VALUE; they win.
        environ: the caller's environment.
        bundle: a file of certificate authorities: where a proxy signs for the package index, pip needs its authority.

    Raises:
        DevClusterError: an argument is not NAME=VALUE.
    """
    for argument in given:
        if not re.match(r"\w+=", argument):
            raise DevClusterError(f"--build-arg {argument} is not of the form NAME=VALUE")
    ours = {"BASE_IMAGE": BASE_IMAGE}
    if environ.get("PIP_INDEX_URL"):
        ours["PIP_INDEX_URL"] = environ["PIP_INDEX_URL"]
    values = {name: value for name, value in ours.items() if name in declared_arguments(dockerfile)}
    values |= dict(argument.split("=", 1) for argument in given)
    options = [part for name, value in values.items() for part in ("--build-arg", f"{name}={value}")]
    return [*options, "--secret", f"id=ca-certificates,src={bundle}"] if bundle else options


def _authorities() -> Path | None:
    named = os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt"
    return Path(named) if Path(named).is_file() else None


class Buildah:
    """buildah with all of its storage below the cache."""

    def __init__(self, cache: Cache, log: Log) -> None:
        self._root = cache.buildah
        self._log = log
        self._root.mkdir(parents=True, exist_ok=True)
        self._policy = self._root / "policy.json"
        write_text(self._policy, _POLICY)
        self._driver = self._pick_driver()

    def _pick_driver(self) -> str:
        chosen = self._root / "driver"
        if not chosen.exists():
            works = succeeds(self._argv("overlay", "images"))
            if not works:
                self._log("overlayfs can't be used by buildah here: building with copies instead, which is slower")
            write_text(chosen, "overlay" if works else "vfs")
        return chosen.read_text()

    def _argv(self, driver: str, *arguments: str | Path) -> list[str | Path]:
        storage = self._root / "storage"
        options = ["--storage-driver", driver, "--root", storage / driver, "--runroot", self._root / "run"]
        return ["buildah", *options, *arguments]

    def run(self, *arguments: str | Path, what: str, log_file: Path | None = None) -> str:
        """Run one buildah command."""
        temporary = self._root / "tmp"
        temporary.mkdir(exist_ok=True)
        env = {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(temporary), "HOME": str(self._root)}
        return run(self._argv(self._driver, *arguments), what=what, env=env, log_file=log_file)

    @property
    def policy(self) -> tuple[str | Path, ...]:
        """The option that lets local archives in: the machine may have no policy of its own."""
        return ("--signature-policy", self._policy)

    def ensure_base(self, archive: Path) -> None:
        """Put the base image into the storage unless this very archive is there."""
        note = self._root / f"base-{self._driver}"
        stamp = f"{archive} {archive.stat().st_mtime_ns}"
        known = note.exists() and note.read_text() == stamp
        if (
            known
            and self.run("images", "--quiet", "--filter", f"reference={BASE_IMAGE}", what="listing images").strip()
        ):
            return
        pulled = self.run("pull", "--quiet", *self.policy, f"oci-archive:{archive}", what="loading the base image")
        self.run("tag", pulled.split()[-1], BASE_IMAGE, what="naming the base image")
        write_text(note, stamp)


def build_image(cache: Cache, dockerfile: Path, context: Path, tag: str, arguments: Sequence[str], log: Log) -> None:
    """Build an image and import it into the cluster; steps that did not change come from buildah's own cache.

    Args:
        cache: the machine's cache.
        dockerfile: the Dockerfile. ``ARG BASE_IMAGE`` in it is set to the local Debian image.
        context: the folder that COPY reads from.
        tag: the image's name.
        arguments: build arguments as NAME=VALUE.
        log: progress lines.
    """
    tag = images.full_name(tag)
    if not dockerfile.is_file():
        raise DevClusterError(f"there is no Dockerfile {dockerfile}")
    if not context.is_dir():
        raise DevClusterError(f"the build context {context} is no folder")
    options = build_options(dockerfile.read_text(), arguments, os.environ, _authorities())
    base = ensure_base_archive(cache, log)
    with (
        locked(cache.locks / "buildah.lock", log, "an image build"),
        cleared_afterwards(cache.traces_of_builds),
    ):
        buildah = Buildah(cache, log)
        buildah.ensure_base(base)
        log_file = cache.buildah / "build.log"
        log_file.unlink(missing_ok=True)
        log(f"building {tag}")
        with heartbeat(log, f"building {tag}"):
            buildah.run(
                *(
                    "build",
                    "--layers",
                    "--pull-never",
                    *buildah.policy,
                    *options,
                    "--file",
                    dockerfile,
                    "--tag",
                    tag,
                    context,
                ),
                what=f"building {tag} from {dockerfile}",
                log_file=log_file,
            )
        image_id = buildah.run("images", "--quiet", "--no-trunc", tag, what=f"looking up {tag}").split()[0]
        _deliver(cache, buildah, tag, image_id, log)


def _deliver(cache: Cache, buildah: Buildah, tag: str, image_id: str, log: Log) -> None:
    paths = cache.cluster
    note = paths.root / "images" / f"{re.sub(r'[^A-Za-z0-9.-]', '_', tag)}.json"
    delivered = (read_json(note) or {}).get("id") == image_id
    if delivered and tag in images.present_images(paths):
        log(f"image {tag} is unchanged and in the cluster")
        return
    folder = Path(tempfile.mkdtemp(prefix="push-", dir=cache.buildah))
    try:
        archive = folder / "image.tar"
        buildah.run("push", "--quiet", *buildah.policy, tag, f"oci-archive:{archive}:{tag}", what=f"packing {tag}")
        images.import_archive(paths, archive, log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_text(note, f'{{"id": "{image_id}"}}\n')
