"""Many requests through real engines, with clients that leave and engines that die: `python -m tests.soak`.

Prefill TP 1, decode TP 2 with DCP 2, tiny model, CPU. A tenth of the clients hang up; a third of the way in prefill is
killed and started again, at two thirds decode. In the end every answer that came was right, nothing is held, and memory
is flat; an engine without the connector answers the same prompts first, to be compared with. Prints a table and writes
build/bench/soak.json; fails if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from devcluster.completions import CompletionError, complete, complete_all, get_text
from tests.bench.report import Figure, publish
from tests.support.engines import EngineSpec, RunningEngine, start_engine
from tests.support.pd_pair import PDPair, eventually, metric

MAX_TOKENS = 4
NUM_PROMPTS = 200
CONCURRENCY = 6
#: A client that hangs up does so within this.
LONGEST_VISIT_S = 0.3
#: An answer may take so long: what the deadline and the grace allow, and recomputing on a loaded machine.
LATEST_S = 60.0
#: A small KV cache: its memory counts as used once a block was, and all of them soon are.
SMALL_CACHE = "--num-gpu-blocks-override=400"
#: oneDNN keeps a compiled kernel for every length of a batch that it has seen, up to 1,024; here lengths are many.
NO_KERNEL_CACHE = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
#: What an engine may grow, in MiB per 1,000 requests; one without the connector is measured beside it.
MAX_GROWTH_MIB = 16.0
PLAIN = EngineSpec(args=(SMALL_CACHE,), env=(NO_KERNEL_CACHE,))
PREFILL = EngineSpec(role="kv_producer", connector=(("lease_s", 20.0),), args=(SMALL_CACHE,), env=(NO_KERNEL_CACHE,))
DECODE = EngineSpec(
    tensor=2,
    dcp=2,
    interleave=8,
    role="kv_consumer",
    load_failure_policy="recompute",
    connector=(("request_timeout_s", 10.0), ("cancel_grace_s", 1.0)),
    # With a prefix cache the second request with a prompt would fetch nothing.
    args=("--no-enable-prefix-caching", SMALL_CACHE),
    env=(NO_KERNEL_CACHE,),
)


@dataclass
class Engines:
    """Both engines as they are now. `pair` is replaced when one was started again."""

    folder: Path
    pair: PDPair
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: role -> (requests so far, resident bytes of all processes of the engine)
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"prefill": [], "decode": []})

    def restart(self, role: str) -> None:
        """Kill an engine in the middle of its work and start another one in its place."""
        old = self.pair.prefill if role == "prefill" else self.pair.decode
        old.group.signal(signal.SIGKILL)
        old.group.stop()
        new = start_engine(old.spec, self.folder).wait()
        with self.lock:
            self.pair = PDPair(new, self.pair.decode) if role == "prefill" else PDPair(self.pair.prefill, new)
            self.memory[role].clear()

    def sample(self, count: int) -> None:
        """Note how much memory each engine uses."""
        for role, engine in (("prefill", self.pair.prefill), ("decode", self.pair.decode)):
            self.memory[role].append((count, resident_bytes(engine)))

    def stop(self) -> None:
        """Stop both."""
        for engine in (self.pair.prefill, self.pair.decode):
            engine.group.stop()


def resident_bytes(engine: RunningEngine) -> int:
    """Private memory of an engine's processes; shared pages, which are counted for each of them, left out."""
    total = 0
    for pid in engine.group.members():
        try:
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        except OSError:
            continue
        total += sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) * 1024
    return total


def start(folder: Path) -> Engines:
    """Start both engines side by side."""
    prefill, decode = start_engine(PREFILL, folder), start_engine(DECODE, folder)
    try:
        return Engines(folder, PDPair(prefill.wait(), decode.wait()))
    except BaseException:
        prefill.group.stop()
        decode.group.stop()
        raise


