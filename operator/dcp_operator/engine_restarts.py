"""Engines that started anew in the same pod, so at the same address: noticed by the container's count of restarts.

The router and the other role know an engine by its address, and after a restart another engine answers there, with
nothing of what the one before it held. Only what happens while the controller watches is told: a count that is there
when a pod is first seen is from before.
"""

from dataclasses import dataclass

from dcp_operator import names
from dcp_operator.last_words import last_words
from dcp_operator.observed import Body, Key, Observed, entries, section
from dcp_operator.settings import Role
from dcp_operator.workloads import labels_of, pods_of


@dataclass(frozen=True, slots=True)
class Restart:
    """One engine that started anew, in words."""

    role: str
    message: str


class EngineRestarts:
    """Remembers, by object, how often each engine has started."""

    def __init__(self) -> None:
        self._counts: dict[Key, dict[str, int]] = {}

    def look(self, observed: Observed) -> list[Restart]:
        """Return the engines that started anew since the last look, each once."""
        before = self._counts.get(observed.key, {})
        counts: dict[str, int] = {}
        found: list[Restart] = []
        for pod in (pod for role in Role for pod in pods_of(observed, role)):
            main = _main(pod)
            uid, count = pod["metadata"]["uid"], main.get("restartCount", 0)
            counts[uid] = count
            if uid in before and count > before[uid]:
                found.append(_restart(pod, main, count))
        self._counts[observed.key] = counts
        return found

    def forget(self, key: Key) -> None:
        """Take in that an object is gone."""
        self._counts.pop(key, None)


def _main(pod: Body) -> Body:
    none: Body = {}
    containers = entries(pod, "status", "containerStatuses")
    return next((each for each in containers if each.get("name") == names.CONTAINER_MAIN), none)


def _restart(pod: Body, main: Body, count: int) -> Restart:
    ended = section(main, "lastState", "terminated")
    words = last_words(ended.get("message") or "") or f"reason {ended.get('reason', 'unknown')}"
    role = labels_of(pod).get(names.LABEL_ROLE, "")
    return Restart(
        role,
        f"the {role} engine in pod {pod['metadata']['name']} started anew at the same address (restart {count}), "
        f"after exit code {ended.get('exitCode', 'unknown')}: {words}. What it held is gone; the KV transfer is "
        "checked again",
    )
