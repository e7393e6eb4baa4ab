"""Checks of the KV transfer as an object's passes see them: what is asked, when, and what the status says after it."""

import asyncio
import copy
import datetime
from collections.abc import Callable
from typing import Any

import pytest

from dcp_operator.api.spec import Spec
from dcp_operator.api.status import Status
from dcp_operator.canary.judge import Verdict
from dcp_operator.canary.request import Request, completion_body, num_tokens, request_of, subject_of
from dcp_operator.canary.result import say, stored_result
from dcp_operator.canary_checks import TransferChecks
from dcp_operator.canary_http import Outcome
from dcp_operator.kinds import DEPLOYMENT
from dcp_operator.metrics import CONTROLLER
from dcp_operator.names import workload
from dcp_operator.observed import Child, Key, Observed
from dcp_operator.reasons import Reason, Said
from dcp_operator.settings import Role
from tests.support.objects import owner, pod, spec

REVISION = "0123abcd"
GOOD = Verdict(Said("True", Reason.VERIFIED, "KV moved"))
BAD = Verdict(Said("False", Reason.TRANSFER_FAILED, "it did not"))
UNSURE = Verdict(Said("Unknown", Reason.NOT_CHECKED, "the router has no engines"))


def status(revision: str = REVISION, *, ready: bool = True, generation: int = 1) -> dict[str, Any]:
    said = {"type": "Ready", "status": str(ready), "observedGeneration": generation}
    return {"observedGeneration": generation, "currentRevision": revision, "conditions": [said]}


def engine(role: str, name: str, *, restarts: int = 0, ready: bool = True, address: str | None = None) -> dict:
    found = pod(role, REVISION, name=name, ready=ready, containers=[{"name": "main", "restartCount": restarts}])
    found["status"]["podIP"] = address or f"10.0.0.{len(name)}{restarts % 10}"
    return found


PODS = (engine("prefill", "p"), engine("decode", "dd"), engine("router", "rrr"))


def deployment(role: str, port: int) -> Child:
    main = {"name": "main", "ports": [{"name": "http", "containerPort": port}]}
    reference = {"controller": True, "uid": "owner-uid", "kind": "DCPDisaggDeployment", "name": "chat"}
    return Child(
        {
            "apiVersion": "apps/v1",
            "kind": DEPLOYMENT.kind,
            "metadata": {"name": workload("chat", role, REVISION), "uid": role, "ownerReferences": [reference]},
            "spec": {"template": {"spec": {"containers": [main]}}},
        }
    )


def seen(*pods: dict, stored: dict[str, Any] | None = None, port: int = 8000, **changes: Any) -> Observed:
    body = {**owner(**changes), "status": stored if stored is not None else status()}
    children = {child.ref: child for child in (deployment(role, port) for role in ("prefill", "decode"))}
    return Observed(body, children, pods or PODS)


def spec_of(observed: Observed) -> Spec:
    return Spec.model_validate(observed.body["spec"])


def test_a_prompt_is_longer_than_a_block_of_every_rank_and_fits_the_context():
    roles = {
        "prefill": {"blockSize": 16, "parallelism": {"tensor": 1}},
        "decode": {"blockSize": 64, "parallelism": {"tensor": 8, "decodeContext": 8}},
    }
    assert num_tokens(Spec.model_validate(spec(**roles))) == 64 * 8 + 1
    short = {**roles, "decode": {**roles["decode"], "maxModelLen": 100}}
    assert num_tokens(Spec.model_validate(spec(**short))) == 96
    tiny = {**roles, "decode": {**roles["decode"], "maxModelLen": 1}}
    assert num_tokens(Spec.model_validate(spec(**tiny))) == 2


NOT_NOW = {
    "not ready": {"stored": status(ready=False)},
    "ready by an earlier spec": {"stored": status(generation=0)},
    "before the first status": {"stored": {}},
    "turned off": {"transferCheck": {"enabled": False}},
    "a connector without counters": {"kvConnector": {"type": "nixl", "protocol": "tcp"}},
}


