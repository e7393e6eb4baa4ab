"""The flags that vLLM knows, from tables that are generated from vLLM's own parser and checked in beside this module.

`python -m tests.support.flag_tables` writes a table for each supported version; a test holds the files to the
installed release and to the source of the other one.
"""

import difflib
import json
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from dcp_operator.flags.versions import SUPPORTED

#: Comparing texts takes time with the product of their lengths; nothing longer resembles a flag.
_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag: all its spellings and what a value must be.

    Attributes:
        names: every spelling, vLLM's first one first.
        arity: how many values it takes, as argparse's nargs: 0, 1, ?, + or *.
        kind: bool (no value), int, float, size (1k, 2M), size-or-auto, str, name (a choice in any case, with dashes or
            underscores), json, json-or-text (JSON if it is in braces), config (JSON of a configuration object).
        off: the spellings that switch it off: --no-x, and since 0.33 --disable-x for --enable-x and the reverse.
        optional: whether an empty text or None stands for "not set".
        choices: the only values, where vLLM lists them.
        default: the value without the flag, where it is a plain one; None otherwise.
    """

    names: tuple[str, ...]
    arity: str
    kind: str
    off: frozenset[str] = frozenset()
    optional: bool = False
    choices: tuple[str | int, ...] = ()
    default: bool | int | float | str | None = None

    @property
    def canonical(self) -> str:
        """The first long spelling, by which the rest of the code knows the flag."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


@dataclass(frozen=True, slots=True)
class FlagTable:
    """All flags of one vLLM version, or of several together, by spelling."""

    vllm: str
    by_name: dict[str, FlagSpec]
    _sorted: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A frozen dataclass sets what it derives from its fields this way.
        object.__setattr__(self, "_sorted", tuple(sorted(self.by_name)))

    def matching(self, prefix: str) -> list[str]:
        """Return the spellings that start with a prefix: argparse takes an abbreviation if it is the only one."""
        # No flag holds Unicode's last character, so everything with the prefix sorts before the prefix with it.
        begin, end = bisect_left(self._sorted, prefix), bisect_left(self._sorted, prefix + "\U0010ffff")
        return list(self._sorted[begin:end])

    def nearest(self, name: str) -> str | None:
        """Return the known spelling that looks most like an unknown one; None where nothing does."""
        if len(name) > _LONGEST_NAME:
            return None
        return next(iter(difflib.get_close_matches(name, self.by_name, n=1, cutoff=0.75)), None)


@cache
def known_flags(version: str | None = None) -> FlagTable:
    """Return the flags of a supported version, or of all of them where none or another one is named.

    With all of them, a flag that any version knows is known, and what it takes is what the newest says; an abbreviation
    must be unique among all. The files are read once per process.
    """
    if version in SUPPORTED:
        return FlagTable(vllm=version, by_name=_load(version))
    together: dict[str, FlagSpec] = {}
    for supported in SUPPORTED:
        together.update(_load(supported))
    return FlagTable(vllm=" or ".join(SUPPORTED), by_name=together)


def versions_with(name: str) -> tuple[str, ...]:
    """Return the supported versions that know a spelling."""
    return tuple(version for version in SUPPORTED if name in known_flags(version).by_name)


def _load(version: str) -> dict[str, FlagSpec]:
    text = files("dcp_operator.flags").joinpath(f"vllm-{version}.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    by_name: dict[str, FlagSpec] = {}
    for row in content["flags"]:
        spec = FlagSpec(
            names=tuple(row["names"]),
            arity=row["arity"],
            kind=row.get("type", "bool"),
            off=frozenset(row.get("off", ())),
            optional=row.get("optional", False),
            choices=tuple(row.get("choices", ())),
            default=row.get("default"),
        )
        by_name.update(dict.fromkeys(spec.names, spec))
    return by_name
