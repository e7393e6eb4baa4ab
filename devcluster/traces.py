"""Files that buildah leaves at paths built into it. What was there before a build is not ours and stays."""

import contextlib
import json
from collections.abc import Generator, Sequence
from pathlib import Path

from devcluster.files import read_json, write_text

BUILDAH_TRACES = (
    "/etc/cni/net.d/cni.lock",
    "/var/cache/containers/short-name-aliases.conf.lock",
    "/var/lib/containers/cache/blob-info-cache-v1.boltdb",
)

# /etc and /var/lib always stay; what lies below them goes when it is empty.
_KEPT = (Path("/etc"), Path("/var/cache"), Path("/var/lib"))


@contextlib.contextmanager
def cleared_afterwards(note: Path, traces: Sequence[str] = BUILDAH_TRACES) -> Generator[None]:
    """Remove the traces that appear inside the block.

    Args:
        note: a file that holds, while the block runs, which traces are ours: a killed build's are known by it later.
        traces: absolute paths.
    """
    ours = set((read_json(note) or {}).get("ours", [])) | {path for path in traces if not Path(path).exists()}
    write_text(note, json.dumps({"ours": sorted(ours)}) + "\n")
    try:
        yield
    finally:
        clear_noted(note)


def clear_noted(note: Path) -> None:
    """Remove the traces in a note, and the folders that are empty then. No note: nothing to do."""
    for name in (read_json(note) or {}).get("ours", []):
        path = Path(name)
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if any(kept.is_relative_to(folder) for kept in _KEPT):
                break
            with contextlib.suppress(OSError):  # not empty, or not there
                folder.rmdir()
    note.unlink(missing_ok=True)
