"""Logs of failed containers: read once for each end whose excerpt names no cause, and put into what is observed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dcp_operator.client import ApiError
from dcp_operator.observed import Observed
from dcp_operator.pod_logs import PodLogs
from dcp_operator.problems import pod_problem
from dcp_operator.reasons import Reason
from tests.support.objects import owner, pod

VAGUE = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
LOG = f"(Worker pid=1) ERROR 11-30 18:46:12 [x.py:9] RuntimeError: Cannot find any model weights with `/m`\n{VAGUE}"


@dataclass
class Logs:
    """The API server's part: what logs say, and what was asked for."""

    text: str = LOG
    error: ApiError | None = None
    asked: list[tuple[str, str, bool]] = field(default_factory=list)

    def read_log(self, namespace: str, pod: str, container: str, *, previous: bool, num_lines: int) -> str:
        assert namespace == "models"
        assert num_lines >= 200
        self.asked.append((pod, container, previous))
        if self.error is not None:
            raise self.error
        return self.text


async def at_once(function: Callable[[], Any]) -> Any:
    return function()


def failed(message: str = VAGUE, *, running: bool = False, restarts: int = 1) -> dict:
    end = {"terminated": {"exitCode": 1, "reason": "Error", "message": message, "finishedAt": f"t{restarts}"}}
    state = {"running": {}} if running else end
    last = {"lastState": end} if running else {}
    return {"name": "main", "restartCount": restarts, "state": state, **last}


def seen(*containers: dict) -> Observed:
    return Observed(owner(), pods=(pod("decode", "r1", name="p", containers=list(containers)),))


def test_the_cause_is_taken_from_the_log_where_the_excerpt_has_none():
    logs = Logs()
    complete = PodLogs(logs, at_once).complete
    for each, previous in ((failed(), False), (failed(running=True), True)):
        found = asyncio.run(complete(seen(each)))
        problem = pod_problem(found.pods[0], "decode", "models")
        assert problem is not None
        assert problem.reason is Reason.MODEL_LOAD_FAILED
        assert "Cannot find any model weights" in problem.message
        assert logs.asked[-1] == ("p", "main", previous)
        logs.asked.clear()
        complete = PodLogs(logs, at_once).complete


def test_one_end_is_looked_up_once_and_the_next_end_again():
    logs = Logs()
    complete = PodLogs(logs, at_once).complete
    for _ in range(3):
        asyncio.run(complete(seen(failed())))
    assert len(logs.asked) == 1
    asyncio.run(complete(seen(failed(restarts=2))))
    assert len(logs.asked) == 2


def test_an_excerpt_with_a_cause_and_a_container_that_runs_well_are_left_as_they_are():
    logs = Logs()
    observed = seen(failed("ValueError: bad layout"), {"name": "side", "state": {"running": {}}})
    assert asyncio.run(PodLogs(logs, at_once).complete(observed)) == observed
    assert logs.asked == []


def test_a_log_that_may_not_be_read_leaves_what_is_known_and_is_not_asked_for_again():
    logs = Logs(error=ApiError(403, "Forbidden", "no"))
    complete = PodLogs(logs, at_once).complete
    for _ in range(2):
        found = asyncio.run(complete(seen(failed())))
        problem = pod_problem(found.pods[0], "decode", "models")
        assert problem is not None
        assert problem.reason is Reason.CRASH_LOOP
        assert "logs p -c main --previous" in problem.message
    assert len(logs.asked) == 1


def test_of_many_engines_that_fail_only_some_are_looked_up_in_one_pass():
    logs = Logs()
    pods = tuple(pod("decode", "r1", name=f"p{number}", containers=[failed()]) for number in range(9))
    asyncio.run(PodLogs(logs, at_once).complete(Observed(owner(), pods=pods)))
    assert len(logs.asked) == 2
