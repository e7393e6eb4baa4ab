"""Many requests through real engines, with clients that leave and engines that die: `python -m tests.soak`.

Prefill TP 1, decode TP 2 with DCP 2, tiny model, CPU. A tenth of the clients hang up; a third of the way in prefill is
killed and started again, at two thirds decode. An engine without the connector, prefill's twin, computes the same
prompts first: its answers are the right ones, and its memory is what prefill's is compared with. Decode has no twin:
no engine without the connector does what decode does, which computes no prompts.

A request may go without an answer only if an engine was away in its time. In the end every answer that came was right,
nothing is held or kept out of use, and memory is flat. Prints a table and writes build/bench/soak.json; fails if a
target is missed.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from devcluster.completions import complete_all, get_text
from devcluster.errors import DevClusterError
from tests.bench.report import Figure, publish
from tests.soak.memory import Growth, growth, resident_bytes, twin_growth
from tests.soak.traffic import AWAY, FAILED, LEFT_DECODE, LEFT_PREFILL, MAX_TOKENS, RIGHT, WRONG, Restarts, Traffic
from tests.support.engines import EngineSpec, RunningEngine, start_engine
from tests.support.pd_pair import PDPair, eventually, held, settled

Role = Literal["prefill", "decode"]

NUM_PROMPTS = 200
CONCURRENCY = 6
#: Fewer have too few samples of memory.
LEAST_REQUESTS = 200
#: Decode gives up waiting for KV after the deadline, and for the writers' word after the grace.
DEADLINE_S, GRACE_S, LEASE_S = 10.0, 1.0, 20.0
#: A request may take so long if an engine dies: what the deadline and the grace allow, and recomputing on a loaded
#: machine. Any other is answered before the deadline, or its KV didn't come.
LATEST_S = 60.0
#: A lease, a deadline and word of an engine's end free what was left behind within this.
SETTLE_S = 60.0
#: A small KV cache: its memory counts as used once a block was, and all of them soon are.
SMALL_CACHE = "--num-gpu-blocks-override=400"
#: oneDNN keeps a compiled kernel for every length of a batch that it has seen, up to 1,024; here lengths are many.
NO_KERNEL_CACHE = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
#: What an engine may grow, in MiB per 1,000 requests, and by how much more than its twin. A difference and no ratio,
#: because the twin may well not grow at all.
MAX_GROWTH_MIB, MAX_BEYOND_TWIN_MIB = 16.0, 8.0
#: With a prefix cache decode's second request with a prompt would fetch nothing.
DECODE_ARGS = ("--no-enable-prefix-caching", SMALL_CACHE)
TWIN = EngineSpec(args=(SMALL_CACHE,), env=(NO_KERNEL_CACHE,))
ENGINES: Mapping[Role, EngineSpec] = {
    "prefill": EngineSpec(
        role="kv_producer", connector=(("lease_s", LEASE_S),), args=(SMALL_CACHE,), env=(NO_KERNEL_CACHE,)
    ),
    "decode": EngineSpec(
        tensor=2,
        dcp=2,
        interleave=8,
        role="kv_consumer",
        load_failure_policy="recompute",
        connector=(("request_timeout_s", DEADLINE_S), ("cancel_grace_s", GRACE_S)),
        args=DECODE_ARGS,
        env=(NO_KERNEL_CACHE,),
    ),
}
_FAILED_TRANSFERS = re.compile(r'^vllm:dcp_kv_failed_transfers_total\{.*reason="(\w+)".*\} (\S+)$', re.MULTILINE)


@contextmanager
def running(specs: Mapping[Role, EngineSpec], folder: Path) -> Iterator[dict[Role, RunningEngine]]:
    """Start engines side by side; those that the dictionary holds at the end are stopped."""
    engines = {role: start_engine(spec, folder) for role, spec in specs.items()}
    try:
        for engine in engines.values():
            engine.wait()
        yield engines
    finally:
        for engine in engines.values():
            engine.stop()


@dataclass
class Pair:
    """Both engines as they are now. `present` is another pair when one was started again."""

    folder: Path
    engines: dict[Role, RunningEngine]
    restarts: Restarts = field(default_factory=Restarts)
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: (requests so far, resident bytes of all processes of the engine), since it started
    memory: dict[Role, list[tuple[int, int]]] = field(default_factory=lambda: {"prefill": [], "decode": []})

    def present(self) -> PDPair:
        """Return the engines to ask."""
        with self.lock:
            return PDPair(self.engines["prefill"], self.engines["decode"])

    def restart(self, role: Role) -> None:
        """Kill an engine in the middle of its work and start another one in its place."""
        old = self.engines[role]
        with self.restarts.window():
            old.group.signal(signal.SIGKILL)
            old.stop()
            new = start_engine(old.spec, self.folder)
            with self.lock:
                self.engines[role] = new
            new.wait()
        self.memory[role].clear()

    def sample(self, count: int) -> None:
        """Note how much memory each engine uses."""
        for role, engine in self.engines.items():
            self.memory[role].append((count, resident_bytes(engine)))


@dataclass(frozen=True, slots=True)
class Twin:
    """What the engine without the connector gave: the right answers, and how it grew."""

    answers: dict[str, tuple[int, ...]]
    growth: Growth


def make_prompts(seed: int) -> list[str]:
    """Return prompts of many lengths."""
    rng = random.Random(seed)
    words = ["quick ", "brown ", "fox ", "jumps ", "over ", "the ", "lazy ", "dog "]
    return [f"{n} " + "".join(rng.choices(words, k=rng.randint(1, 50))) for n in range(NUM_PROMPTS)]


def measure_twin(folder: Path, prompts: Sequence[str], num_requests: int) -> Twin:
    """Run the twin: it computes as many requests as prefill does after it was started again."""
    with running({"prefill": TWIN}, folder) as twins:
        twin = twins["prefill"]
        slope = twin_growth(twin, prompts, 2 * num_requests // 3, max_tokens=1, concurrency=CONCURRENCY)
        answers = complete_all(twin.url, prompts, max_tokens=MAX_TOKENS, concurrency=CONCURRENCY)
    return Twin({prompt: answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)}, slope)


def kv_usage(pair: PDPair) -> float:
    """The larger share of KV blocks in use, as the engines said when they last computed."""
    shares: list[float] = []
    for engine in (pair.prefill, pair.decode):
        lines = get_text(engine.url, "/metrics").splitlines()
        shares += [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc{")]
    return max(shares)


def failed_transfers(pair: PDPair) -> Counter[str]:
    """Requests that decode got no KV for, by reason, since it started."""
    found = _FAILED_TRANSFERS.findall(get_text(pair.decode.url, "/metrics"))
    return Counter({reason: int(float(number)) for reason, number in found})


def run_traffic(pair: Pair, traffic: Traffic, num_requests: int) -> Counter[str]:
    """Send all requests and restart the engines. Returns the failed transfers of undisturbed times, by reason."""
    restarts: dict[int, Role] = {num_requests // 3: "prefill", 2 * num_requests // 3: "decode"}
    step = portion_size(num_requests)
    began = time.monotonic()
    failed: Counter[str] = Counter()
    before = failed_transfers(pair.present())
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for first in range(0, num_requests, step):
            portion = range(first, min(first + step, num_requests))
            due = [role for at, role in restarts.items() if at in portion]
            portion_began = time.monotonic()
            futures = [pool.submit(traffic.one, number) for number in portion]
            for role in due:
                futures[len(futures) // 4].result()
                pair.restart(role)
            for future in futures:
                future.result()
            pair.sample(portion[-1] + 1)
            now = failed_transfers(pair.present())
            # What decode waited for in vain from an engine that had died is over after the deadline and the grace.
            if not pair.restarts.overlap(portion_began, time.monotonic(), DEADLINE_S + GRACE_S):
                failed += now - before
            before = now
            if first // step % 10 == 0:
                took = time.monotonic() - began
                print(f"{portion[-1] + 1:6} requests, {took:6.1f} s, {dict(traffic.record.outcomes)}", flush=True)
    return failed


def portion_size(num_requests: int) -> int:
    """Return how many requests are sent between two looks at memory, more than run at the same time."""
    return max(3 * CONCURRENCY, num_requests // 80)


def holds(check: Callable[[], None]) -> bool:
    """Make a check. One that fails says why, and the run goes on: the other figures are wanted too."""
    try:
        check()
    except (AssertionError, DevClusterError) as error:
        print(f"at the end: {error}", flush=True)
        return False
    return True


def soak(pair: Pair, twin: Twin, num_requests: int, seed: int) -> list[Figure]:
    """Run the traffic; return the figures."""
    traffic = Traffic(pair.present, pair.restarts, twin.answers, seed, DEADLINE_S + GRACE_S)
    prompt, right = next(iter(twin.answers.items()))
    now = pair.present()
    settled(now.prefill, now.decode)
    usage_at_start = kv_usage(now)
    began = time.monotonic()
    failed = run_traffic(pair, traffic, num_requests)
    took = time.monotonic() - began
    record = traffic.record
    print(f"{num_requests} requests in {took:.0f} s: {dict(record.outcomes)}")
    for words in record.words:
        print(f"  {words}")
    if failed:
        print(f"transfers that failed although no engine was away: {dict(failed)}")
    now = pair.present()
    checks = (
        lambda: settled(now.prefill, now.decode, timeout_s=SETTLE_S),
        lambda: now.still_works(prompt, right),
        lambda: eventually(lambda: kv_usage(now) <= usage_at_start, 30.0, lambda: "KV blocks are still in use"),
    )
    missed = sum(not holds(check) for check in checks)
    asked = num_requests - record.outcomes[LEFT_PREFILL] - record.outcomes[LEFT_DECODE]
    # Each of the two restarts falls into one portion.
    excusable = 2 * portion_size(num_requests)
    left = {name: value + held(now.decode)[name] for name, value in held(now.prefill).items()}
    return [
        Figure("requests", num_requests, "requests"),
        Figure("seconds", took, "s"),
        Figure("right answers", record.outcomes[RIGHT], "requests", target=asked - excusable, better="higher"),
        Figure("wrong answers", record.outcomes[WRONG], "requests", target=0),
        Figure("failed while both engines ran", record.outcomes[FAILED], "requests", target=0),
        Figure("failed while an engine was away", record.outcomes[AWAY], "requests", target=excusable),
        Figure("transfers failed while both ran", failed.total(), "requests", target=0),
        Figure("slowest request", record.slowest_s, "s", target=LATEST_S),
        Figure("slowest request while both ran", record.slowest_undisturbed_s, "s", target=DEADLINE_S),
        Figure("checks missed at the end", missed, "checks", target=0),
        Figure("KV usage at the end", kv_usage(now), "share", target=usage_at_start),
        Figure("pinned requests", left["pinned_requests"], "requests", target=0),
        Figure("pinned blocks", left["pinned_blocks"], "blocks", target=0),
        Figure("quarantined blocks", left["quarantined_blocks"], "blocks", target=0),
        Figure("staging in use", left["staging_bytes"], "bytes", target=0),
        *memory_figures({role: growth(samples) for role, samples in pair.memory.items()}, twin.growth),
    ]


def memory_figures(grown: Mapping[Role, Growth], twin: Growth) -> Iterator[Figure]:
    """Return how much each engine grew per 1,000 requests, and prefill's twin, and prefill beyond it."""
    for role, mine in grown.items():
        name = f"{role} memory per 1000 requests (over {mine.num_requests})"
        yield Figure(name, mine.mib_per_1000, "MiB", target=MAX_GROWTH_MIB)
    name = "prefill memory per 1000 requests"
    yield Figure(f"{name}, its twin (over {twin.num_requests})", twin.mib_per_1000, "MiB")
    beyond = grown["prefill"].mib_per_1000 - twin.mib_per_1000
    yield Figure(f"{name}, beyond its twin", beyond, "MiB", target=MAX_BEYOND_TWIN_MIB)


def main(arguments: list[str]) -> int:
    """Run the soak; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="requests in all (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="decides prompts, flows and who hangs up")
    options = parser.parse_args(arguments)
    if options.requests < LEAST_REQUESTS:
        parser.error(f"--requests: {options.requests} are too few to see memory grow; at least {LEAST_REQUESTS}")
    with tempfile.TemporaryDirectory(prefix="dcp-soak-") as name:
        folder = Path(name)
        twin = measure_twin(folder, make_prompts(options.seed), options.requests)
        with running(ENGINES, folder) as engines:
            figures = soak(Pair(folder, engines), twin, options.requests, options.seed)
    return 0 if publish("soak", figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
