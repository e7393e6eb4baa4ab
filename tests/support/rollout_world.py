"""Kubernetes as a rollout meets it: workloads, pods that get ready, die and come back in any order. Numbers only.

A workload makes pods until it has as many as it asks for; of too many it removes those that aren't ready first, as a
ReplicaSet does. A router is ready when it wants to be and both roles of its revision have a ready engine.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from dcp_operator.api.spec import RolloutStrategy
from dcp_operator.rollout.planner import next_step
from dcp_operator.rollout.shares import Pair, bounds_of, engines_of, share_of
from dcp_operator.rollout.situation import Engines, Revision, Situation, Step

ROLES = ("prefill", "decode")


@dataclass
class Pod:
    is_ready: bool = False
    #: Turns without being ready.
    idle: int = 0


@dataclass
class Workload:
    replicas: int = 0
    pods: list[Pod] = field(default_factory=list)

    def sync(self) -> None:
        self.pods.sort(key=lambda pod: not pod.is_ready)
        del self.pods[self.replicas :]
        self.pods.extend(Pod() for _ in range(self.replicas - len(self.pods)))

    @property
    def counted(self) -> int:
        return min(self.replicas, sum(pod.is_ready for pod in self.pods))


@dataclass
class Live:
    prefill: Workload = field(default_factory=Workload)
    decode: Workload = field(default_factory=Workload)
    routers: int | None = 1
    router_is_up: bool = True

    def role(self, name: str) -> Workload:
        return getattr(self, name)

    @property
    def replicas(self) -> Pair:
        return Pair(self.prefill.replicas, self.decode.replicas)

    @property
    def ready_routers(self) -> int:
        return int(bool(self.routers) and self.router_is_up and min(self.prefill.counted, self.decode.counted) > 0)


class World:
    """One object: what is wanted, and what there is. `stale_after` is in turns."""

    def __init__(self, wanted: Pair, strategy: RolloutStrategy, *, routers: int = 1, stale_after: int = 3) -> None:
        self.wanted = wanted
        self.strategy = strategy
        self.routers = routers
        self.stale_after = stale_after
        self.target = "a"
        self.is_paused = False
        self.has_room = True
        #: Revisions whose pods never get ready.
        self.broken: set[str] = set()
        self.live: dict[str, Live] = {}
        self.begin("a")
        self.finish()

    # What users do.

    def begin(self, revision: str) -> None:
        self.target = revision

    # What the operator sees and does.

    def situation(self) -> Situation:
        revisions = tuple(self._counted(name, live) for name, live in self.live.items())
        return Situation(bounds_of(self.wanted, self.strategy), self.routers, self.target, revisions, self.is_paused)

    def _counted(self, name: str, live: Live) -> Revision:
        def engines(workload: Workload) -> Engines:
            idle = [pod for pod in workload.pods if not pod.is_ready]
            return Engines(
                workload.replicas,
                ready=len(workload.pods) - len(idle),
                stale=sum(pod.idle >= self.stale_after for pod in idle),
                unschedulable=0 if self.has_room or name != self.target else len(idle),
            )

        return Revision(name, engines(live.prefill), engines(live.decode), live.routers, live.ready_routers)

    def step(self) -> Step:
        return next_step(self.situation())

    def writes(self, step: Step) -> list[tuple]:
        """Return what a step changes, in the order in which it is done; each can be done alone."""
        result: list[tuple] = []
        for name in step.retired:
            live = self.live[name]
            result.append(("router", name, None) if live.routers is not None else ("gone", name))
        for name, counts in step.replicas.items():
            live = self.live.get(name)
            for role in ROLES:
                if live is None or live.role(role).replicas != getattr(counts, role):
                    result.append((role, name, getattr(counts, role)))
            if live is None or live.routers != counts.router:
                result.append(("router", name, counts.router))
        return result

    def write(self, what: str, name: str, count: int | None = None) -> None:
        if what == "gone":
            del self.live[name]
            return
        live = self.live.setdefault(name, Live(routers=None))
        if what == "router":
            live.routers = count
        else:
            live.role(what).replicas = count or 0

    # What Kubernetes does.

    def sync(self) -> None:
        for live in self.live.values():
            for role in ROLES:
                live.role(role).sync()

    def pods(self) -> list[tuple[str, Pod]]:
        return [(name, pod) for name, live in self.live.items() for role in ROLES for pod in live.role(role).pods]

    def turn(self) -> None:
        """Let time pass, and everything that can get ready do so."""
        self.sync()
        for name, pod in self.pods():
            pod.is_ready = name not in self.broken and (pod.is_ready or self.has_room or name != self.target)
            pod.idle = 0 if pod.is_ready else pod.idle + 1
        for live in self.live.values():
            live.router_is_up = True

    def finish(self, turns: int = 400) -> int:
        """Take turns until a step changes nothing; return how many turns that took."""
        for number in range(turns):
            self.turn()
            writes = self.writes(self.step())
            if not writes and self.is_over():
                return number
            for write in writes:
                self.write(*write)
        raise AssertionError(f"does not end: {self}")

    def is_over(self) -> bool:
        return list(self.live) == [self.target] and self.live[self.target].replicas == self.wanted

    # What is judged.

    def serving(self) -> Fraction:
        """Return the serving share of all revisions, in matched pairs."""
        shares = [
            share_of(Pair(live.prefill.counted, live.decode.counted), self.wanted)
            for name, live in self.live.items()
            if self.routers == 0 or live.ready_routers or (live.routers == 0 and name != self.target)
        ]
        return sum(shares, Fraction(0))

    def total(self) -> Pair:
        return Pair(*(sum(live.role(role).replicas for live in self.live.values()) for role in ROLES))

    def __str__(self) -> str:
        parts = [
            f"{name}: {tuple(live.replicas)} ready {live.prefill.counted, live.decode.counted} routers {live.routers}"
            for name, live in self.live.items()
        ]
        return f"want {tuple(self.wanted)} of {self.target}, {self.strategy!r}; " + "; ".join(parts)


def settled_shares(world: World, shares: dict[str, Fraction]) -> None:
    """Put revisions with all their engines ready into a world, oldest first."""
    world.live = {}
    for name, share in shares.items():
        counts = engines_of(share, world.wanted)
        pods = [Workload(count, [Pod(is_ready=True) for _ in range(count)]) for count in counts]
        world.live[name] = Live(*pods)
