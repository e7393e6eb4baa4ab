"""A prefill and a decode engine that a test asks without a router between, and what they counted."""

import json
import re
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from devcluster.completions import Completion, complete, complete_serially, get_text
from devcluster.deployments import Movement, count_movement
from tests.support.engines import RunningEngine

__all__ = ["PATHS", "PDPair", "eventually", "held", "metric", "settled", "step", "writes_by_path"]

#: The ways of `vllm:dcp_kv_rank_writes_total`.
PATHS = ("direct", "pack", "scatter")
#: Gauges of what an engine holds for another one, or keeps out of use because of it.
_HELD = ("pinned_requests", "pinned_blocks", "staging_bytes", "quarantined_blocks")
#: On decode, a prompt of one token with these gets a step of the engine's and nothing else: there is nothing to fetch,
#: and nobody who has to be told so. Without parameters it would count as a failed transfer.
_NOTHING_TO_FETCH = {"do_remote_prefill": True, "remote_bootstrap_addr": "http://127.0.0.1:1"}


@dataclass(frozen=True)
class PDPair:
    """Two engines that run."""

    prefill: RunningEngine
    decode: RunningEngine

    @property
    def engine_id(self) -> str:
        """The engine id that a router reads from prefill."""
        query = json.loads(get_text(str(self.prefill.bootstrap_url), "/query"))
        assert set(query) == {"0"}
        return str(query["0"]["engine_id"])

    def to_decode(self, transfer_id: str, **changes: Any) -> dict[str, Any]:
        """What decode is given by a router that asks both engines at once."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": self.prefill.bootstrap_url,
            "remote_engine_id": self.engine_id,
            "transfer_id": transfer_id,
            **changes,
        }

    def serially(self, prompt: str, max_tokens: int = 24) -> Completion:
        """Ask prefill for one token, and decode with what it answers."""
        return complete_serially(self.prefill.url, self.decode.url, prompt, max_tokens=max_tokens)

    def concurrently(self, prompt: str, max_tokens: int = 24) -> Completion:
        """Ask both engines at once, as vLLM's example proxy and llm-d's sidecar do."""
        decoded, failure = self.both(prompt, max_tokens)
        if failure is not None:
            raise failure
        return decoded

    def both(self, prompt: str, max_tokens: int) -> tuple[Completion, BaseException | None]:
        """Ask both engines at once; return what decode answers, and beside it how prefill failed, if it did."""
        transfer_id = f"xfer-{uuid.uuid4()}"
        ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(complete, self.prefill.url, prompt, max_tokens=1, kv_transfer_params=ask)
            params = self.to_decode(transfer_id)
            decoded = complete(self.decode.url, prompt, max_tokens=max_tokens, kv_transfer_params=params)
            return decoded, prefilled.exception()

    def movement(self) -> Movement:
        """What the two engines counted since they started."""
        return count_movement([get_text(self.prefill.url, "/metrics")], [get_text(self.decode.url, "/metrics")])

    def settled(self) -> None:
        """Return when neither engine holds anything because of the other."""
        settled(self.prefill, self.decode)

    def still_works(self, prompt: str, expected: Sequence[int]) -> None:
        """A prompt gets these tokens, what decode hasn't cached of it comes from prefill, and then nothing is held.

        After a fault, `prompt` is that of the request that failed and `expected` the answer of an engine without P/D:
        so nothing that arrived in part is answered from. A prompt that nobody asked before says that KV still moves.
        """
        assert self.serially(prompt, max_tokens=len(expected)).token_ids == tuple(expected)
        fresh = f"fresh {uuid.uuid4()} " * 5
        before = metric(self.decode, "tokens_received")
        answer = self.serially(fresh)
        assert answer.token_ids == complete(self.prefill.url, fresh).token_ids
        eventually(lambda: metric(self.decode, "tokens_received") == before + len(fresh))
        self.settled()


def settled(*engines: RunningEngine, timeout_s: float = 30.0) -> None:
    """Return when none of these engines holds anything for another one, staging memory included."""

    def nothing_held() -> bool:
        for engine in engines:
            step(engine)
        return not any(value for engine in engines for value in held(engine).values())

    eventually(nothing_held, timeout_s, lambda: f"still held: {[(str(e.spec), held(e)) for e in engines]}")


def step(engine: RunningEngine) -> None:
    """Let an engine compute one token: its gauges move only with its steps.

    It counts as a request, with one computed token, and not as a failed transfer.
    """
    params = None
    if engine.spec.role != "kv_producer":
        params = {**_NOTHING_TO_FETCH, "transfer_id": f"nothing-{uuid.uuid4()}"}
    complete(engine.url, "a", max_tokens=1, kv_transfer_params=params)


def held(engine: RunningEngine) -> dict[str, float]:
    """What an engine held in its last step, by gauge; staging memory over all ranks."""
    return {name: metric(engine, name, suffix="") for name in _HELD}


def writes_by_path(engine: RunningEngine) -> dict[str, float]:
    """Pulls that a prefill engine has served, by path."""
    return {path: metric(engine, "rank_writes", f'path="{path}"') for path in PATHS}


def metric(engine: RunningEngine, name: str, label: str = "", suffix: str = "_total") -> float:
    """The value of a metric of the connector, summed over what `label` doesn't fix."""
    pattern = re.compile(rf"^vllm:dcp_kv_{name}{suffix}\{{(.*)\}} (\S+)$", re.MULTILINE)
    found = [float(m[2]) for m in pattern.finditer(get_text(engine.url, "/metrics")) if label in m[1]]
    assert found, f"{name} is not on /metrics"
    return sum(found)


def eventually(
    condition: Callable[[], bool], timeout_s: float = 30.0, words: Callable[[], str] = lambda: "it did not come to be"
) -> None:
    """Return when the condition holds; counters follow what they count by a step of the engine."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, words()
        time.sleep(0.1)