def hang_up(url: str, body: dict[str, object], after_s: float) -> None:
    """Ask and leave without waiting for the answer."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), 10) as sock:
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(after_s)


class Traffic:
    """Clients. `outcomes` counts what became of their requests."""

    def __init__(self, engines: Engines, expected: dict[str, tuple[int, ...]], seed: int) -> None:
        self.engines = engines
        self.expected = expected
        self.prompts = list(expected)
        self.seed = seed
        self.outcomes: Counter[str] = Counter()
        self.latest_s = 0.0

    def one(self, number: int) -> None:
        """Send request `number` by a flow and with a fate that its number decides."""
        rng = random.Random(self.seed * 1_000_003 + number)
        with self.engines.lock:
            pair = self.engines.pair
        prompt, fate = rng.choice(self.prompts), rng.random()
        started = time.monotonic()
        try:
            if fate < 0.05:
                params = pair.to_decode(f"left-{self.seed}-{number}")
                body = {"prompt": prompt, "max_tokens": 64, "kv_transfer_params": params}
                hang_up(pair.decode.url, body, rng.random() * LONGEST_VISIT_S)
                outcome = "client left decode"
            elif fate < 0.10:
                params = {"do_remote_decode": True, "do_remote_prefill": False}
                body = {"prompt": prompt, "max_tokens": 64, "kv_transfer_params": params}
                hang_up(pair.prefill.url, body, rng.random() * LONGEST_VISIT_S)
                outcome = "client left prefill"
            else:
                flow = pair.serially if rng.random() < 0.5 else pair.concurrently
                answer = flow(prompt, max_tokens=MAX_TOKENS)
                outcome = "right" if answer.token_ids == self.expected[prompt] else "WRONG"
                self.latest_s = max(self.latest_s, time.monotonic() - started)
        except (CompletionError, OSError, AssertionError, ValueError):
            # An engine is away, or died with the request.
            outcome = "engine away"
            time.sleep(0.5)
        self.outcomes[outcome] += 1


def slope_bytes_per_1000(samples: Sequence[tuple[int, int]]) -> float:
    """Return how memory grows with requests, without the first quarter, in which caches fill."""
    steady = samples[len(samples) // 4 :]
    if len(steady) < 3:
        return 0.0
    counts, sizes = np.array(steady, dtype=float).T
    return float(np.polyfit(counts, sizes, 1)[0] * 1000)


def make_prompts(seed: int) -> list[str]:
    """Return prompts of many lengths."""
    rng = random.Random(seed)
    words = ["quick ", "brown ", "fox ", "jumps ", "over ", "the ", "lazy ", "dog "]
    return [f"{n} " + "".join(rng.choices(words, k=rng.randint(1, 50))) for n in range(NUM_PROMPTS)]


def plain_growth(folder: Path, prompts: Sequence[str], num_requests: int) -> float:
    """Return how an engine without the connector grows while it computes as many prompts, in bytes per 1,000."""
    engine = start_engine(PLAIN, folder).wait()
    samples: list[tuple[int, int]] = []
    try:
        rng = random.Random(len(prompts))
        step = max(1, num_requests // 50)
        for first in range(0, num_requests, step):
            complete_all(engine.url, rng.choices(prompts, k=step), max_tokens=1, concurrency=CONCURRENCY)
            samples.append((first + step, resident_bytes(engine)))
    finally:
        engine.group.stop()
    return slope_bytes_per_1000(samples)


def kv_usage(engine: RunningEngine) -> float:
    """The share of KV blocks in use, as the engine said when it last computed."""
    lines = get_text(engine.url, "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc{"))


def soak(engines: Engines, prompts: Sequence[str], num_requests: int, seed: int, plain: float) -> list[Figure]:
    """Run the traffic; return the figures. `plain` is what `plain_growth` returned."""
    answers = complete_all(engines.pair.prefill.url, prompts, max_tokens=MAX_TOKENS, concurrency=CONCURRENCY)
    traffic = Traffic(engines, {p: a.token_ids for p, a in zip(prompts, answers, strict=True)}, seed)
    complete(engines.pair.decode.url, prompts[0], max_tokens=MAX_TOKENS)
    usage = {engine: kv_usage(engine) for engine in (engines.pair.prefill, engines.pair.decode)}
    usage_at_start = max(usage.values())
    restarts = {num_requests // 3: "prefill", 2 * num_requests // 3: "decode"}
    step = max(1, num_requests // 80)
    began = time.monotonic()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for first in range(0, num_requests, step):
            portion = range(first, min(first + step, num_requests))
            due = [role for at, role in restarts.items() if at in portion]
            running = [pool.submit(traffic.one, number) for number in portion]
            for role in due:
                engines.restart(role)
            for future in running:
                future.result()
            engines.sample(portion[-1] + 1)
            if first // step % 10 == 0:
                print(
                    f"{portion[-1] + 1:6} requests, {time.monotonic() - began:6.1f} s, {dict(traffic.outcomes)}",
                    flush=True,
                )
    took = time.monotonic() - began
    pair = engines.pair
    # A lease and a deadline end what a client or an engine left behind; a request lets the engines look.
    eventually(lambda: metric(pair.prefill, "pinned_requests", suffix="") == 0, 60)
    pair.still_works()
    eventually(lambda: max(kv_usage(pair.prefill), kv_usage(pair.decode)) <= usage_at_start, 30)
    staging = sum(metric(engine, "staging_bytes", suffix="") for engine in (pair.prefill, pair.decode))
    growth = {role: slope_bytes_per_1000(samples) for role, samples in engines.memory.items()}
    print(f"{num_requests} requests in {took:.0f} s: {dict(traffic.outcomes)}")
    return [
        Figure("requests", num_requests, "requests"),
        Figure("seconds", took, "s"),
        Figure("right answers", traffic.outcomes["right"], "requests", target=num_requests * 0.7, better="higher"),
        Figure("wrong answers", traffic.outcomes["WRONG"], "requests", target=0),
        Figure("engine away", traffic.outcomes["engine away"], "requests", target=num_requests * 0.15),
        Figure("slowest answer", traffic.latest_s, "s", target=LATEST_S),
        Figure(
            "KV usage at the end", max(kv_usage(pair.prefill), kv_usage(pair.decode)), "share", target=usage_at_start
        ),
        Figure("pinned requests", metric(pair.prefill, "pinned_requests", suffix=""), "requests", target=0),
        Figure("pinned blocks", metric(pair.prefill, "pinned_blocks", suffix=""), "blocks", target=0),
        Figure("staging in use", staging, "bytes", target=0),
        Figure("plain engine's memory per 1000 requests", plain / 2**20, "MiB"),
        *(
            Figure(f"{role} memory per 1000 requests", slope / 2**20, "MiB", target=MAX_GROWTH_MIB)
            for role, slope in growth.items()
        ),
    ]


def main(arguments: list[str]) -> int:
    """Run the soak; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="requests in all (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="decides prompts, flows and who hangs up")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dcp-soak-") as folder:
        prompts = make_prompts(options.seed)
        plain = plain_growth(Path(folder), prompts, 2 * options.requests // 3)
        engines = start(Path(folder))
        try:
            figures = soak(engines, prompts, options.requests, options.seed, plain)
        finally:
            engines.stop()
    return 0 if publish("soak", figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
