"""What travels between the scheduler's and the workers' instances of the connector, once per engine step."""

from dataclasses import dataclass, field

from dcp_connector.errors import Reason
from dcp_connector.requests_decode import Load
from dcp_connector.requests_prefill import Hold


@dataclass(slots=True)
class StepWork:
    """Scheduler to workers: only what came up since the last step. Pickled."""

    holds: list[Hold] = field(default_factory=list[Hold])
    drops: list[tuple[str, Reason]] = field(default_factory=list[tuple[str, Reason]])
    loads: list[Load] = field(default_factory=list[Load])
    aborts: list[str] = field(default_factory=list[str])
    #: transfer id, bootstrap address, engine id
    releases: list[tuple[str, str, str | None]] = field(default_factory=list[tuple[str, str, str | None]])

    def is_empty(self) -> bool:
        """Tell whether nothing came up."""
        return not (self.holds or self.drops or self.loads or self.aborts or self.releases)


@dataclass(slots=True)
class RankReport:
    """Workers to scheduler: how requests ended on a rank, `None` for good. Merged over ranks, pickled.

    `unclear` and `cleared` count ranks: those where a writer may still write into the blocks of a request that ended,
    and those where it can't any more.
    """

    sent: dict[str, Reason | None] = field(default_factory=dict[str, "Reason | None"])
    received: dict[str, Reason | None] = field(default_factory=dict[str, "Reason | None"])
    unclear: dict[str, int] = field(default_factory=dict[str, int])
    cleared: dict[str, int] = field(default_factory=dict[str, int])

    def is_empty(self) -> bool:
        """Tell whether there is nothing to tell."""
        return not (self.sent or self.received or self.unclear or self.cleared)

    def merged(self, other: "RankReport") -> "RankReport":
        """Return both ranks' reports as one."""
        return RankReport(
            merge_outcomes(self.sent, other.sent),
            merge_outcomes(self.received, other.received),
            _sum(self.unclear, other.unclear),
            _sum(self.cleared, other.cleared),
        )


def worst(first: Reason | None, second: Reason | None) -> Reason | None:
    """Return how a request ended over two ranks.

    A failure wins, then "cancelled" (a rank that stopped because another one failed says so), then success, then "this
    rank wasn't needed".
    """
    for reason in (first, second):
        if reason not in (None, Reason.RELEASED, Reason.CANCELLED):
            return reason
    if Reason.CANCELLED in (first, second):
        return Reason.CANCELLED
    return None if None in (first, second) else Reason.RELEASED


def merge_outcomes(first: dict[str, Reason | None], second: dict[str, Reason | None]) -> dict[str, Reason | None]:
    """Return both ranks' outcomes as one."""
    merged = dict(first)
    for request_id, reason in second.items():
        merged[request_id] = worst(merged[request_id], reason) if request_id in merged else reason
    return merged


def _sum(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in first | second}