@pytest.mark.parametrize("case", NOT_NOW)
def test_nothing_is_checked_while_that_would_tell_nothing(case: str):
    observed = seen(**NOT_NOW[case])
    assert subject_of(observed, spec_of(observed)) is None


def test_without_a_router_or_an_engine_of_a_role_nothing_is_checked():
    for missing in range(3):
        observed = seen(*(each for index, each in enumerate(PODS) if index != missing))
        assert subject_of(observed, spec_of(observed)) is None


def test_a_subject_is_another_as_soon_as_an_engine_is():
    def subject(*pods: dict) -> Any:
        observed = seen(*pods)
        return subject_of(observed, spec_of(observed))

    first = subject(*PODS)
    assert subject(*reversed(PODS)) == first
    router = engine("router", "another")
    assert subject(*PODS[:2], router) == first
    restarted = engine("decode", "dd", restarts=1)
    assert subject(PODS[0], restarted, PODS[2]) != first
    assert subject(*PODS, engine("decode", "dddd")) != first
    assert subject(*PODS, engine("decode", "dddd", ready=False)) == first


def test_whom_a_check_asks_is_read_from_the_pods_and_their_ports():
    observed = seen(port=20000, decode={**spec()["decode"], "hostNetwork": True})
    subject = subject_of(observed, spec_of(observed))
    assert subject is not None
    request = request_of(observed, spec_of(observed), subject)
    assert request is not None
    assert request.router_url == "http://10.0.0.30:8080"
    assert request.model == "chat"
    found = {each.role: (each.pod, each.metrics_url, each.failures_url) for each in request.engines}
    assert found == {
        Role.PREFILL: ("p", "http://10.0.0.10:20000/metrics", None),
        Role.DECODE: ("dd", "http://10.0.0.20:20000/metrics", "http://10.0.0.20:20004/v1/failures"),
    }


def test_addresses_of_ipv6_are_written_in_brackets():
    observed = seen(engine("prefill", "p"), engine("decode", "dd"), engine("router", "r", address="fd00::5"))
    subject = subject_of(observed, spec_of(observed))
    assert subject is not None
    request = request_of(observed, spec_of(observed), subject)
    assert request is not None
    assert request.router_url == "http://[fd00::5]:8080"


def test_two_checks_have_other_prompts_and_salts():
    request = Request(subject_of(seen(), spec_of(seen())), "http://r", "chat", 40, ())  # type: ignore[arg-type]
    one, other = completion_body(request, "a1"), completion_body(request, "a2")
    assert len(one["prompt"]) == len(other["prompt"]) == 40
    assert one["prompt"] != other["prompt"]
    assert one["cache_salt"] != other["cache_salt"]
    assert completion_body(request, "a1") == one


class Probe:
    """Answers checks with what the test lines up; `asked` are those made."""

    def __init__(self, *verdicts: Verdict | Exception) -> None:
        self.verdicts = list(verdicts)
        self.asked: list[Request] = []

    async def check(self, request: Request) -> Outcome:
        self.asked.append(request)
        verdict = self.verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return Outcome(verdict, 1)


class World:
    """One object, looked at whenever something may have changed; time is the test's."""

    def __init__(self, *verdicts: Verdict | Exception) -> None:
        self.probe = Probe(*verdicts)
        self.time_s = 1000.0
        self.woken: list[Key] = []
        self.begin()

    def begin(self) -> None:
        """A controller that starts."""
        self.checks = TransferChecks(self.probe, self.woken.append, self.now, lambda: self.time_s)

    def now(self) -> str:
        began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        return (began + datetime.timedelta(seconds=self.time_s)).strftime("%Y-%m-%dT%H:%M:%SZ")

    async def look(self, observed: Observed) -> tuple[Said, dict[str, Any], float | None]:
        """One pass, and the one after a check has ended."""
        self.checks.look(observed, spec_of(observed))
        for _ in range(5):
            await asyncio.sleep(0)
        report = self.checks.look(observed, spec_of(observed))
        shown = report.status.model_dump(by_alias=True) if report.status is not None else {}
        return report.said, shown, report.due_s


