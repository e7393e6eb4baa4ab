"""Who runs the cluster of this machine, and what that means for a command. The decision is a pure function."""

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from devcluster.files import read_json


@dataclass(frozen=True, slots=True)
class Owner:
    """The checkout that started the cluster."""

    checkout: str
    since: str  # local time, as printed
    boot_id: str

    def to_json(self) -> str:
        """The record as it is stored."""
        return json.dumps(asdict(self), indent=2) + "\n"


def load_owner(path: Path) -> Owner | None:
    """The stored owner; None when there is none or the file was cut short."""
    fields = read_json(path)
    try:
        return Owner(**(fields or {}))
    except TypeError:
        return None


class Verdict(enum.Enum):
    """What the state folder holds, seen from one checkout."""

    ABSENT = "no cluster"
    OURS = "a cluster of this checkout, with processes alive"
    FOREIGN = "a cluster of another checkout, with processes alive"
    REMAINS = "what a dead cluster left"


def judge(
    owner: Owner | None, *, checkout: str, checkout_exists: bool, alive: Mapping[str, bool], anything_there: bool
) -> Verdict:
    """Decide what the state folder holds.

    Args:
        owner: the stored owner, if any.
        checkout: the folder of the command that asks.
        checkout_exists: whether the owner's folder is still there. A cluster whose checkout was deleted serves nobody.
        alive: for each recorded component, whether its process lives.
        anything_there: whether the state folder exists at all.
    """
    if not anything_there:
        return Verdict.ABSENT
    if owner is None or not any(alive.values()):
        return Verdict.REMAINS
    if owner.checkout == checkout:
        return Verdict.OURS
    return Verdict.FOREIGN if checkout_exists else Verdict.REMAINS


def running_elsewhere(owner: Owner, cache: Path | None = None) -> str:
    """The sentence for a second checkout, or for a second cache, which it names then."""
    where = f"{owner.checkout}{f', with DCP_DISAGG_CACHE={cache}' if cache else ''}"
    return (
        f"the local cluster of this machine has been running since {owner.since} from {where}; "
        "a machine holds one (kube-proxy's iptables chains are machine-wide), "
        "so run `python -m devcluster down` there first"
    )
