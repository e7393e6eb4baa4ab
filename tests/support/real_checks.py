"""The operator's check of the KV transfer, made against real engines."""

import asyncio
import uuid
from collections.abc import Sequence

from dcp_operator.canary.judge import Verdict
from dcp_operator.canary.request import Engine, Request
from dcp_operator.canary.schedule import Subject
from dcp_operator.canary_http import HttpProbe
from dcp_operator.settings import Role
from tests.support.engines import RunningEngine

__all__ = ["check_of"]


def check_of(prefills: Sequence[RunningEngine], decodes: Sequence[RunningEngine], url: str) -> Verdict:
    """Send the check's prompt to a router, or to whatever answers at `url`, and judge by these engines' counters."""
    engines = [Engine(engine.url, Role.PREFILL, f"{engine.url}/metrics", None) for engine in prefills]
    engines += [
        Engine(engine.url, Role.DECODE, f"{engine.url}/metrics", f"{engine.bootstrap_url}/v1/failures")
        for engine in decodes
    ]
    blocks = [engine.spec.block * engine.spec.dcp for engine in (*prefills, *decodes)]
    request = Request(Subject("real", "engines"), url, "tiny", max(blocks) + 1, tuple(engines))
    return asyncio.run(HttpProbe(lambda: uuid.uuid4().hex).check(request)).verdict
