"""What an engine waits for before it is stopped: the decision alone, with a clock of the test's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_connector import drain
from dcp_connector.drain import LOOKS, SILENCE_S, End, Failure, Limits, Load, Seen, judge, read, wait
from dcp_connector.stats import METRICS

LIMITS = Limits(settle_s=5, requests_s=60, kv_s=120)
IDLE = Load(0, 0)
BUSY = Load(2, 0)
HOLDING = Load(0, 3)


def run(look_at: Callable[[float], Load | Failure], limits: Limits = LIMITS) -> tuple[End, float, list[str]]:
    """Wait with a clock that only sleeping moves; return the end, when it was, and what was said."""
    now, said = [1000.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    end = wait(lambda: look_at(now[0] - 1000), limits, clock=lambda: now[0], sleep=sleep, say=said.append)
    return end, now[0] - 1000, said


def until(when_s: float, before: Load | Failure, after: Load | Failure = IDLE) -> Callable[[float], Load | Failure]:
    return lambda now_s: before if now_s < when_s else after


@pytest.mark.parametrize(
    ("look_at", "end", "when_s"),
    [
        (until(0, IDLE), End.IDLE, 5),
        (until(20, BUSY), End.IDLE, 21),
        (until(90, HOLDING), End.IDLE, 91),
        (until(20, BUSY, HOLDING), End.DEADLINE, 180),
        (until(1e9, BUSY), End.CUT, 61),
        (until(100, Load(2, 1), BUSY), End.CUT, 101),
        (until(1e9, HOLDING), End.DEADLINE, 180),
        (until(1e9, Load(None, 0)), End.CUT, 61),
        (until(1e9, Load(0, None)), End.DEADLINE, 180),
        (until(1e9, Failure.REFUSED), End.ABSENT, 1),
        (until(10, BUSY, Failure.REFUSED), End.ABSENT, 11),
        (until(1e9, Failure.SILENT), End.SILENT, 30),
        (until(10, BUSY, Failure.SILENT), End.SILENT, 40),
        (until(20, Failure.SILENT, BUSY), End.CUT, 61),
    ],
    ids=[
        "idle from the start",
        "requests end",
        "KV is fetched",
        "KV that nobody fetches after the requests",
        "requests without end",
        "KV fetched after the requests' time, while some run",
        "KV that nobody fetches",
        "an engine that counts no requests",
        "an engine that does not say what it holds",
        "a pod whose engine still loads",
        "an engine that ends by itself",
        "an engine that never answers",
        "an engine that gets stuck",
        "an engine that answers again",
    ],
)
def test_it_ends_for_the_reason_and_at_the_time(
    look_at: Callable[[float], Load | Failure], end: End, when_s: float
) -> None:
    found, ended_s, said = run(look_at)
    assert (found, ended_s) == (end, when_s)
    assert end.value in said[-1]


def test_an_engine_that_is_idle_at_one_look_only_is_not_stopped() -> None:
    looks = {5: IDLE, 7: IDLE, 9: IDLE}
    assert run(lambda now_s: looks.get(int(now_s), BUSY) if now_s < 12 else IDLE)[1] == 13


def test_without_time_for_requests_and_kv_it_only_lets_routers_know() -> None:
    end, ended_s, _ = run(until(1e9, Load(5, 5)), Limits(settle_s=5, requests_s=0, kv_s=0))
    assert (end, ended_s) == (End.DEADLINE, 5)


def test_one_line_is_said_for_each_change_and_one_at_the_end() -> None:
    _, _, said = run(lambda now_s: BUSY if now_s < 10 else HOLDING if now_s < 20 else IDLE)
    seen = [line.removeprefix("waiting before the engine stops: requests running or waiting: ") for line in said]
    assert seen == [
        "2, requests whose KV is held: 0 (0 s of at most 180 s)",
        "0, requests whose KV is held: 3 (10 s of at most 180 s)",
        "0, requests whose KV is held: 0 (20 s of at most 180 s)",
        "the engine is stopped after 21 s: no request runs and no KV is held",
    ]


def test_the_last_line_says_what_was_left_when_the_time_is_over() -> None:
    assert run(until(1e9, HOLDING))[2][-1].endswith(
        "the time is over; requests running or waiting: 0, requests whose KV is held: 3"
    )


NUMBERS = st.one_of(st.none(), st.integers(0, 3).map(float))
LOOKED = st.one_of(st.sampled_from(list(Failure)), st.builds(Load, NUMBERS, NUMBERS))
SECONDS = st.integers(0, 40).map(float)


@given(st.lists(LOOKED, min_size=1, max_size=60), st.builds(Limits, SECONDS, SECONDS, SECONDS))
def test_whatever_an_engine_says_the_wait_is_over_when_it_should_be(
    looks: Sequence[Load | Failure], limits: Limits
) -> None:
    """The rule of the module's docstring, asked of the looks themselves and not of what is remembered of them."""

    def free(index: int) -> bool:
        look = looks[min(index, len(looks) - 1)]
        return isinstance(look, Load) and look.held == 0 and (look.requests == 0 or index >= limits.cut_s)

    def same(index: int, kind: Failure) -> bool:
        return looks[min(index, len(looks) - 1)] is kind

    def is_over(index: int) -> bool:
        last = range(index - LOOKS + 1, index + 1)
        long = range(index - int(SILENCE_S), index + 1)
        return (
            index >= limits.deadline_s
            or (index >= limits.settle_s and all(each >= 0 and free(each) for each in last))
            or all(each >= 0 and same(each, Failure.REFUSED) for each in last)
            or all(each >= 0 and same(each, Failure.SILENT) for each in long)
        )

    expected = next(index for index in range(1000) if is_over(index))
    _, ended_s, _ = run(lambda now_s: looks[min(int(now_s), len(looks) - 1)], limits)
    assert ended_s == expected
    assert ended_s <= limits.deadline_s


