"""Writes OCI image archives without a container tool: one layer, one manifest, the same bytes for the same content."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What a container of the image runs, and under which name the image is stored."""

    name: str  # as in "local.dev/pause:1"
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Blob:
    """Content addressed by its hash."""

    sha256: str
    size_bytes: int

    @property
    def digest(self) -> str:
        """The hash as OCI writes it."""
        return f"sha256:{self.sha256}"


def layer_of(folders: Sequence[str], programs: Mapping[str, Path], open_folders: Sequence[str] = ()) -> bytes:
    """An uncompressed layer.

    Args:
        folders: folders to make, parents first, mode 0755.
        programs: executable files by their path in the image.
        open_folders: folders to make with mode 1777, like /tmp.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for folder in (*folders, *open_folders):
            entry = tarfile.TarInfo(folder)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if folder in open_folders else 0o755
            layer.addfile(entry)
        for target, source in programs.items():
            content = source.read_bytes()
            entry = tarfile.TarInfo(target)
            entry.size, entry.mode = len(content), 0o755
            layer.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _measure(stream: IO[bytes]) -> Blob:
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return Blob(digest.hexdigest(), size)


def write_archive(target: Path, config: ImageConfig, layer: Path | bytes) -> None:
    """Write an OCI archive with one layer.

    Args:
        target: the archive; it appears whole or not at all.
        config: name and command.
        layer: an uncompressed tar, or the path of a gzip-compressed one.
    """
    if isinstance(layer, bytes):
        stored = unpacked = _measure(io.BytesIO(layer))
        media_type = "application/vnd.oci.image.layer.v1.tar"
    else:
        with layer.open("rb") as compressed:
            stored = _measure(compressed)
        with gzip.open(layer) as stream:
            unpacked = _measure(stream)
        media_type = "application/vnd.oci.image.layer.v1.tar+gzip"
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": list(config.entrypoint),
            "Cmd": list(config.command),
            "Env": [f"{name}={value}" for name, value in config.environment.items()],
        },
        "rootfs": {"type": "layers", "diff_ids": [unpacked.digest]},
        # buildah builds on an image only when its history accounts for every layer.
        "history": [{"created_by": "devcluster"}],
    }
    image_json = json.dumps(image).encode()
    image_blob = _measure(io.BytesIO(image_json))
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _reference("application/vnd.oci.image.config.v1+json", image_blob),
        "layers": [_reference(media_type, stored)],
    }
    manifest_json = json.dumps(manifest).encode()
    manifest_blob = _measure(io.BytesIO(manifest_json))
    # containerd reads the first annotation, buildah the second.
    names = {"io.containerd.image.name": config.name, "org.opencontainers.image.ref.name": config.name}
    entry = _reference("application/vnd.oci.image.manifest.v1+json", manifest_blob) | {"annotations": names}
    index_json = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with tarfile.open(partial, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", index_json)
        _add(archive, f"blobs/sha256/{manifest_blob.sha256}", manifest_json)
        _add(archive, f"blobs/sha256/{image_blob.sha256}", image_json)
        if isinstance(layer, bytes):
            _add(archive, f"blobs/sha256/{stored.sha256}", layer)
        else:
            entry_file = tarfile.TarInfo(f"blobs/sha256/{stored.sha256}")
            entry_file.size = stored.size_bytes
            with layer.open("rb") as content:
                archive.addfile(entry_file, content)
    partial.replace(target)


def _reference(media_type: str, blob: Blob) -> dict[str, object]:
    return {"mediaType": media_type, "digest": blob.digest, "size": blob.size_bytes}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
