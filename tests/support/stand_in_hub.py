"""A module with the two calls of huggingface_hub that the model's Job makes, for places where the real one isn't.

tests/contract/test_model_pull.py runs the same program with the real client against a small hub.
"""

from pathlib import Path

#: Environment of the module: an error to raise, names of files that go missing, a file that counts the downloads, and a
#: folder that somebody else fills while this download runs.
FAIL, LOSE, COUNT = "STAND_IN_HUB_FAIL", "STAND_IN_HUB_LOSE", "STAND_IN_HUB_COUNT"
MEANWHILE = "STAND_IN_HUB_MEANWHILE"

MODULE = """\
import json
import os
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

FILES = {"config.json": "{}", "weights/model.safetensors": "weights", "pytorch_model.bin": "weights again"}


class HfApi:
    def model_info(self, repository, *, revision=None, files_metadata=False):
        if "STAND_IN_HUB_FAIL" in os.environ:
            raise OSError(os.environ["STAND_IN_HUB_FAIL"])
        files = [SimpleNamespace(rfilename=name, size=len(text)) for name, text in FILES.items()]
        return SimpleNamespace(sha=f"commit-of-{revision}", siblings=files)


def snapshot_download(repository, *, revision, local_dir, ignore_patterns=()):
    lost = os.environ.get("STAND_IN_HUB_LOSE", "").split(",")
    (Path(local_dir) / ".cache").mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        if name not in lost and not any(fnmatch(name, pattern) for pattern in ignore_patterns):
            path = Path(local_dir) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if "STAND_IN_HUB_MEANWHILE" in os.environ:
        other = Path(os.environ["STAND_IN_HUB_MEANWHILE"])
        other.mkdir()
        marker = {"repository": repository, "revision": revision.removeprefix("commit-of-")}
        (other / ".dcp-model.json").write_text(json.dumps(marker))
    if "STAND_IN_HUB_COUNT" in os.environ:
        with open(os.environ["STAND_IN_HUB_COUNT"], "a") as count:
            count.write(f"{repository} {revision}\\n")
    return local_dir
"""


def write_module(folder: Path) -> None:
    """Write the module to where a PYTHONPATH with this folder finds it."""
    (folder / "huggingface_hub.py").write_text(MODULE)
