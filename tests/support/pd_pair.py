"""A prefill and a decode engine that a test asks without a router between, and what they counted."""

import json
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from devcluster.completions import Completion, complete, complete_serially, get_text
from devcluster.deployments import Movement, count_movement
from tests.support.engines import RunningEngine

__all__ = ["PDPair", "eventually", "metric"]


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
        transfer_id = f"xfer-{uuid.uuid4()}"
        ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(complete, self.prefill.url, prompt, max_tokens=1, kv_transfer_params=ask)
            params = self.to_decode(transfer_id)
            decoded = complete(self.decode.url, prompt, max_tokens=max_tokens, kv_transfer_params=params)
            prefilled.result()
        return decoded

    def movement(self) -> Movement:
        """What the two engines counted since they started."""
        return count_movement([get_text(self.prefill.url, "/metrics")], [get_text(self.decode.url, "/metrics")])

    def settled(self) -> None:
        """Return when prefill holds nothing for decode any more."""
        eventually(lambda: metric(self.prefill, "pinned_requests", suffix="") == 0)

    def still_works(self) -> None:
        """A fresh prompt gets the right tokens, its KV comes from prefill, and nothing is left pinned."""
        prompt = f"fresh {uuid.uuid4()} " * 5
        before = metric(self.decode, "tokens_received")
        answer = self.serially(prompt)
        assert answer.token_ids == complete(self.prefill.url, prompt).token_ids
        eventually(lambda: metric(self.decode, "tokens_received") > before)
        self.settled()


def metric(engine: RunningEngine, name: str, label: str = "", suffix: str = "_total") -> float:
    """The value of a metric of the connector, summed over what `label` doesn't fix."""
    pattern = re.compile(rf"^vllm:dcp_kv_{name}{suffix}\{{(.*)\}} (\S+)$", re.MULTILINE)
    found = [float(m[2]) for m in pattern.finditer(get_text(engine.url, "/metrics")) if label in m[1]]
    assert found, f"{name} is not on /metrics"
    return sum(found)


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return when the condition holds; counters follow what they count by a step of the engine."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.1)
