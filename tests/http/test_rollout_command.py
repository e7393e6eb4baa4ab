"""`dcpctl rollout` as a process, beside an API server that answers as it is told: its words and its exit codes."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dcp_operator.build import Context
from dcp_operator.build.history import build_history
from tests.support.objects import owner
from tests.support.specimens import loaded

DCPCTL = Path(sys.executable).with_name("dcpctl")
Body = dict[str, Any]
Answer = tuple[int, Body]
Answers = Answer | list[Answer]


@contextmanager
def api_server(answers: dict[tuple[str, str], Answers]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A server with an answer for each (method, end of the path), else 404; yields its address and what was asked.

    Of several answers each is given once, the last one for ever.
    """
    asked: list[tuple[str, str]] = []
    left = {which: list(given) if isinstance(given, list) else [given] for which, given in answers.items()}

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            asked.append((self.command, path))
            found = (given for (method, end), given in left.items() if self.command == method and path.endswith(end))
            given = next(found, [(404, {"reason": "NotFound", "message": "not found"})])
            status, body = given.pop(0) if len(given) > 1 else given[0]
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_PATCH = answer  # noqa: N815 - the names that http.server calls

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - as the base class has it
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def dcpctl(folder: Path, address: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a command with a kubeconfig of two contexts, the second with a namespace of its own."""
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "one",
        "clusters": [{"name": "here", "cluster": {"server": address}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
        "contexts": [
            {"name": "one", "context": {"cluster": "here", "user": "me"}},
            {"name": "two", "context": {"cluster": "here", "user": "me", "namespace": "team-b"}},
        ],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(kubeconfig))
    result = subprocess.run(
        [DCPCTL, "rollout", *arguments],
        env={**os.environ, "KUBECONFIG": str(path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result


def revisions() -> list[Body]:
    """Return the history of an object that had another image."""
    spec = loaded({"spec": owner(image="acme/engine:0")["spec"]}).spec
    manifests = build_history(Context("chat", "default", spec, "-", uid="owner-uid"), "abc", [])
    return [
        {**manifest, "metadata": {**manifest["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}}
        for manifest in manifests
    ]


def undo_answered(status: int, body: Body) -> dict[tuple[str, str], Answers]:
    return {
        ("GET", "/dcpdisaggdeployments/chat"): (200, owner(namespace="default")),
        ("GET", "/controllerrevisions"): (200, {"metadata": {}, "items": revisions()}),
        ("PATCH", "/dcpdisaggdeployments/chat"): (status, body),
    }


@pytest.mark.parametrize(
    ("arguments", "namespace"),
    [((), "default"), (("--context", "two"), "team-b"), (("--context", "two", "-n", "other"), "other")],
    ids=["the current context has none", "that of the context", "the one that is named"],
)
def test_the_namespace_is_the_one_that_kubectl_would_take(tmp_path: Path, arguments: tuple[str, ...], namespace: str):
    with api_server({}) as (address, asked):
        result = dcpctl(tmp_path, address, "status", "chat", *arguments)
    assert result.returncode == 2
    assert f"there is no DCPDisaggDeployment chat in namespace {namespace}" in result.stderr
    assert asked == [("GET", f"/apis/dcpdisagg.io/v1alpha1/namespaces/{namespace}/dcpdisaggdeployments/chat")]


def test_an_undo_is_one_patch_of_the_object(tmp_path: Path):
    with api_server(undo_answered(200, owner(namespace="default"))) as (address, asked):
        result = dcpctl(tmp_path, address, "undo", "chat")
    assert (result.returncode, result.stdout) == (0, "default/chat goes back to state 1\n")
    assert [method for method, _ in asked].count("PATCH") == 1


TAKEN = (409, {"reason": "Conflict", "message": "the object has been modified"})


def versioned(version: str, generation: int) -> Answer:
    body = owner(namespace="default")
    body["metadata"] |= {"resourceVersion": version, "generation": generation}
    return 200, body


def test_reports_of_the_operator_meanwhile_are_no_edit(tmp_path: Path):
    answers = undo_answered(200, owner(namespace="default"))
    answers["GET", "/dcpdisaggdeployments/chat"] = [versioned("7", 2), versioned("8", 2), versioned("9", 2)]
    answers["PATCH", "/dcpdisaggdeployments/chat"] = [TAKEN, TAKEN, (200, owner(namespace="default"))]
    with api_server(answers) as (address, asked):
        result = dcpctl(tmp_path, address, "undo", "chat")
    assert (result.returncode, result.stdout) == (0, "default/chat goes back to state 1\n")
    assert [method for method, _ in asked].count("PATCH") == 3


def test_an_edit_meanwhile_is_not_undone_unseen(tmp_path: Path):
    answers = undo_answered(*TAKEN)
    answers["GET", "/dcpdisaggdeployments/chat"] = [versioned("7", 2), versioned("8", 3)]
    with api_server(answers) as (address, asked):
        result = dcpctl(tmp_path, address, "undo", "chat")
    assert result.returncode == 1
    assert [method for method, _ in asked].count("PATCH") == 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [(409, "the object has been modified"), (403, "denied by the webhook: [dcp-divides-tp]"), (422, "invalid")],
    ids=["edited meanwhile", "refused by admission", "invalid"],
)
def test_an_undo_that_the_api_server_refuses_says_its_words(tmp_path: Path, status: int, reason: str):
    with api_server(undo_answered(status, {"reason": "No", "message": reason})) as (address, _):
        result = dcpctl(tmp_path, address, "undo", "chat")
    assert result.returncode == 1
    assert result.stderr == f"the API server refuses it: {reason}\n"


def test_a_server_that_is_not_there_and_a_context_that_does_not_exist_are_said_in_words(tmp_path: Path):
    with api_server({}) as (address, _):
        pass
    gone = dcpctl(tmp_path, address, "history", "chat")
    assert gone.returncode == 2
    assert "the API server does not answer" in gone.stderr
    wrong = dcpctl(tmp_path, address, "history", "chat", "--context", "three")
    assert wrong.returncode == 2
    assert "no usable context three" in wrong.stderr
