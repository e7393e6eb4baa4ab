"""Makes groups anew: what `dcp_operator.group_restarts` decided, written down first and then done."""

import logging
from collections.abc import Iterable
from typing import Protocol

from dcp_operator.apply import Memory, Run, problem_of
from dcp_operator.client import ApiError
from dcp_operator.group_restarts import Decision, Restart, record_of, write
from dcp_operator.kinds import LEADER_WORKER_SET, POD, Kind
from dcp_operator.names import ANNOTATION_GROUP_RESTARTS
from dcp_operator.observed import Body, Child, Observed
from dcp_operator.reasons import Problem

log = logging.getLogger(__name__)


class Writes(Protocol):
    """What of the API server's calls is needed; `dcp_operator.client.Api` has them."""

    def annotate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> Body:
        """Set annotations of the object with this uid; return it."""
        ...

    def delete_with_dependents(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this uid once what it owns is gone."""
        ...


async def carry_out(
    decisions: Iterable[tuple[Child, Decision]], observed: Observed, api: Writes, memory: Memory, run: Run
) -> tuple[list[tuple[Child, Restart]], list[Problem]]:
    """Do what was decided; return the groups that are being made anew, and what could not be done."""
    done: list[tuple[Child, Restart]] = []
    problems: list[Problem] = []
    for child, decision in decisions:
        namespace, name = observed.key.namespace, child.ref.name
        try:
            if decision.record != record_of(child):
                note = {ANNOTATION_GROUP_RESTARTS: write(decision.record)}
                memory.store(await run(api.annotate, LEADER_WORKER_SET, namespace, name, child.uid, note))
            for restart in decision.restarts:
                await run(api.delete_with_dependents, POD, namespace, restart.leader_name, restart.leader_uid)
                log.warning(
                    "group made anew object=%s child=%s group=%s times=%d why=%s",
                    observed.key,
                    child.ref,
                    restart.index,
                    restart.times,
                    restart.why,
                )
                done.append((child, restart))
        except ApiError as error:
            log.warning("group not made anew object=%s child=%s error=%s", observed.key, child.ref, error)
            problems.append(problem_of(error, f"make a group of {child.ref} anew"))
    return done, problems
