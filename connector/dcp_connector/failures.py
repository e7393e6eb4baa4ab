"""The last failure of each kind on a decode rank, in words: what `GET /v1/failures` tells.

    {"failures": [{"reason": "incompatible", "detail": "prefill engine ... doesn't fit: ...", "count": 3, "at": 176}]}

The newest comes first. `at` is in seconds since 1970, `count` since the engine started. Reasons are a closed list and
details are cut, so that it never grows. Nothing in it is about a request: addresses, engine ids and layouts only.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from dcp_connector.errors import Reason

#: Longest detail that is kept, in characters.
MAX_DETAIL: Final = 1000
#: Longest answer of one rank, in bytes: every reason once, each character escaped.
MAX_BYTES: Final = len(Reason) * (6 * MAX_DETAIL + 200)

Entry = dict[str, Any]


class FailureLog:
    """What failed on one rank. Thread-safe. `clock` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[Reason, Entry] = {}

    def add(self, reason: Reason, detail: str) -> None:
        """Take in that a transfer failed."""
        with self._lock:
            count = self._entries.get(reason, {}).get("count", 0) + 1
            self._entries[reason] = {
                "reason": reason.value,
                "detail": detail[:MAX_DETAIL],
                "count": count,
                "at": int(self._clock()),
            }

    def entries(self) -> list[Entry]:
        """Return the last failure of each reason, the newest first."""
        with self._lock:
            return merged([self._entries.values()])


def merged(logs: Iterable[Iterable[Entry]]) -> list[Entry]:
    """Return the failures of several ranks as one list: of each reason the newest, with the counts added."""
    found: dict[str, Entry] = {}
    for log in logs:
        for entry in log:
            before = found.get(entry["reason"])
            newest = entry if before is None or entry["at"] > before["at"] else before
            found[entry["reason"]] = {**newest, "count": entry["count"] + (before["count"] if before else 0)}
    return sorted(found.values(), key=lambda entry: (-entry["at"], entry["reason"]))


def decode(body: bytes) -> list[Entry]:
    """Return the failures in a rank's answer; what isn't one is left out."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return []
    listed = cast("Mapping[str, Any]", value).get("failures") if isinstance(value, dict) else None
    return [entry for entry in cast("list[Any]", listed if isinstance(listed, list) else []) if _is_entry(entry)]


def _is_entry(entry: Any) -> bool:
    kinds = {"reason": str, "detail": str, "count": int, "at": int}
    return isinstance(entry, dict) and all(
        isinstance(cast("Entry", entry).get(key), kind) for key, kind in kinds.items()
    )
