"""Times as Kubernetes writes them: RFC 3339, UTC, in whole seconds."""

from datetime import UTC, datetime
from typing import Final

_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"


def parsed(text: str) -> datetime | None:
    """Return the time that a text states, None where it states none."""
    try:
        return datetime.strptime(text, _FORMAT).replace(tzinfo=UTC)
    except (TypeError, ValueError):
        return None


def written(time: datetime) -> str:
    """Return a time as text; it has to know its zone."""
    return time.astimezone(UTC).strftime(_FORMAT)


def seconds_between(earlier: str, later: str) -> float | None:
    """Return the seconds between two times, None where one of them is none."""
    begin, end = parsed(earlier), parsed(later)
    return (end - begin).total_seconds() if begin is not None and end is not None else None
