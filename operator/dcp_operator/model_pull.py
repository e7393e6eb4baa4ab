"""The program of the Job that pulls a model of a hub into a claim, run by the engine's Python: `python3 -c` with this.

It needs nothing but Python and huggingface_hub. The folder of the model appears at once and complete, by a rename, with
a file in it that names what it holds:

    FOLDER/.dcp-model.json    {"repository": ..., "revision": ..., "commit": ...}, written last
    .NAME.JOB.partial         beside FOLDER, while this Job pulls; a Job that begins again goes on there

A folder with the right file is the model, and nothing is done. One with another file, or without one, is left alone.

The hub's client takes what an earlier try left for the whole model while the hub can't be reached. So the commit is
asked for first, and afterwards every file that it has is looked for.
"""

import importlib
import json
import os
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

MARKER = ".dcp-model.json"


class PullError(Exception):
    """The model can't be pulled; the message says why and what to do."""


def pull(repository: str, revision: str | None, folder: Path, job: str) -> str:
    """Bring a model into `folder`, unless it is there; return what was done. Raises PullError."""
    wanted: dict[str, str | None] = {"repository": repository, "revision": revision}
    if is_there(folder, wanted):
        return f"{folder} holds {said(wanted)} already"
    partial = folder.with_name(f".{folder.name}.{job}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    commit = download(repository, revision, partial)
    # What the hub's client keeps for going on with a download.
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    (partial / MARKER).write_text(json.dumps({**wanted, "commit": commit}))
    try:
        partial.rename(folder)
    except OSError as error:
        # Another object's Job can have been quicker.
        if not is_there(folder, wanted):
            raise PullError(f"{partial} can't become {folder}: {error}") from error
        shutil.rmtree(partial)
    return f"pulled {said(wanted)} into {folder}"


def is_there(folder: Path, wanted: dict[str, str | None]) -> bool:
    """Whether `folder` is the wanted model. Raises PullError where it holds anything else."""
    try:
        found = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        if folder.exists() and any(folder.iterdir()):
            raise PullError(
                f"{folder} exists and was not pulled by such a Job; state another folder in spec.model.cache.path, or "
                "serve what is there with a pvc:// URI"
            ) from None
        return False
    except (OSError, ValueError) as error:
        raise PullError(f"{folder / MARKER} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise PullError(f"{folder / MARKER} holds no map; remove the folder, or state another one")
    held = cast("dict[str, Any]", found)
    if {name: held.get(name) for name in wanted} != wanted:
        raise PullError(
            f"{folder} holds {said(held)}, and {said(wanted)} is wanted; state another folder in spec.model.cache.path"
        )
    return True


def said(model: dict[str, str | None]) -> str:
    """Return a model in words."""
    revision = model.get("revision")
    return f"{model.get('repository')}{f' at {revision}' if revision else ''}"


def download(repository: str, revision: str | None, folder: Path) -> str:
    """Have the hub's client put all files of a repository into a folder; return the commit. Raises PullError."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise PullError(f"the engine's image has no huggingface_hub for {sys.executable}: {error}") from error
    try:
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
        files = info.siblings or ()
        unread = patterns_of_unread([file.rfilename for file in files])
        hub.snapshot_download(repository, revision=info.sha, local_dir=str(folder), ignore_patterns=unread)
    except Exception as error:
        # The client's own errors, those of the network and those of the disk: whatever it is, it is said and ends here.
        text = " ".join(str(error).split())
        raise PullError(f"{repository} can't be pulled: {type(error).__name__}{f': {text}' if text else ''}") from error
    for file in files:
        if not any(fnmatch(file.rfilename, pattern) for pattern in unread):
            check(file, folder)
    return info.sha


def patterns_of_unread(names: list[str]) -> list[str]:
    """Return patterns of the files of a repository that vLLM does not read: the same weights in other formats."""
    unread = ["original/*", "*.h5", "*.msgpack", "*.onnx", "*.ot"]
    if any(name.endswith(".safetensors") for name in names):
        unread += ["pytorch_model*.bin", "*.pt", "*.pth"]
    return unread


def check(file: Any, folder: Path) -> None:
    """Raise PullError unless a file that the hub has is in the folder, as large as there."""
    path = folder / file.rfilename
    size = path.stat().st_size if path.is_file() else None
    if size is None or (file.size is not None and size != file.size):
        found = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
        raise PullError(f"the hub's client ended without an error, and {file.rfilename} {found}")


def main() -> int:
    """Pull what the environment names; return 1 where that fails, with the reason in the last line of the output."""
    environment = os.environ
    try:
        done = pull(
            environment["DCP_MODEL_REPOSITORY"],
            environment.get("DCP_MODEL_REVISION"),
            Path(environment["DCP_MODEL_FOLDER"]),
            environment["DCP_MODEL_JOB"],
        )
    except (PullError, OSError) as error:
        print(f"model pull: {error}", file=sys.stderr)
        return 1
    print(f"model pull: {done}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
