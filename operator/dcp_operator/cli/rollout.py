"""`dcpctl rollout`: how far a change is, earlier states, going back to one, holding and letting go.

The only command that talks to a cluster: with the kubeconfig that kubectl would use, by what is in the object and in
its history. Nothing is asked of the operator, so it works while that is down, and takes effect when it is back.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from pydantic import ValidationError

from dcp_operator import names
from dcp_operator.cli.problems import EXIT_ALLOWED, EXIT_REFUSED, CliError, Outcome
from dcp_operator.cli.rollout_states import State, merge_patch, present_state, read_states, restored, table
from dcp_operator.cli.yaml_io import write_document
from dcp_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT_OF_ENGINES, Kind
from dcp_operator.observed import Body, entries, section

ACTIONS: Final = ("status", "history", "undo", "pause", "resume")
_POLL_S: Final = 1.0
#: An edit is sent so often while nothing but the status changes.
_EDITS: Final = 5
#: Reasons of Progressing with which only an edit or a resume goes on; others may pass by themselves.
_STANDS_STILL: Final = frozenset({"InvalidSpec", "Paused"})
_DONE: Final = frozenset({"RolledOut", "ScaledToZero"})


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for; `timeout_s` None waits as long as it takes."""

    action: str
    name: str
    #: Empty for that of the kubeconfig's context.
    namespace: str
    number: int | None = None
    timeout_s: float | None = None
    watch: bool = True
    dry_run: bool = False

    def within(self, namespace: str) -> "Asked":
        """Return the same with a namespace, where none was named."""
        return self if self.namespace else replace(self, namespace=namespace)


class Access(Protocol):
    """What of the API server's calls is needed; `dcp_operator.client.Api` has them."""

    def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        """Return an object, None if there is none."""
        ...

    def list(self, kind: Kind, namespace: str | None, label_selector: str = "") -> tuple[list[Body], str]:
        """Return the objects of a kind in a namespace."""
        ...

    def merge(self, kind: Kind, namespace: str, name: str, patch: Body, manager: str) -> Body:
        """Merge a patch into an object; return the object as it is then."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a rollout is: over or not, and whether it is where it should be."""

    is_over: bool
    is_well: bool
    message: str


