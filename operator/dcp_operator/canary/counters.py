"""The connector's counters on an engine's page of metrics, as far as the check reads them.

The names are those of `dcp_connector.stats.METRICS`. Counters are summed over everything but the label `reason`: an
engine with several data-parallel ranks shows a line for each.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_PREFIX: Final = "vllm:dcp_kv_"
_REASON: Final = re.compile(r'[{,]reason="([a-z_]+)"')


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine's counters at one moment, or what was added to them between two."""

    #: Prompt tokens whose KV came from prefill.
    tokens_received: float = 0.0
    #: Prompt tokens that decode computed itself although prefill should have supplied them, by the connector's reason.
    tokens_recomputed: Mapping[str, float] = field(default_factory=dict[str, float])
    #: Transfers that failed, by the connector's reason.
    failed: Mapping[str, float] = field(default_factory=dict[str, float])
    bytes_sent: float = 0.0

    @property
    def total_recomputed(self) -> float:
        """Tokens computed again, for whatever reason."""
        return sum(self.tokens_recomputed.values())


def read_page(page: str) -> Reading | None:
    """Return the counters on a page of metrics, None for a page without any of the connector's."""
    single = {"tokens_received": 0.0, "bytes_sent": 0.0}
    by_reason: dict[str, dict[str, float]] = {"tokens_recomputed": {}, "failed_transfers": {}}
    is_there = False
    for line in page.splitlines():
        if not line.startswith(_PREFIX):
            continue
        name, _, rest = line.partition("{")
        counter = name.partition(" ")[0].removeprefix(_PREFIX).removesuffix("_total")
        value = _number(line)
        if value is None or not name.partition(" ")[0].endswith("_total"):
            continue
        is_there = True
        if counter in single:
            single[counter] += value
        elif counter in by_reason and (reason := _REASON.search("{" + rest)) is not None:
            by_reason[counter][reason[1]] = by_reason[counter].get(reason[1], 0.0) + value
    if not is_there:
        return None
    return Reading(
        tokens_received=single["tokens_received"],
        tokens_recomputed=by_reason["tokens_recomputed"],
        failed=by_reason["failed_transfers"],
        bytes_sent=single["bytes_sent"],
    )


def added(before: Reading, after: Reading) -> Reading | None:
    """Return what was added between two readings of one engine, None where it began anew in between."""
    recomputed = _differences(before.tokens_recomputed, after.tokens_recomputed)
    failed = _differences(before.failed, after.failed)
    received, sent = after.tokens_received - before.tokens_received, after.bytes_sent - before.bytes_sent
    if min(received, sent, *recomputed.values(), *failed.values()) < 0:
        return None
    return Reading(received, recomputed, failed, sent)


def total(readings: list[Reading]) -> Reading:
    """Return the sum over engines."""
    recomputed: dict[str, float] = {}
    failed: dict[str, float] = {}
    for reading in readings:
        for reason, number in reading.tokens_recomputed.items():
            recomputed[reason] = recomputed.get(reason, 0.0) + number
        for reason, number in reading.failed.items():
            failed[reason] = failed.get(reason, 0.0) + number
    received = sum(reading.tokens_received for reading in readings)
    return Reading(received, recomputed, failed, sum(reading.bytes_sent for reading in readings))


def _differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what was added by reason, without those to which nothing was."""
    found = {reason: after.get(reason, 0.0) - before.get(reason, 0.0) for reason in before.keys() | after.keys()}
    return {reason: number for reason, number in sorted(found.items()) if number}


def _number(line: str) -> float | None:
    try:
        value = float(line.rpartition(" ")[2])
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
