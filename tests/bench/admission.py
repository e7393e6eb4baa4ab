"""`make bench-admission`: how long the webhook takes to answer, over HTTPS, with 50 clients connected at once.

The real process on loopback. Each client keeps a connection, as the API server does. Requests begin at random times,
as many a second as the name of a figure says. A latency is what a client sees, from the first byte sent to
the last one read, and the clients share the machine with the webhook. A call of `dcpctl` comes last: the same rules,
and mostly the time in which Python starts.
"""

import asyncio
import copy
import json
import random
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.report import Figure, publish
from tests.support.specimens import SPECIMEN
from tests.support.webhook_process import HOST, WebhookProcess, review, webhook_process

CLIENTS = 50
#: Requests per second of all clients together: a burst of applies, and a release that rewrites the largest objects.
TYPICAL_RATE, LARGE_RATE = 100.0, 2.0
TYPICAL_REQUESTS, LARGE_REQUESTS = 3000, 100
#: What etcd takes, less a margin for what the API server adds.
LARGEST_BYTES = 1_400_000


def typical() -> dict[str, Any]:
    """An object with a pod template and arguments for each role, as users write them."""
    manifest = copy.deepcopy(SPECIMEN)
    main = {
        "name": "main",
        "env": [{"name": f"V{number}", "value": "x"} for number in range(10)],
        "resources": {"requests": {"cpu": "16", "memory": "64Gi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {"containers": [main], "volumes": [{"name": "data", "emptyDir": {}}], "nodeSelector": {"gpu": "h200"}}
    for role in ("prefill", "decode"):
        manifest["spec"][role] |= {
            "extraArgs": ["--max-num-seqs=256", "--enable-prefix-caching", "--max-num-batched-tokens", "8192"],
            "template": {"metadata": {"labels": {"team": "search"}}, "spec": copy.deepcopy(pod)},
        }
    return manifest


def largest() -> dict[str, Any]:
    """The typical object with as many bytes in a pod template as etcd takes: long values, such as scripts and files."""
    manifest = typical()
    value = "x" * 10_000
    count = LARGEST_BYTES // len(value)
    main = manifest["spec"]["decode"]["template"]["spec"]["containers"][0]
    main["env"] = [{"name": f"V{number}", "value": value} for number in range(count)]
    return manifest


def many_entries() -> dict[str, Any]:
    """The typical object with 10 000 variables: more than any, and the work grows with their number."""
    manifest = typical()
    main = manifest["spec"]["decode"]["template"]["spec"]["containers"][0]
    main["env"] = [{"name": f"V{number}", "value": "x"} for number in range(10_000)]
    return manifest


async def _one(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    began = time.perf_counter()
    async with session.post(url, data=body) as answer:
        content = await answer.read()
    took = time.perf_counter() - began
    assert json.loads(content)["response"]["allowed"], content
    return took


async def _paced(webhook: WebhookProcess, body: bytes, rate: float, requests: int) -> list[float]:
    """Latencies in seconds of requests that begin at random times, `rate` a second, whatever earlier ones take.

    Each goes over the next client's connection; one that is still busy makes it wait, and the waiting counts.
    """
    dice = random.Random(1)
    url = f"https://{HOST}:{webhook.port}/validate"
    sessions = [_session(webhook) for _ in range(CLIENTS)]
    running: list[asyncio.Task[float]] = []
    try:
        await asyncio.gather(*(_one(session, url, body) for session in sessions))
        due = time.perf_counter()
        for number in range(requests):
            due += dice.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.append(asyncio.create_task(_one(sessions[number % CLIENTS], url, body)))
        return await asyncio.gather(*running)
    finally:
        for session in sessions:
            await session.close()


async def _at_once(webhook: WebhookProcess, body: bytes, rounds: int) -> float:
    """Median time until 50 requests that are sent in the same moment are all answered, in seconds."""
    url = f"https://{HOST}:{webhook.port}/validate"
    sessions = [_session(webhook) for _ in range(CLIENTS)]
    try:
        await asyncio.gather(*(_one(session, url, body) for session in sessions))
        took: list[float] = []
        for _ in range(rounds):
            took.append(max(await asyncio.gather(*(_one(session, url, body) for session in sessions))))
        return statistics.median(took)
    finally:
        for session in sessions:
            await session.close()


def _session(webhook: WebhookProcess) -> aiohttp.ClientSession:
    context = ssl.create_default_context(cafile=str(webhook.folder / "tls.crt"))
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1, ssl=context))


def _body(manifest: dict[str, Any]) -> bytes:
    return json.dumps(review(manifest)).encode()


async def _load(
    webhook: WebhookProcess, name: str, body: bytes, rate: float, requests: int, target_ms: float | None
) -> list[Figure]:
    """One load and what came of it. Processor time doesn't depend on what else the machine does; latencies do."""
    before = webhook.cpu_s()
    latencies = await _paced(webhook, body, rate, requests)
    used = (webhook.cpu_s() - before) / (len(latencies) + CLIENTS)
    size = f"{len(body) / 1e3:.1f} kB" if len(body) < 1e6 else f"{len(body) / 1e6:.2f} MB"
    name = f"{name} ({size}), {rate:.0f}/s"
    return [
        Figure(f"{name}, p50", statistics.median(latencies) * 1e3, "ms"),
        Figure(f"{name}, p99", statistics.quantiles(latencies, n=100)[98] * 1e3, "ms", target=target_ms),
        Figure(f"{name}, processor time of the webhook", used * 1e3, "ms"),
    ]


async def measure(webhook: WebhookProcess) -> list[Figure]:
    """All figures, one load after another."""
    small, large, many = _body(typical()), _body(largest()), _body(many_entries())
    return [
        *await _load(webhook, "typical object", small, TYPICAL_RATE, TYPICAL_REQUESTS, 10.0),
        *await _load(webhook, "largest object", large, LARGE_RATE, LARGE_REQUESTS, 50.0),
        *await _load(webhook, "10 000 variables", many, LARGE_RATE, LARGE_REQUESTS, None),
        Figure("50 typical objects in one moment, the last answer", await _at_once(webhook, small, 20) * 1e3, "ms"),
    ]


def dcpctl_s(rounds: int = 7) -> float:
    """Median processor time of `dcpctl validate` with the typical object, in seconds."""
    took: list[float] = []
    for _ in range(rounds + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "dcp_operator", "validate", "-f", "-"]
        subprocess.run(command, input=json.dumps(typical()).encode(), stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # The first one may compile byte code.
    return statistics.median(took[1:])


def main() -> int:
    """Run the bench. Exit code 0 when all targets are reached, 1 when not."""
    with tempfile.TemporaryDirectory() as folder, webhook_process(Path(folder)) as webhook:
        figures = asyncio.run(measure(webhook))
    figures.append(Figure("dcpctl validate, processor time of a call", dcpctl_s(), "s", target=0.5))
    return 0 if publish("admission", figures) else 1


if __name__ == "__main__":
    sys.exit(main())