def rollout(
    asked: Asked,
    api: Access,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Carry out one action. `say` prints a line at once, for who waits. Raises CliError, and ApiError of the server."""
    if asked.action == "status":
        return _status(asked, api, say, clock, sleep)
    if asked.action == "history":
        return _history(asked, api)
    if asked.action == "undo":
        return _undo(asked, api)
    return _hold(asked, api, hold=asked.action == "pause")


def judge(body: Body) -> Verdict:
    """Return how far an object's rollout is, by its status alone."""
    generation, seen = body["metadata"].get("generation", 0), section(body, "status").get("observedGeneration", 0)
    said = {entry.get("type"): entry for entry in entries(body, "status", "conditions")}
    progressing = said.get("Progressing")
    if seen < generation or progressing is None:
        return Verdict(False, False, f"the operator has not seen generation {generation} yet")
    reason, message = progressing.get("reason"), str(progressing.get("message", ""))
    if progressing.get("status") == "False" and reason in _DONE:
        return Verdict(True, True, message)
    if reason == "Paused" and said.get("Ready", {}).get("status") == "True":
        return Verdict(True, True, message)
    return Verdict(reason in _STANDS_STILL, False, message)


def _status(
    asked: Asked, api: Access, say: Callable[[str], None], clock: Callable[[], float], sleep: Callable[[float], None]
) -> Outcome:
    began, told = clock(), ""
    verdict = judge(_object(asked, api))
    while asked.watch and not verdict.is_over:
        if asked.timeout_s is not None and clock() - began >= asked.timeout_s:
            return Outcome(EXIT_REFUSED, "", (f"not rolled out after {asked.timeout_s:g} s: {verdict.message}",))
        if verdict.message != told:
            told = verdict.message
            say(f"waiting: {told}")
        sleep(_POLL_S)
        verdict = judge(_object(asked, api))
    if verdict.is_over and not verdict.is_well:
        return Outcome(EXIT_REFUSED, "", (f"not rolled out: {verdict.message}",))
    return Outcome(EXIT_ALLOWED, verdict.message + "\n")


def _history(asked: Asked, api: Access) -> Outcome:
    body = _object(asked, api)
    states = _states(asked, api, body)
    if asked.number is not None:
        state = _numbered(states, asked.number)
        return Outcome(EXIT_ALLOWED, write_document(dict(state.spec)))
    if not states:
        return Outcome(EXIT_ALLOWED, "", (f"{_title(asked)} has no history: nothing of it was rolled out yet",))
    return Outcome(EXIT_ALLOWED, table(states, present_state(asked.name, body["spec"])))


def _undo(asked: Asked, api: Access) -> Outcome:
    body = _object(asked, api)
    states = _states(asked, api, body)
    present = present_state(asked.name, body["spec"])
    if asked.number is not None:
        state = _numbered(states, asked.number)
    else:
        earlier = [state for state in states if state.name != present]
        if not earlier:
            return _nothing(asked, "no earlier state is kept (spec.revisionHistoryLimit says how many are)")
        state = earlier[-1]
    if state.name == present:
        return _nothing(asked, f"the spec asks for state {state.number} already")
    try:
        wanted = restored(body["spec"], state.spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CliError(
            f"state {state.number} was stored by another version and can't be written back: spec.{where}: "
            f"{first['msg']}; see it with: dcpctl rollout history {asked.name} --revision {state.number}"
        ) from None
    patch = {"spec": merge_patch(body["spec"], wanted)}
    if asked.dry_run:
        return Outcome(EXIT_ALLOWED, json.dumps(patch, indent=2) + "\n", (f"would go back to state {state.number}",))
    after = _edit(asked, api, body, patch)
    held = " once spec.paused is false" if section(after, "spec").get("paused") else ""
    return Outcome(EXIT_ALLOWED, f"{_title(asked)} goes back to state {state.number}{held}\n")


def _edit(asked: Asked, api: Access, read: Body, patch: Body, tries: int = _EDITS) -> Body:
    """Patch the spec that was read; return the object as it is then. Raises ApiError 409 where it was edited meanwhile.

    An edit in between is not undone unseen. The operator's reports in between change the object's version too, and
    nothing of what was read: while something rolls out they come every second.
    """
    from dcp_operator.client import ApiError

    there = read["metadata"]
    version = {"metadata": {"resourceVersion": there["resourceVersion"], "uid": there["uid"]}}
    try:
        return api.merge(
            DEPLOYMENT_OF_ENGINES, asked.namespace, asked.name, {**version, **patch}, names.FIELD_MANAGER_CLI
        )
    except ApiError as error:
        if error.status != 409 or tries == 1:
            raise
        present = _object(asked, api)
        if any(present["metadata"].get(name) != there.get(name) for name in ("uid", "generation")):
            raise
    return _edit(asked, api, present, patch, tries - 1)


def _hold(asked: Asked, api: Access, *, hold: bool) -> Outcome:
    body = _object(asked, api)
    words = "paused" if hold else "resumed"
    if bool(section(body, "spec").get("paused")) == hold:
        return Outcome(EXIT_ALLOWED, "", (f"{_title(asked)} is {'paused' if hold else 'not paused'} already",))
    patch = {"spec": {"paused": hold}}
    if asked.dry_run:
        return Outcome(EXIT_ALLOWED, json.dumps(patch, indent=2) + "\n", (f"would be {words}",))
    api.merge(DEPLOYMENT_OF_ENGINES, asked.namespace, asked.name, patch, names.FIELD_MANAGER_CLI)
    return Outcome(EXIT_ALLOWED, f"{_title(asked)} is {words}\n")


def _object(asked: Asked, api: Access) -> Body:
    body = api.get(DEPLOYMENT_OF_ENGINES, asked.namespace, asked.name)
    if body is None:
        raise CliError(
            f"there is no DCPDisaggDeployment {asked.name} in namespace {asked.namespace}; list them with: "
            "kubectl get dcpd --all-namespaces"
        )
    return body


def _states(asked: Asked, api: Access, body: Body) -> list[State]:
    listed, _ = api.list(CONTROLLER_REVISION, asked.namespace, f"{names.LABEL_NAME}={asked.name}")
    return read_states(listed, body["metadata"]["uid"])


def _numbered(states: list[State], number: int) -> State:
    for state in states:
        if state.number == number:
            return state
    kept = ", ".join(str(state.number) for state in states) or "none"
    raise CliError(f"state {number} is not in the history; kept: {kept}")


def _nothing(asked: Asked, why: str) -> Outcome:
    return Outcome(EXIT_REFUSED, "", (f"nothing to undo for {_title(asked)}: {why}",))


def _title(asked: Asked) -> str:
    return f"{asked.namespace}/{asked.name}"
