"""The loop and the check of the KV transfer: Ready makes it due, and its result is told without another event."""

import asyncio
import base64

from dcp_operator.canary.judge import Verdict
from dcp_operator.canary.request import Request
from dcp_operator.canary_http import Outcome
from dcp_operator.gather import WATCHED_KINDS
from dcp_operator.kinds import DEPLOYMENT, POD
from dcp_operator.reasons import Reason, Said
from dcp_operator.reconciler import Reconciler
from dcp_operator.target import Operator
from tests.support.objects import owner
from tests.support.simulated_api import SimulatedApi

KINDS = {kind.kind: kind for kind in WATCHED_KINDS}


class Probe:
    """Verifies everything."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def check(self, request: Request) -> Outcome:
        self.asked.append(request)
        return Outcome(Verdict(Said("True", Reason.VERIFIED, "KV moved")), 1)


def test_an_object_that_becomes_ready_is_checked_and_said_to_be_verified_though_nothing_else_happens():
    api, probe = SimulatedApi(), Probe()
    loop = Reconciler(
        api,  # type: ignore[arg-type] - the simulated server has the same calls
        Operator("acme/operator:1"),
        now=lambda: "2026-01-01T00:00:00Z",
        fresh_key=lambda: base64.b64encode(b"key").decode(),
        probe=probe,
    )

    def said(kind: str) -> str:
        conditions = api.owner().get("status", {}).get("conditions", [])
        return next((each["status"] for each in conditions if each["type"] == kind), "")

    async def until(condition) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        await loop.start()
        loop.lists.on_event(KINDS["DCPDisaggDeployment"], "ADDED", api.put(owner()))
        await until(lambda: said("Ready") == "False")
        assert said("KVTransferVerified") == "Unknown"
        api.run_deployments()
        for place, body in list(api.objects.items()):
            if place[0] == POD.kind:
                body["status"]["podIP"] = "10.0.0.7"
            if place[0] in (POD.kind, DEPLOYMENT.kind):
                loop.lists.on_event(KINDS[place[0]], "MODIFIED", body)
        await until(lambda: said("Ready") == "True")
        await until(lambda: said("KVTransferVerified") == "True")
        assert len(probe.asked) == 1
        # An event follows the status that it is about.
        await until(lambda: any(event["reason"] == "Verified" for event in api.events))
        await loop.stop()

    asyncio.run(scenario())
