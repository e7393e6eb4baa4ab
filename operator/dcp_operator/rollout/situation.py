"""What a step of a rollout is computed from, and what comes out: numbers only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from dcp_operator.names import ROUTER
from dcp_operator.rollout.shares import NONE, Bounds, Pair, share_of
from dcp_operator.settings import Role


def is_users_router(stated: int | None, asked: int | None, *, is_target: bool) -> bool:
    """Whether requests reach the engines of a revision through a router of the user's own, and none of ours is needed.

    That is what spec.router.replicas 0 means (`stated`; None where no spec is acted upon). An older revision whose
    router workload asks for none (`asked`; None without a workload) was made under such a spec, and stays so: no router
    of ours may suit its connector.
    """
    return stated == 0 or (asked == 0 and not is_target)


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines of one role of one revision."""

    #: That its workload asks for.
    replicas: int = 0
    ready: int = 0
    #: That exist, and have not been ready for so long that nobody counts on them.
    stale: int = 0
    #: That no node can take.
    unschedulable: int = 0

    @property
    def counted(self) -> int:
        """Ready ones that stay: of too many, Kubernetes removes those that aren't ready first."""
        return min(self.ready, self.replicas)

    def kept(self, *, without_stale: bool) -> int:
        """Return those asked for, without the stale ones if so wanted."""
        return max(self.replicas - self.stale, self.counted) if without_stale else self.replicas


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision that has a workload."""

    name: str
    prefill: Engines = field(default_factory=Engines)
    decode: Engines = field(default_factory=Engines)
    #: Routers that its workload asks for; None where it has no such workload.
    routers: int | None = None
    ready_routers: int = 0

    @property
    def replicas(self) -> Pair:
        """Engines that are asked for."""
        return Pair(self.prefill.replicas, self.decode.replicas)

    @property
    def ready(self) -> Pair:
        """Engines that are ready."""
        return Pair(self.prefill.counted, self.decode.counted)

    @property
    def stale(self) -> int:
        """Engines of both roles that nobody counts on."""
        return self.prefill.stale + self.decode.stale

    @property
    def unschedulable(self) -> int:
        """Engines of both roles that no node can take."""
        return self.prefill.unschedulable + self.decode.unschedulable

    def kept(self, *, without_stale: bool) -> Pair:
        """Return the engines that are asked for, without the stale ones if so wanted."""
        return Pair(self.prefill.kept(without_stale=without_stale), self.decode.kept(without_stale=without_stale))


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that the next step depends on."""

    bounds: Bounds
    #: Routers wanted; with 0 the engines answer to a router that is not this object's.
    routers: int
    #: The revision that the spec asks for.
    target: str
    #: Those that have a workload, the target too if it has; oldest first.
    revisions: tuple[Revision, ...] = ()
    is_paused: bool = False

    @property
    def new(self) -> Revision | None:
        """The target, if it has a workload."""
        return next((revision for revision in self.revisions if revision.name == self.target), None)

    @property
    def old(self) -> tuple[Revision, ...]:
        """All others, oldest first."""
        return tuple(revision for revision in self.revisions if revision.name != self.target)

    def paired(self, revision: Revision) -> Fraction:
        """Return the share of a revision's ready engines, whatever its routers do."""
        return share_of(revision.ready, self.bounds.wanted)

    def serving(self, revision: Revision) -> Fraction:
        """Return the share of requests that a revision can answer: nothing without the router that it needs."""
        is_routed = self.users_router(revision) or min(revision.ready_routers, revision.routers or 0) > 0
        return self.paired(revision) if is_routed else NONE

    def users_router(self, revision: Revision) -> bool:
        """Whether requests reach a revision's engines through a router of the user's own."""
        return is_users_router(self.routers, revision.routers, is_target=revision.name == self.target)

    def can_serve(self, revision: Revision) -> bool:
        """Whether an old revision can answer requests some day: a workload of routers that is gone is not made again.

        A revision that is going is in that state, and so it goes on going.
        """
        return self.routers == 0 or revision.routers is not None


@dataclass(frozen=True, slots=True)
class Counts:
    """Replicas that a revision's workloads should have."""

    prefill: int
    decode: int
    router: int

    @property
    def engines(self) -> Pair:
        """Those of the engines."""
        return Pair(self.prefill, self.decode)

    def of(self, component: str) -> int:
        """Return those of a component; raises KeyError for another word."""
        return {Role.PREFILL.value: self.prefill, Role.DECODE.value: self.decode, ROUTER: self.router}[component]


@dataclass(frozen=True, slots=True)
class Step:
    """What the workloads should be next. A revision in neither mapping is not made."""

    #: Of revisions that exist or are made.
    replicas: Mapping[str, Counts]
    #: Revisions that go, routers first, each with why.
    retired: Mapping[str, str]
    #: What the next step waits for, in words; None where nothing is left to do.
    waits_for: str | None = None