def stored_as(observed: Observed, said: Said, shown: dict[str, Any]) -> Observed:
    """The object with what was said of the check in its status."""
    body = copy.deepcopy(observed.body)
    entry = {"type": "KVTransferVerified", "status": said.status, "reason": said.reason, "message": said.message}
    body["status"]["conditions"].append(entry)
    body["status"]["transferCheck"] = shown
    return Observed(body, observed.children, observed.pods)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


def test_a_ready_object_is_checked_once_and_its_result_stays():
    async def scenario() -> None:
        world = World(GOOD)
        said, shown, due_s = await world.look(seen())
        assert (said.status, said.reason, said.message) == ("True", Reason.VERIFIED, f"revision {REVISION}: KV moved")
        assert shown == {"revision": REVISION, "engines": shown["engines"], "lastTime": world.now()}
        assert due_s is None
        assert world.woken == [Key("models", "chat")]
        for _ in range(3):
            world.time_s += 1e5
            assert (await world.look(seen()))[0] == said
        assert len(world.probe.asked) == 1

    run(scenario)


def test_a_failure_is_said_and_tried_again_later_until_it_is_verified():
    async def scenario() -> None:
        world = World(BAD, BAD, GOOD)
        said, _, due_s = await world.look(seen())
        assert (said.status, said.reason) == ("False", Reason.TRANSFER_FAILED)
        assert due_s == 30.0
        world.time_s += 29.0
        await world.look(seen())
        assert len(world.probe.asked) == 1
        world.time_s += 1.0
        assert (await world.look(seen()))[2] == 60.0
        world.time_s += 60.0
        assert (await world.look(seen()))[0].reason is Reason.VERIFIED

    run(scenario)


def test_a_check_that_told_nothing_leaves_the_last_result():
    async def scenario() -> None:
        world = World(UNSURE, GOOD, UNSURE)
        said, shown, _ = await world.look(seen())
        assert (said.status, said.reason) == ("Unknown", Reason.NOT_CHECKED)
        assert "has no engines" in said.message
        assert shown == {}
        world.time_s += 30.0
        assert (await world.look(seen()))[0].reason is Reason.VERIFIED
        world.time_s += 30.0
        restarted = seen(PODS[0], engine("decode", "dd", restarts=1), PODS[2])
        assert (await world.look(restarted))[0].reason is Reason.VERIFIED
        assert len(world.probe.asked) == 3

    run(scenario)


