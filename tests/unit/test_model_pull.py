"""The program of the model's Job, run as the Job runs it, with a stand-in for the hub's client."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dcp_operator.build.model_job import program
from dcp_operator.model_pull import MARKER, patterns_of_unread
from tests.support.stand_in_hub import COUNT, FAIL, LOSE, MEANWHILE, write_module


class Claim:
    """A volume, and Jobs that pull into it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "models"
        self.root.mkdir()
        self.count = folder / "count"
        self._hub = folder / "hub"
        self._hub.mkdir()
        write_module(self._hub)

    def pull(self, folder: str = "tiny", revision: str | None = "v1", job: str = "chat", **more: str):
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self._hub),
            COUNT: str(self.count),
            "DCP_MODEL_REPOSITORY": "acme/tiny",
            "DCP_MODEL_FOLDER": str(self.root / folder),
            "DCP_MODEL_JOB": job,
            **({"DCP_MODEL_REVISION": revision} if revision else {}),
            **more,
        }
        return subprocess.run(
            [sys.executable, "-c", program()], env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    @property
    def pulls(self) -> int:
        return len(self.count.read_text().splitlines()) if self.count.exists() else 0

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return Claim(tmp_path)


WHOLE = {"config.json", "weights/model.safetensors", MARKER}


def test_the_model_is_there_complete_and_says_what_it_is(claim: Claim):
    result = claim.pull()
    assert (result.returncode, result.stderr) == (0, "")
    assert claim.files() == {f"tiny/{name}" for name in WHOLE}
    marker = json.loads((claim.root / "tiny" / MARKER).read_text())
    assert marker == {"repository": "acme/tiny", "revision": "v1", "commit": "commit-of-v1"}
    assert result.stdout == f"model pull: pulled acme/tiny at v1 into {claim.root}/tiny\n"


def test_a_model_that_is_there_is_not_pulled_again_whoever_asks(claim: Claim):
    claim.pull()
    for job in ("chat", "code"):
        result = claim.pull(job=job)
        assert (result.returncode, claim.pulls) == (0, 1)
        assert "holds acme/tiny at v1 already" in result.stdout


@pytest.mark.parametrize(
    ("names", "unread"),
    [
        (
            ["model.safetensors", "pytorch_model-1.bin", "extra.pth", "tokenizer.model"],
            {"pytorch_model-1.bin", "extra.pth"},
        ),
        (["pytorch_model.bin", "config.json"], set()),
        (
            ["original/params.json", "original/a/b.safetensors", "flax_model.msgpack", "tf_model.h5", "a.json"],
            {"original/params.json", "original/a/b.safetensors", "flax_model.msgpack", "tf_model.h5"},
        ),
    ],
)
def test_the_same_weights_in_formats_that_vllm_does_not_read_are_not_pulled(names: list[str], unread: set[str]):
    patterns = patterns_of_unread(names)
    assert {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)} == unread


def test_a_folder_below_others_is_made(claim: Claim):
    assert claim.pull("llms/tiny").returncode == 0
    assert claim.files() == {f"llms/tiny/{name}" for name in WHOLE}


def test_a_pull_that_ended_in_the_middle_is_taken_up_again(claim: Claim):
    failed = claim.pull(**{LOSE: "weights/model.safetensors"})
    assert failed.returncode == 1
    assert not (claim.root / "tiny").exists(), "nothing that is not whole is ever at the model's place"
    assert claim.pull().returncode == 0
    assert claim.files() == {f"tiny/{name}" for name in WHOLE}


ENDS = {
    "the hub's error": (
        {FAIL: "401 Client Error\nRepository Not Found"},
        "acme/tiny can't be pulled: OSError: 401 Client Error Repository Not Found",
    ),
    "a file that the client left out": (
        {LOSE: "config.json"},
        "the hub's client ended without an error, and config.json is missing",
    ),
    "an image without the client": (
        {"PYTHONPATH": ""},
        f"the engine's image has no huggingface_hub for {sys.executable}: No module named 'huggingface_hub'",
    ),
}


@pytest.mark.parametrize(("environment", "words"), ENDS.values(), ids=ENDS.keys())
def test_what_fails_is_said_in_one_line_without_a_traceback(claim: Claim, environment: dict[str, str], words: str):
    result = claim.pull(**environment)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"model pull: {words}\n"


def test_another_model_in_the_folder_is_left_alone(claim: Claim):
    claim.pull()
    before = claim.files()
    for revision in ("v2", None):
        result = claim.pull(revision=revision)
        assert result.returncode == 1
        wanted = "acme/tiny at v2" if revision else "acme/tiny"
        assert f"holds acme/tiny at v1, and {wanted} is wanted; state another folder in " in result.stderr
    assert (claim.files(), claim.pulls) == (before, 1)


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_a_folder_that_no_job_made_is_left_alone(claim: Claim, content: str | None):
    folder = claim.root / "tiny"
    folder.mkdir()
    (folder / ("mine" if content is None else MARKER)).write_text(content or "")
    result = claim.pull()
    assert (result.returncode, claim.pulls) == (1, 0)
    assert result.stderr.startswith("model pull: ")
    assert result.stderr.count("\n") == 1
    assert len(claim.files()) == 1


def test_an_empty_folder_that_was_made_by_hand_becomes_the_models(claim: Claim):
    (claim.root / "tiny").mkdir()
    assert claim.pull().returncode == 0
    assert claim.files() == {f"tiny/{name}" for name in WHOLE}


def test_of_two_that_pull_at_once_one_wins_and_neither_fails(claim: Claim):
    result = claim.pull(**{MEANWHILE: str(claim.root / "tiny")})
    assert (result.returncode, result.stderr) == (0, "")
    assert claim.files() == {f"tiny/{MARKER}"}, "the other one's folder stays, and what this one pulled goes"
