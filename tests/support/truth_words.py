"""The facts in a status's words: what a rollout waits for, and whom messages name and count."""

import re
from collections.abc import Iterator
from typing import Any

from tests.support.truth import ENGINES, ROLES, Facts, expected_status, ready, said_status

#: What a rollout waits for: a word for the kind, engines of prefill and decode, and the revisions that are named.
Awaited = tuple[str, tuple[int, int], frozenset[str]]

_NAMES = r"(?P<names>[0-9a-f]{8}(?: and [0-9a-f]{8})*)?"
_ENGINES = r"(?:(?P<prefill>\d+) prefill)?(?: and )?(?:(?P<decode>\d+) decode)?(?:no)? engines?"
#: The sentences of rollouts in which every pod finds a node, each with a word for it.
_SENTENCES = {
    "paused before it began": r"paused before revision {target} was begun",
    "paused, not begun": rf"paused: revision {{target}} isn't begun, (?:{_NAMES}|nothing) stays",
    "paused, begun": rf"paused: revision {{target}} stays at {_ENGINES}(?: beside {_NAMES})?",
    "crowded": rf"revision {{target}} begins when no more than .* serves?: {_NAMES} serve",
    "a router": r"a router of revision {target} has to become ready",
    "engines": rf"{_ENGINES} of revision {{target}} (?:has|have) to become ready"
    rf"(?: before more of revision {_NAMES} may go)?$",
    "goes": rf"revision {_NAMES} goes: ",
}
_COUNTED = re.compile(r"(?P<ready>\d+) of (?P<wanted>\d+) (?P<role>prefill|decode|router) pods are ready")
_A_REVISION = re.compile(r"\brevision ([0-9a-f]{8})\b")
_A_POD = re.compile(r"\bpod (?P<name>\S+?)(?= is being)")


def said_wait(facts: Facts) -> Awaited | None:
    """Return what the status says that a rollout waits for."""
    words: str | None = facts.owner.get("status", {}).get("rollout", {}).get("waitingFor")
    if words is None:
        return None
    for kind, pattern in _SENTENCES.items():
        found = re.match(pattern.replace("{target}", str(facts.target)), words)
        if found is not None:
            groups = found.groupdict()
            named = frozenset((groups.get("names") or "").split(" and ")) - {""}
            return kind, (int(groups.get("prefill") or 0), int(groups.get("decode") or 0)), named
    return words, (0, 0), frozenset()


def expected_wait(facts: Facts) -> Awaited | None:
    """Return what a rollout waits for, by what its workloads ask for when its last step is done."""
    target, order = facts.target, facts.order
    old = [revision for revision in order if revision != target]
    if target is None or not facts.others:
        return None
    asked = {revision: (_asked(facts, "prefill", revision), _asked(facts, "decode", revision)) for revision in order}
    running = frozenset(revision for revision in old if asked[revision] != (0, 0))
    if facts.is_paused:
        if target not in order:
            return ("paused, not begun", (0, 0), running) if order else ("paused before it began", (0, 0), frozenset())
        return ("paused, begun", asked[target], running) if old else None
    if target not in order:
        return "crowded", (0, 0), running
    if not old:
        return None
    have = tuple(min(len(ready(facts.of(role, target))), _asked(facts, role, target)) for role in ENGINES)
    is_paired = 0 not in have and 0 not in (facts.wanted(role) for role in ENGINES)
    if is_paired and not _is_routed(facts, target):
        return "a router", (0, 0), frozenset()
    missing = (asked[target][0] - have[0], asked[target][1] - have[1])
    # Of a revision that goes the routers go first.
    going = frozenset(revision for revision in old if facts.workload("router", revision) is None)
    if any(missing):
        return "engines", missing, frozenset(old) - going
    return ("goes", (0, 0), going) if going == frozenset(old) else None


def _asked(facts: Facts, role: str, revision: str) -> int:
    body = facts.workload(role, revision)
    return body["spec"]["replicas"] if body is not None else 0


def _is_routed(facts: Facts, revision: str) -> bool:
    if facts.wanted("router") == 0:
        return True
    return bool(_asked(facts, "router", revision) and ready(facts.of("router", revision)))


def untrue_words(facts: Facts) -> list[str]:
    """Return what a status's messages say that isn't so: counts, and revisions and pods that don't exist."""
    return [f"{kind}: {message}: {why}" for kind, message in _messages(facts) for why in _untrue(facts, message)]


def _messages(facts: Facts) -> Iterator[tuple[str, str]]:
    for entry in facts.owner.get("status", {}).get("conditions", []):
        if not entry["type"].startswith("Theirs"):
            yield entry["type"], entry["message"]


def _untrue(facts: Facts, message: str) -> Iterator[str]:
    if not message.strip():
        yield "it is empty"
    for found in _COUNTED.finditer(message):
        role, pods = found["role"], facts.of(found["role"], facts.shown)
        # Of what the workload asks for, or of what the spec wants.
        wanted = {facts.wanted(role), _asked(facts, role, facts.shown or "")}
        if int(found["ready"]) != len(ready(pods)) or int(found["wanted"]) not in wanted:
            yield f"{len(ready(pods))} are ready of {wanted} wanted"
    checked = facts.checked.revision if facts.checked is not None else None
    known = {facts.target, facts.shown, checked, *facts.order, *facts.others}
    for revision in _A_REVISION.findall(message):
        if revision not in known:
            yield f"there is no revision {revision}"
    unready = [pod["metadata"]["name"] for role in ROLES for pod in facts.of(role, facts.shown)]
    for found in _A_POD.finditer(message):
        if found["name"] not in unready:
            yield f"there is no pod {found['name']} of this revision that isn't ready"


def lies(facts: Facts) -> dict[str, Any]:
    """Return all that is untrue in an object's status: by field what is said, and what is true."""
    said, expected = said_status(facts), expected_status(facts)
    wrong = {key: (said.get(key), true) for key, true in expected.items() if said.get(key) != true}
    wait = expected_wait(facts)
    if not _is_same(said_wait(facts), wait):
        wrong["waitingFor"] = (facts.owner.get("status", {}).get("rollout"), wait)
    if words := untrue_words(facts):
        wrong["messages"] = (words, "what is counted and named exists")
    return wrong


def _is_same(said: Awaited | None, true: Awaited | None) -> bool:
    if said is None or true is None or not true[0].startswith("paused"):
        return said == true
    # A pause names the old revisions that are to have engines: one whose Deployments somebody deleted has none.
    return said[:2] == true[:2] and said[2] >= true[2]
