"""The program of the model's Job with the engines' own huggingface_hub, against a hub on this machine.

The hub answers what the client asks of it: the commit and the files of a revision, the tree of a commit, and the files.
"""

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dcp_operator.build.model_job import program
from dcp_operator.model_pull import MARKER
from devcluster.engine.environment import ensure_engine_environment
from devcluster.paths import this_cache

COMMIT = "c0ffee" * 6 + "c0ff"
FILES = {"config.json": b'{"model_type": "llama"}', "weights/part-1.safetensors": bytes(range(256)) * 2000}
#: What the hub has beside that, and vLLM doesn't read.
OTHERS = {"pytorch_model.bin": b"the same weights"}
TOKEN = "hf_" + "x" * 20


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, which one token may read."""

    protocol_version = "HTTP/1.1"
    #: Paths that are answered with an error while they are here.
    broken: frozenset[str] = frozenset()
    asked: list[str]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base class
        self.asked.append(self.path)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path in self.broken:
            self._send(403, b"{}")
        elif path in ("/api/models/acme/tiny/revision/v1", "/api/models/acme/tiny"):
            everything = {**FILES, **OTHERS}
            files = [{"rfilename": name, "size": len(data), "blobId": oid(data)} for name, data in everything.items()]
            self._json({"id": "acme/tiny", "sha": COMMIT, "siblings": files})
        elif path == f"/api/models/acme/tiny/tree/{COMMIT}":
            everything = {**FILES, **OTHERS}
            files = [{"type": "file", "path": n, "size": len(data), "oid": oid(data)} for n, data in everything.items()]
            self._json(files)
        elif path.startswith(f"/acme/tiny/resolve/{COMMIT}/"):
            data = FILES[path.removeprefix(f"/acme/tiny/resolve/{COMMIT}/")]
            self._send(200, data, {"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    do_HEAD = do_GET  # noqa: N815 - the base class calls it so

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def oid(data: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    handler = type("OneHub", (Hub,), {"broken": frozenset(), "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
        thread.join()


def pull(endpoint: str, folder: Path, *, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    python = ensure_engine_environment(this_cache().root, lambda message: None) / "bin" / "python3"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder.parent),
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "DCP_MODEL_REPOSITORY": "acme/tiny",
        "DCP_MODEL_REVISION": "v1",
        "DCP_MODEL_FOLDER": str(folder),
        "DCP_MODEL_JOB": "chat",
    }
    command = [str(python), "-c", program()]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_real_client_pulls_a_model_once(hub: tuple[str, type[Hub]], tmp_path: Path):
    endpoint, handler = hub
    folder = tmp_path / "models" / "tiny"
    first = pull(endpoint, folder)
    assert first.returncode == 0, first.stderr
    found = content(folder)
    assert json.loads(found.pop(MARKER)) == {"repository": "acme/tiny", "revision": "v1", "commit": COMMIT}
    assert found == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    asked = len(handler.asked)
    assert pull(endpoint, folder).returncode == 0
    assert len(handler.asked) == asked, "what is there is not asked for again"


def test_a_model_of_which_a_part_is_there_is_not_taken_for_whole_while_the_hub_is_away(
    hub: tuple[str, type[Hub]], tmp_path: Path
):
    endpoint, handler = hub
    folder = tmp_path / "models" / "tiny"
    handler.broken = frozenset({f"/acme/tiny/resolve/{COMMIT}/weights/part-1.safetensors"})
    interrupted = pull(endpoint, folder)
    assert interrupted.returncode == 1
    partial = folder.parent / ".tiny.chat.partial"
    assert (partial / "config.json").exists(), "the client left a part, or the test means nothing"
    away = pull("http://127.0.0.1:9", folder)
    assert away.returncode == 1
    assert away.stderr.splitlines()[-1].startswith("model pull: acme/tiny can't be pulled: ")
    assert not folder.exists()
    handler.broken = frozenset()
    assert pull(endpoint, folder).returncode == 0
    assert content(folder).keys() == {*FILES, MARKER}


def test_a_token_that_may_not_read_the_model_is_said(hub: tuple[str, type[Hub]], tmp_path: Path):
    refused = pull(hub[0], tmp_path / "models" / "tiny", token="hf_" + "y" * 20)
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("model pull: acme/tiny can't be pulled: RepositoryNotFoundError: 401 Client Error")
    assert "Traceback" not in refused.stderr
