"""The line end to end: `kubectl apply` to tokens, on the real node with real engines and real transfers.

Every layout answers the same prompts as one plain engine, token by token; counters of both sides prove that the KV
cache moved; and a decode side that reads its shards swapped is caught by the same comparison.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from devcluster.completions import Completion
from devcluster.deployments import RESOURCE, Movement, read_movement
from tests.support.line import Line, example
from tests.support.prompts import edge_prompts

pytestmark = pytest.mark.timeout(900)

MODEL = "tiny-mqa"
BLOCK, DCP = 32, 2
INTERLEAVES = (32, 8, 1)
#: tiny-mqa: 4 layers, one KV head of 32 values for K and 32 for V, float32.
KV_BYTES_PER_TOKEN = 4 * (32 + 32) * 4
AT_ONCE = 4
#: What the operator makes for an object without engines.
CHILDREN = {
    "controllerrevision",
    "deployment",
    "networkpolicy",
    "role",
    "rolebinding",
    "secret",
    "service",
    "serviceaccount",
}


def prompts_for(interleave: int) -> list[str]:
    """At least 30 prompts of 1 to 700 tokens around this layout's edges, some repeated, some with a common prefix."""
    return edge_prompts(BLOCK, DCP, interleave)


@pytest.fixture(scope="module")
def plain(line: Line) -> dict[str, Completion]:
    """The plain engine's answer to every prompt. The engine is gone before the P/D engines start: memory is short."""
    prompts = sorted({prompt for interleave in INTERLEAVES for prompt in prompts_for(interleave)})
    with line.plain_engine(MODEL) as url:
        return dict(zip(prompts, line.ask(url, "plain-engine", prompts, at_once=AT_ONCE), strict=True))


@dataclass(frozen=True, slots=True)
class Run:
    """One layout that has answered its prompts."""

    name: str
    prompts: list[str]
    answers: list[Completion]
    moved: Movement


@pytest.fixture(scope="module", params=INTERLEAVES, ids=lambda interleave: f"interleave-{interleave}")
def run(line: Line, plain: dict[str, Completion], request: pytest.FixtureRequest) -> Iterator[Run]:
    """Prefill TP 1 and decode TP 2, DCP 2 at one interleave, behind the router, after all prompts were sent."""
    interleave = int(request.param)
    name = f"line-{interleave}"
    prompts = prompts_for(interleave)
    with line.deployed(example(name, interleave=interleave)):
        url, before = line.router_url(name), read_movement(line.tools.kubectl, line.namespace, name)
        alone = len(prompts) // 2
        answers = line.ask(url, name, prompts[:alone]) + line.ask(url, name, prompts[alone:], at_once=AT_ONCE)
        yield Run(name, prompts, answers, counted(line, name, before, len(prompts)))


def counted(line: Line, name: str, before: Movement, num_prompts: int) -> Movement:
    """Return what moved for prompts that have all been answered: an engine tells of a step with its next one."""
    deadline = time.monotonic() + 30
    while True:
        moved = read_movement(line.tools.kubectl, line.namespace, name) - before
        is_told = moved.decode_requests == num_prompts and moved.sent_bytes == moved.received_bytes
        # What is not told in all that time is for the tests to find.
        if is_told or time.monotonic() > deadline:
            return moved
        time.sleep(0.2)


def test_tokens_are_those_of_a_plain_engine(run: Run, plain: dict[str, Completion]) -> None:
    assert len(run.prompts) >= 30
    lengths = [answer.prompt_tokens for answer in run.answers]
    assert min(lengths) == 1
    assert 650 <= max(lengths) <= 700
    differing = [
        f"{answer.prompt_tokens} tokens: {answer.token_ids} instead of {plain[prompt].token_ids}"
        for prompt, answer in zip(run.prompts, run.answers, strict=True)
        if answer.token_ids != plain[prompt].token_ids
    ]
    assert differing == []


