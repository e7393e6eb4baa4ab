"""What the end-to-end tests do with the line: apply objects, ask the router, read what moved."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from devcluster.completions import Completion, complete_all
from devcluster.deployments import RESOURCE, wait_until_ready
from devcluster.engine import profile
from devcluster.errors import DevClusterError
from devcluster.paths import CHECKOUT
from devcluster.progress import Log
from devcluster.settings import ENGINE_MOUNT
from devcluster.tools import Tools
from devcluster.workloads import ENGINE_PORT, PLAIN_ENGINE, plain_engine

EXAMPLE = CHECKOUT / "examples" / "cpu-demo.yaml"
MAX_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Line:
    """The installed operator, and the namespace that the tests use."""

    tools: Tools
    namespace: str
    log: Log

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Run kubectl in the tests' namespace."""
        return self.tools.kubectl(*arguments, "-n", self.namespace, stdin=stdin, timeout_s=timeout_s)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return one object."""
        return json.loads(self.kubectl("get", kind, name, "-o", "json"))

    def names(self, kinds: str, selector: str) -> set[str]:
        """Return the objects of some kinds that carry a label, as kind/name."""
        return set(self.kubectl("get", kinds, "-l", selector, "-o", "name").split())

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """Apply one object, as `kubectl apply` does."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def apply_dry(self, manifest: Mapping[str, Any]) -> None:
        """Have the API server and the webhook judge an object without storing it."""
        self.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))

    def refusal(self, manifest: Mapping[str, Any]) -> str:
        """Apply an object that must be refused, and return the words of the refusal."""
        try:
            self.apply(manifest)
        except DevClusterError as refusal:
            return str(refusal)
        raise AssertionError(f"accepted: {manifest}")

    @contextmanager
    def deployed(self, manifest: Mapping[str, Any]) -> Iterator[str]:
        """A DCPDisaggDeployment that is Ready; deleted afterwards, with all its pods gone. Gives its name."""
        name = manifest["metadata"]["name"]
        self.apply(manifest)
        try:
            wait_until_ready(self.tools.kubectl, self.namespace, name, self.log)
            yield name
        finally:
            self.kubectl("delete", RESOURCE, name, "--ignore-not-found", "--cascade=foreground", timeout_s=150)
            self.kubectl(
                "wait", "pod", "-l", f"dcpdisagg.io/name={name}", "--for=delete", "--timeout=120s", timeout_s=130
            )

    def router_url(self, name: str) -> str:
        """Return the address of the object's Service: what a client in the cluster uses."""
        service = self.get("service", name)["spec"]
        return f"http://{service['clusterIP']}:{service['ports'][0]['port']}"

    def ask(self, base_url: str, model: str, prompts: list[str], *, at_once: int = 1) -> list[Completion]:
        """Return a completion for each prompt, in order, with some of them in flight at the same time."""
        return complete_all(base_url, prompts, model=model, max_tokens=MAX_TOKENS, concurrency=at_once)

    @contextmanager
    def plain_engine(self, model: str) -> Iterator[str]:
        """A pod with one engine that knows nothing of P/D. Gives its address."""
        self.apply(
            plain_engine(self.namespace, model, args=list(profile.ARGUMENTS), env=profile.environment(ENGINE_MOUNT))
        )
        try:
            self.kubectl("wait", f"pod/{PLAIN_ENGINE}", "--for=condition=Ready", "--timeout=300s", timeout_s=310)
            yield f"http://{self.get('pod', PLAIN_ENGINE)['status']['podIP']}:{ENGINE_PORT}"
        finally:
            self.kubectl("delete", "pod", PLAIN_ENGINE, "--wait=true")


def example(name: str, *, interleave: int = 32, decode_env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return examples/cpu-demo.yaml under another name, with another interleave and more variables for decode."""
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"] = {"name": name}
    # Its prompt would be among those that tests count.
    manifest["spec"]["transferCheck"] = {"enabled": False}
    decode = manifest["spec"]["decode"]
    decode["kvCacheInterleaveSize"] = interleave
    main = next(entry for entry in decode["template"]["spec"]["containers"] if entry["name"] == "main")
    main["env"] = [*main.get("env", []), *({"name": key, "value": value} for key, value in (decode_env or {}).items())]
    return manifest
