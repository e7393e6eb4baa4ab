"""The control channel's keys: one file, read again when it changes, so that a key is replaced while requests run.

The file holds one key per line, the newest first. The first one seals, all of them open. That alone lets keys be
replaced by hand; but pods see a new file at different times (a kubelet takes up to a minute or two), and so:

    a key that is new in the file     opens at once, and seals only `SEALS_AFTER_S` later, when all pods have it
    a key that is gone from the file  still opens for `OPENS_FOR_S`, for pods that have yet to see the new file
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dcp_connector.errors import StartupError

__all__ = ["MAX_KEYS", "MIN_KEY_BYTES", "KeyFile", "Ring", "parse_keys", "turn"]

logger = logging.getLogger(__name__)

#: Shortest key that is accepted, and most keys in a file.
MIN_KEY_BYTES = 16
MAX_KEYS = 8
SEALS_AFTER_S = 120.0
OPENS_FOR_S = 600.0
#: How often the file is looked at, at most.
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Ring:
    """The keys of the file, newest first; when those that came later begin to seal, and when those that went stop."""

    keys: tuple[bytes, ...] = ()
    seals_from: Mapping[bytes, float] = field(default_factory=dict[bytes, float])
    opens_until: Mapping[bytes, float] = field(default_factory=dict[bytes, float])

    def at(self, now: float) -> tuple[bytes, ...]:
        """Return the keys in use: the one that seals, then the others that open."""
        retired = [key for key, until in self.opens_until.items() if until > now and key not in self.keys]
        every = [*self.keys, *retired]
        seals = next((key for key in every if self.seals_from.get(key, now) <= now), every[0])
        return (seals, *(key for key in every if key != seals))


def turn(ring: Ring, keys: tuple[bytes, ...], now: float) -> Ring:
    """Return the ring after the file's content became `keys`. The first content seals at once."""
    if not ring.keys:
        return Ring(keys)
    seals_from = {key: ring.seals_from.get(key, now) for key in keys if key in ring.keys}
    seals_from |= {key: now + SEALS_AFTER_S for key in keys if key not in ring.keys}
    opens_until = {key: until for key, until in ring.opens_until.items() if until > now and key not in keys}
    opens_until |= {key: now + OPENS_FOR_S for key in ring.keys if key not in keys}
    return Ring(keys, seals_from, opens_until)


def parse_keys(content: bytes) -> tuple[bytes, ...]:
    """Return the keys of a file, in order. Raises ValueError in words."""
    keys = tuple(dict.fromkeys(line.strip() for line in content.splitlines() if line.strip()))
    if not keys:
        raise ValueError(f"has no key, it needs one of at least {MIN_KEY_BYTES} bytes")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"has {len(keys)} keys, at most {MAX_KEYS} are used")
    shortest = min(len(key) for key in keys)
    if shortest < MIN_KEY_BYTES:
        raise ValueError(f"has a key of {shortest} bytes, each needs at least {MIN_KEY_BYTES}")
    return keys


class KeyFile:
    """The keys of a file, as they are now. Safe to call from any thread. Raises StartupError in `__init__` only."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._next_look = clock() + _LOOK_EVERY_S
        try:
            self._mark = self._look()
            self._ring = turn(Ring(), parse_keys(path.read_bytes()), clock())
        except OSError as error:
            raise StartupError(
                f"the control secret {path} can't be read: {error.strerror}; mount the secret there"
            ) from error
        except ValueError as error:
            raise StartupError(
                f"the control secret {path} {error}: make one with `head -c 32 /dev/urandom | base64`"
            ) from error

    def __call__(self) -> tuple[bytes, ...]:
        """Return the keys in use now: the first seals, all open. Reads the file if it changed."""
        with self._lock:
            now = self._clock()
            if now >= self._next_look:
                self._next_look = now + _LOOK_EVERY_S
                self._read_again(now)
            return self._ring.at(now)

    def _read_again(self, now: float) -> None:
        """Follow the file. One that is gone or wrong changes nothing: the keys at hand are still good."""
        try:
            mark = self._look()
            if mark == self._mark:
                return
            self._mark = mark
            keys = parse_keys(self._path.read_bytes())
        except OSError as error:
            if self._mark is not None:
                self._mark = None
                logger.error("dcp: the control secret %s can't be read any more: %s", self._path, error.strerror)  # noqa: TRY400
            return
        except ValueError as error:
            logger.error("dcp: the changed control secret %s %s; the keys from before are kept", self._path, error)  # noqa: TRY400
            return
        if keys != self._ring.keys:
            self._ring = turn(self._ring, keys, now)
            logger.info("dcp: the control secret %s changed: it has %d keys now", self._path, len(keys))

    def _look(self) -> tuple[int, int, int] | None:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size
