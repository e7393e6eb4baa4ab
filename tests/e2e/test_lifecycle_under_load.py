"""Lifecycle with real engines under load: a rollout that no client notices, and a prefill engine that dies.

Clients ask the object's Service all the time; every answer is compared with that of a plain engine.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from devcluster.deployments import RESOURCE, wait_until_ready
from tests.support.line import Line, example
from tests.support.traffic import MAX_TOKENS, Traffic

pytestmark = pytest.mark.timeout(900)

MODEL = "tiny-mqa"
PROMPTS = tuple(f"{number} " + "the quick brown fox jumps over the lazy dog " * (number % 9) for number in range(24))
#: Longest time for two engines beside two others, on two cores.
ROLLOUT_S = 420.0
#: Ends every process of a container but the first, as a crash of the engine's core does.
KILL_CHILDREN = (
    "import os, signal\n"
    "mine = {1, os.getpid(), os.getppid()}\n"
    "[os.kill(int(p), signal.SIGKILL) for p in os.listdir('/proc') if p.isdigit() and int(p) not in mine]"
)
PYTHON = "/opt/cpu-engine/bin/python3"


@pytest.fixture(scope="module")
def expected(line: Line) -> dict[str, tuple[int, ...]]:
    """A plain engine's answers. It is gone before the P/D engines start: memory is short."""
    with line.plain_engine(MODEL) as url:
        answers = line.ask(url, "plain-engine", list(PROMPTS), at_once=4)
    assert {len(answer.token_ids) for answer in answers} == {MAX_TOKENS}
    return {prompt: answer.token_ids for prompt, answer in zip(PROMPTS, answers, strict=True)}


@pytest.fixture(scope="module")
def name(line: Line) -> Iterator[str]:
    """One prefill engine, and one decode engine of two DCP ranks, behind a router."""
    with line.deployed(manifest()) as name:
        yield name


def manifest() -> dict[str, Any]:
    """The object as a user has it, with the check of the transfer."""
    result = example("load", interleave=8)
    del result["spec"]["transferCheck"]
    return result


def until(what: str, holds: Callable[[], object], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:.0f} s"
        time.sleep(0.5)


def status(line: Line, name: str) -> dict[str, Any]:
    return line.get(RESOURCE, name).get("status", {})


def condition(line: Line, name: str, kind: str) -> Mapping[str, str]:
    return next((entry for entry in status(line, name).get("conditions", []) if entry["type"] == kind), {})


def revisions_of_pods(line: Line, name: str) -> set[str]:
    pods = json.loads(line.kubectl("get", "pod", "-l", f"dcpdisagg.io/name={name}", "-o", "json"))["items"]
    return {pod["metadata"]["labels"]["dcpdisagg.io/revision"] for pod in pods}


def test_no_client_notices_a_rollout(line: Line, name: str, expected: dict[str, tuple[int, ...]]) -> None:
    changed = manifest()
    for role in ("prefill", "decode"):
        args = changed["spec"][role]["extraArgs"]
        changed["spec"][role]["extraArgs"] = [arg for arg in args if "--max-num-seqs" not in arg] + ["--max-num-seqs=8"]
    before = status(line, name)["currentRevision"]
    traffic = Traffic(line.router_url(name), name, expected)
    with traffic.running():
        traffic.wait_for_answers(10, 60)
        line.apply(changed)
        until("Ready is False at once", lambda: condition(line, name, "Ready").get("status") == "False", 10)
        until("the new revision is Ready", lambda: condition(line, name, "Ready").get("status") == "True", ROLLOUT_S)
        after = status(line, name)["currentRevision"]
        until("the old revision is gone", lambda: revisions_of_pods(line, name) == {after}, 150)
        until("KV is seen to move", lambda: condition(line, name, "KVTransferVerified").get("status") == "True", 60)
        traffic.wait_for_answers(10, 60)
    print(traffic.said())
    assert after != before
    assert traffic.failures() == [], traffic.said()
    assert traffic.wrong() == [], traffic.said()


def test_prefill_that_dies_under_load_costs_what_it_had_in_hand_and_comes_back(
    line: Line, name: str, expected: dict[str, tuple[int, ...]]
) -> None:
    wait_until_ready(line.tools.kubectl, line.namespace, name, line.log)
    pods = json.loads(
        line.kubectl("get", "pod", "-l", f"dcpdisagg.io/name={name},dcpdisagg.io/role=prefill", "-o", "json")
    )
    pod = pods["items"][0]["metadata"]["name"]
    traffic = Traffic(line.router_url(name), name, expected)
    with traffic.running():
        traffic.wait_for_answers(10, 60)
        killed = time.monotonic()
        line.tools.kubectl("exec", pod, "-n", line.namespace, "-c", "main", "--", PYTHON, "-c", KILL_CHILDREN)
        until("PrefillReady is False", lambda: condition(line, name, "PrefillReady").get("status") == "False", 60)
        until("it serves again", lambda: condition(line, name, "Ready").get("status") == "True", ROLLOUT_S)
        back = time.monotonic()
        traffic.wait_for_answers(30, 120)
    print(traffic.said(), f"away for {back - killed:.0f} s")
    assert traffic.wrong() == [], traffic.said()
    outside = [each for each in traffic.failures() if not killed - 5 <= each.ended <= back + 5]
    assert outside == [], traffic.said()
    # No client waits for an engine that is gone longer than the settings allow.
    assert max(each.ended - each.began for each in traffic.failures()) < 60, traffic.said()
    restarted = json.loads(line.kubectl("get", "pod", pod, "-o", "json"))
    assert restarted["status"]["containerStatuses"][0]["restartCount"] >= 1, "the engine came back at its address"