def test_decode_computes_only_the_last_token_of_a_prompt(run: Run) -> None:
    # vLLM counts the last token as fetched where it was fetched, although it computes it again for its logits. It is
    # computed without a fetch for a prompt of one token, or one whose other tokens were in decode's cache.
    assert run.moved.decode_requests == len(run.prompts)
    assert run.moved.decode_computed_tokens <= len(run.prompts)
    prompt_tokens = sum(answer.prompt_tokens for answer in run.answers)
    counted = run.moved.decode_computed_tokens + run.moved.decode_cached_tokens + run.moved.decode_external_tokens
    assert counted == prompt_tokens


def test_bytes_on_both_sides_agree_with_the_prompt_lengths(run: Run) -> None:
    prompt_tokens = sum(answer.prompt_tokens for answer in run.answers)
    moved_tokens = run.moved.received_tokens
    assert run.moved.received_bytes == moved_tokens * KV_BYTES_PER_TOKEN
    assert run.moved.sent_bytes == run.moved.received_bytes
    assert moved_tokens == run.moved.decode_external_tokens
    assert moved_tokens == prompt_tokens - run.moved.decode_cached_tokens - run.moved.decode_computed_tokens
    assert run.moved.decode_cached_tokens > 0, "repeated prompts and shared prefixes hit decode's prefix cache"


def test_swapped_shards_give_other_tokens(line: Line, plain: dict[str, Completion]) -> None:
    prompts = prompts_for(8)[:20]
    swapped = example("line-swapped", interleave=8, decode_env={"DCP_TEST_SWAP_SHARDS": "1"})
    with line.deployed(swapped) as name:
        answers = line.ask(line.router_url(name), name, prompts)
    differing = [
        prompt for prompt, answer in zip(prompts, answers, strict=True) if answer.token_ids != plain[prompt].token_ids
    ]
    assert differing, "the comparison can't tell swapped shards from right ones"


def _children(line: Line, name: str) -> set[str]:
    kinds = ",".join([*CHILDREN, "replicaset", "pod"])
    return line.names(kinds, f"dcpdisagg.io/name={name}")


def _kinds(children: set[str]) -> set[str]:
    return {child.split("/")[0].split(".")[0] for child in children}


def _until(condition: object, *, within_s: float) -> float:
    """Wait for a condition; returns how long it took."""
    assert callable(condition)
    start = time.monotonic()
    while not condition():
        took = time.monotonic() - start
        assert took < within_s, f"not after {took:.1f} s"
        time.sleep(0.2)
    return time.monotonic() - start


def test_children_are_repaired_and_deletion_removes_all_of_them(line: Line) -> None:
    manifest = example("line-small")
    manifest["spec"]["prefill"]["replicas"] = manifest["spec"]["decode"]["replicas"] = 0
    line.apply(manifest)
    _until(lambda: _kinds(_children(line, "line-small")) >= CHILDREN, within_s=10)
    before = {child for child in _children(line, "line-small") if not child.startswith(("pod/", "replicaset"))}
    assert _kinds(before) == CHILDREN
    for child in sorted(before):
        uid = json.loads(line.kubectl("get", child, "-o", "json"))["metadata"]["uid"]
        line.kubectl("delete", child, "--wait=false")

        def made_again(child: str = child, uid: str = uid) -> bool:
            found = line.kubectl("get", child, "--ignore-not-found", "-o", "jsonpath={.metadata.uid}")
            return found not in ("", uid)

        _until(made_again, within_s=5)
    line.kubectl(
        "patch", "service", "line-small", "--type=merge", "-p", json.dumps({"spec": {"selector": {"app": "other"}}})
    )
    _until(lambda: "app" not in line.get("service", "line-small")["spec"]["selector"], within_s=5)
    line.kubectl("delete", RESOURCE, "line-small", "--cascade=foreground", timeout_s=60)
    _until(lambda: _children(line, "line-small") == set(), within_s=30)