def test_a_defect_in_a_check_does_not_end_the_checks(caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        world = World(RuntimeError("a defect"), GOOD)
        assert (await world.look(seen()))[0].reason is Reason.NOT_CHECKED
        world.time_s += 30.0
        assert (await world.look(seen()))[0].reason is Reason.VERIFIED

    run(scenario)
    assert "check failed object=models/chat" in caplog.text


def test_another_revision_is_not_verified_by_the_one_before():
    async def scenario() -> None:
        world = World(GOOD)
        await world.look(seen())
        said, shown, _ = await world.look(seen(stored=status("89abcdef", ready=False)))
        assert (said.status, said.reason) == ("Unknown", Reason.NOT_CHECKED)
        assert "89abcdef has not been checked" in said.message
        assert shown == {}

    run(scenario)


def test_a_restarted_controller_says_what_was_said_and_checks_nothing_again():
    async def scenario() -> None:
        world = World(GOOD)
        said, shown, _ = await world.look(seen())
        stored = stored_as(seen(), said, shown)
        world.begin()
        world.time_s += 500.0
        assert await world.look(stored) == (said, shown, None)
        restarted = stored_as(seen(PODS[0], engine("decode", "dd", restarts=1), PODS[2]), said, shown)
        world.probe.verdicts = [BAD]
        assert (await world.look(restarted))[0].reason is Reason.TRANSFER_FAILED
        assert len(world.probe.asked) == 2

    run(scenario)


def test_an_interval_goes_on_over_a_restart_of_the_controller_and_a_clock_that_jumped():
    async def scenario() -> None:
        world = World(GOOD)
        every = {"transferCheck": {"intervalSeconds": 600}}
        said, shown, due_s = await world.look(seen(**every))
        assert due_s == 600.0
        stored = stored_as(seen(**every), said, shown)
        world.begin()
        world.time_s += 100.0
        assert (await world.look(stored))[2] == 500.0
        world.begin()
        world.time_s -= 90_000.0
        assert (await world.look(stored))[2] == 600.0, "a check from the future counts as made now"

    run(scenario)


def test_an_object_that_was_made_anew_under_the_name_begins_anew():
    async def scenario() -> None:
        world = World(GOOD, BAD)
        await world.look(seen())
        other = seen()
        other.body["metadata"]["uid"] = "another"
        world.time_s += 1.0
        assert (await world.look(other))[0].reason is Reason.TRANSFER_FAILED
        assert len(world.probe.asked) == 2

    run(scenario)


def test_at_most_some_checks_run_at_the_same_time_and_all_end_with_the_controller():
    async def scenario() -> None:
        running: list[int] = []

        class Endless:
            async def check(self, request: Request) -> Outcome:
                running.append(1)
                await asyncio.Event().wait()
                raise AssertionError

        checks = TransferChecks(Endless(), lambda key: None, lambda: "", lambda: 0.0)
        for number in range(12):
            observed = seen()
            observed.body["metadata"]["namespace"] = f"team{number}"
            checks.look(observed, spec_of(observed))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(running) == 8
        await checks.stop()

    run(scenario)


def test_the_prompts_that_were_sent_can_be_subtracted():
    def sent(what: str) -> float | None:
        labels = {"namespace": "models", "name": "chat"}
        return CONTROLLER.get_sample_value(f"dcp_operator_transfer_check_{what}_total", labels)

    async def scenario() -> None:
        world = World(GOOD)
        await world.look(seen())
        assert sent("prompts") == 1
        assert sent("tokens") == world.probe.asked[0].num_tokens
        world.checks.forget(Key("models", "chat"))
        assert sent("prompts") is None, "the object is gone"

    run(scenario)


SAID_WITHOUT = {
    "turned off": ({"transferCheck": {"enabled": False}}, Reason.DISABLED, "spec.transferCheck.enabled is false"),
    "another connector": ({"kvConnector": {"type": "nixl", "protocol": "tcp"}}, Reason.NO_COUNTERS, "NixlConnector"),
    "a router of the user's": ({"router": {"replicas": 0}}, Reason.NOT_CHECKED, "spec.router.replicas is 0"),
    "nothing yet": ({}, Reason.NOT_CHECKED, "no transfer has been checked yet"),
}


@pytest.mark.parametrize("case", SAID_WITHOUT)
def test_why_nothing_is_checked_is_said(case: str):
    changes, reason, words = SAID_WITHOUT[case]
    said = say(Spec.model_validate(spec(**changes)), None, None, None)
    assert (said.status, said.reason) == ("Unknown", reason)
    assert words in said.message


@pytest.mark.parametrize(
    "changes",
    [
        {"transferCheck": None},
        {"transferCheck": {"revision": "x"}},
        {"transferCheck": {"revision": 1, "engines": "e", "lastTime": "t"}},
        {"conditions": []},
        {"conditions": [{"type": "KVTransferVerified", "status": "True", "reason": "Invented", "message": ""}]},
    ],
)
def test_a_status_that_tells_no_result_is_taken_for_none(changes: dict[str, Any]):
    stored = stored_as(seen(), Said("True", Reason.VERIFIED, "x"), {"revision": "r", "engines": "e", "lastTime": "t"})
    assert stored_result(stored) is not None
    stored.body["status"].update(changes)
    assert stored_result(stored) is None


def test_the_status_has_a_place_for_it():
    assert "transferCheck" in {field.alias or name for name, field in Status.model_fields.items()}