def test_a_look_is_judged_by_what_was_seen_before() -> None:
    assert judge(6, IDLE, Seen(), LIMITS) == (Seen(free=1), None)
    assert judge(6, IDLE, Seen(free=1), LIMITS) == (Seen(free=2), End.IDLE)
    assert judge(6, Failure.SILENT, Seen(free=1), LIMITS) == (Seen(silent_since_s=6), None)


PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} model"} 1.0
vllm:num_requests_running{engine="1",model_name="a} model"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a} model"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0
vllm:dcp_kv_pinned_requests{engine="0"} 4.0
vllm:dcp_kv_pinned_requests{engine="1"} 5.0
vllm:dcp_kv_pinned_blocks{engine="0"} 600.0
"""


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (PAGE, Load(6, 9)),
        (PAGE.replace("dcp_kv", "other"), Load(6, None)),
        (PAGE.replace("num_requests_waiting{", "other{"), Load(None, 9)),
        (PAGE.replace(" 1.0", " NaN").replace(" 3.0", " nonsense"), Load(None, 9)),
        ("vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:dcp_kv_pinned_requests 2\n", Load(1, 2)),
        ("", Load(None, None)),
    ],
    ids=["engines are added", "another connector", "no waiting requests", "odd numbers", "without labels", "no page"],
)
def test_a_page_of_metrics_tells_the_load_or_that_it_is_not_said(page: str, load: Load) -> None:
    assert read(page) == load


def test_the_gauge_that_it_waits_for_is_the_connectors_own() -> None:
    assert set(drain.HELD) <= {metric.name for metric in METRICS if metric.kind == "gauge"}


def test_it_needs_nothing_but_the_standard_library() -> None:
    script = "import sys, dcp_connector.drain; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    folder = Path(drain.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert set(found) - sys.stdlib_module_names - {"__main__"} == {"dcp_connector"}
