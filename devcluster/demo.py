"""`make demo`: from a clone to tokens, on a real Kubernetes node, with the answers checked against a plain engine."""

import json
import sys
from pathlib import Path

from devcluster import preflight, release, startup
from devcluster.commands import guarded
from devcluster.completions import Completion, complete
from devcluster.deployments import RESOURCE, Movement, condition, read_movement, wait_until_ready
from devcluster.engine import environment, profile
from devcluster.errors import DevClusterError
from devcluster.files import locked
from devcluster.paths import CHECKOUT, Cache, this_cache
from devcluster.progress import Log, Progress
from devcluster.settings import ENGINE_MOUNT
from devcluster.tools import Tools
from devcluster.workloads import ENGINE_PORT, PLAIN_ENGINE, models_claim, plain_engine

NAMESPACE = "dcp-demo"
NAME = "cpu-demo"
EXAMPLE = CHECKOUT / "examples" / "cpu-demo.yaml"
REFUSED = CHECKOUT / "examples" / "refused" / "dcp-does-not-divide-tp.yaml"
MODEL = "tiny-mqa"
MAX_TOKENS = 16

#: Lengths around the edges of a 32-token block and of the 64 tokens that a block holds over two DCP ranks.
PROMPTS = (
    "Prefill",
    "computes the prompt",
    "while decode generates.",
    "Token i of the KV cache lives on rank (i // interleave) % dcp.",
    "One block of 32 tokens on each of two ranks holds 64 tokens.....",
    "One token more than that, and a second block of the table is used.",
    "A longer prompt takes several steps of chunked prefill before its KV cache moves to the decode side. " * 3,
)


def main() -> int:
    """Run the demo. Exit code 0 when all tokens are equal, 1 when not, 2 with one sentence when a step failed."""
    log, cache = Progress(), this_cache()
    return guarded("make demo", cache, lambda: _demo(cache, log))


def _demo(cache: Cache, log: Log) -> int:
    preflight.check_machine(cache)
    with locked(cache.locks / "cluster.lock", log, "the local cluster"):
        startup.up(cache, log, lambda: environment.ensure_engine_environment(cache.root, log))
        models = environment.ensure_models(cache.root, log)
    tools = release.deploy(cache, log)
    _show_refusal(tools, log)
    _apply_example(tools, models, log)
    wait_until_ready(tools.kubectl, NAMESPACE, NAME, log)
    log(f"{NAME} is Ready")
    _show_proof(tools, log)
    tools.kubectl(
        "wait", f"pod/{PLAIN_ENGINE}", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=240s", timeout_s=260
    )
    before = read_movement(tools.kubectl, NAMESPACE, NAME)
    pairs = _ask_both(tools, log)
    moved = read_movement(tools.kubectl, NAMESPACE, NAME) - before
    equal = _report(pairs, moved)
    _say_next(cache)
    return 0 if equal else 1


def _show_refusal(tools: Tools, log: Log) -> None:
    log(f"kubectl apply -f {REFUSED.relative_to(CHECKOUT)}")
    _ensure_namespace(tools)
    try:
        tools.kubectl("apply", "-n", NAMESPACE, "-f", REFUSED)
    except DevClusterError as refusal:
        print(f"\n    refused, as it should be:\n    {refusal}\n")
        return
    raise DevClusterError(
        f"{REFUSED.name} was accepted, but its decode side could never start: is the webhook installed?"
    )


def _ensure_namespace(tools: Tools) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    tools.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))


def _apply_example(tools: Tools, models: Path, log: Log) -> None:
    plain = plain_engine(NAMESPACE, MODEL, args=list(profile.ARGUMENTS), env=profile.environment(ENGINE_MOUNT))
    around = {"apiVersion": "v1", "kind": "List", "items": [*models_claim(NAMESPACE, models), plain]}
    tools.kubectl("apply", "-f", "-", stdin=json.dumps(around))
    log(f"kubectl apply -f {EXAMPLE.relative_to(CHECKOUT)}")
    said = tools.kubectl("apply", "-n", NAMESPACE, "-f", EXAMPLE)
    print(f"    {said.strip()}")


def _show_proof(tools: Tools, log: Log) -> None:
    """Wait for the operator's own check; its prompt is then not among those that are counted below."""
    tools.kubectl(
        *("wait", f"{RESOURCE}/{NAME}", "-n", NAMESPACE, "--for=condition=KVTransferVerified", "--timeout=90s"),
        timeout_s=100,
    )
    resource = json.loads(tools.kubectl("get", RESOURCE, NAME, "-n", NAMESPACE, "-o", "json"))
    log(f"KVTransferVerified: {condition(resource, 'KVTransferVerified')['message']}")


def _ask_both(tools: Tools, log: Log) -> list[tuple[Completion, Completion]]:
    """Ask the router's Service and the plain engine for the same prompts."""
    service = json.loads(tools.kubectl("get", "service", NAME, "-n", NAMESPACE, "-o", "json"))["spec"]
    router = f"http://{service['clusterIP']}:{service['ports'][0]['port']}"
    pod = json.loads(tools.kubectl("get", "pod", PLAIN_ENGINE, "-n", NAMESPACE, "-o", "json"))
    plain = f"http://{pod['status']['podIP']}:{ENGINE_PORT}"
    log(f"sending {len(PROMPTS)} prompts through the router's Service ({router}) and to the plain engine")
    return [
        (
            complete(router, prompt, model=NAME, max_tokens=MAX_TOKENS),
            complete(plain, prompt, model=PLAIN_ENGINE, max_tokens=MAX_TOKENS),
        )
        for prompt in PROMPTS
    ]


def _report(pairs: list[tuple[Completion, Completion]], moved: Movement) -> bool:
    print(f"\n    {'prompt tokens':>13}  {'equal':5}  through prefill and decode | by one plain engine")
    for ours, plain in pairs:
        verdict = "yes" if ours.token_ids == plain.token_ids else "NO"
        print(f"    {ours.prompt_tokens:>13}  {verdict:5}  {ours.text!r} | {plain.text!r}")
    equal = all(ours.token_ids == plain.token_ids for ours, plain in pairs)
    if moved.received_bytes == 0:
        print("\n    NO KV CACHE MOVED: decode computed all prompts itself. The engines' logs say why.\n")
        return False
    print(
        f"\n    {'All tokens are equal.' if equal else 'TOKENS DIFFER.'}"
        f" {moved.sent_bytes:,.0f} bytes of KV cache left prefill and {moved.received_bytes:,.0f} reached decode,"
        f" for {moved.received_tokens:,.0f} prompt tokens;"
        f" decode computed {moved.decode_computed_tokens:,.0f} prompt tokens without fetching them.\n"
    )
    return equal


def _say_next(cache: Cache) -> None:
    print(
        f'Try next (after: eval "$(.venv/bin/python -m devcluster env)"):\n'
        f"    kubectl describe dcpd {NAME} -n {NAMESPACE}\n"
        f"    kubectl get pods -n {NAMESPACE} -L dcpdisagg.io/role,dcpdisagg.io/revision\n"
        f"    .venv/bin/dcpctl render -f {EXAMPLE.relative_to(CHECKOUT)}\n"
        f"and `make demo-down` to remove everything but the cache in {cache.root}."
    )


if __name__ == "__main__":
    sys.exit(main())
