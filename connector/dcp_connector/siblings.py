"""Data-parallel ranks of one engine: how to find one behind the address of another.

vLLM runs each data-parallel rank as an engine core of its own and calls them `ID_dp0`, `ID_dp1`, and so on. The ranks
of one pod listen on successive bootstrap ports, the pod's first one on the configured port, the one that routers know:

    GET /query there names all ranks of the pod, each with its engine id
    a decode engine that is sent there for `ID_dpN` and finds `ID_dpM` asks N - M ports further on
"""

import re
from urllib.parse import urlsplit

__all__ = ["MAX_SIBLINGS", "are_siblings", "data_parallel_rank", "sibling_origin"]

#: Data-parallel ranks in one pod, more than accelerators fit into a machine.
MAX_SIBLINGS = 64

_SUFFIX = re.compile(r"(.+)_dp(\d{1,6})", re.DOTALL)


def data_parallel_rank(engine_id: str) -> int | None:
    """Return the rank in an engine id of vLLM's data parallelism, None for an engine without it."""
    found = _SUFFIX.fullmatch(engine_id)
    return int(found[2]) if found else None


def are_siblings(one: str, other: str) -> bool:
    """Tell whether two engine ids are different ranks of one engine."""
    first, second = _SUFFIX.fullmatch(one), _SUFFIX.fullmatch(other)
    return first is not None and second is not None and first[1] == second[1] and first[2] != second[2]


def sibling_origin(origin: str, found: str, wanted: str) -> str | None:
    """Return where engine `wanted` listens when `found` listens at `origin`, or None if they are not of one engine."""
    here, there = data_parallel_rank(found), data_parallel_rank(wanted)
    if here is None or there is None or not are_siblings(found, wanted) or abs(there - here) >= MAX_SIBLINGS:
        return None
    parts = urlsplit(origin)
    port = (parts.port or 80) + there - here
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}" if 0 < port < 65536 else None
