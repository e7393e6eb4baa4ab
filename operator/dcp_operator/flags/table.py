"""The flags that vLLM knows, from a table that is generated from vLLM's own parser and checked in beside this module.

`tests/contract/vllm_flags.py table` prints the table of an installed vLLM; a test holds the file to it.
"""

import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_TABLE = "vllm-0.32.json"
#: Comparing texts takes time with the product of their lengths; nothing longer resembles a flag.
_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag: all its spellings, how many values it takes (argparse's nargs: 0, 1, ?, + or *), and their kind."""

    names: tuple[str, ...]
    arity: str
    kind: str

    @property
    def canonical(self) -> str:
        """The first long spelling, by which the rest of the code knows the flag."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


@dataclass(frozen=True, slots=True)
class FlagTable:
    """All flags of one vLLM version, by spelling."""

    vllm: str
    by_name: dict[str, FlagSpec]

    def matching(self, prefix: str) -> list[str]:
        """Return the spellings that start with a prefix: argparse takes an abbreviation if it is the only one."""
        return [name for name in self.by_name if name.startswith(prefix)]

    def nearest(self, name: str) -> str | None:
        """Return the known spelling that looks most like an unknown one; None where nothing does."""
        if len(name) > _LONGEST_NAME:
            return None
        return next(iter(difflib.get_close_matches(name, self.by_name, n=1, cutoff=0.75)), None)


@cache
def known_flags() -> FlagTable:
    """Return the table of the supported vLLM version. The file is read once per process."""
    text = files("dcp_operator.flags").joinpath(_TABLE).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    by_name: dict[str, FlagSpec] = {}
    for row in content["flags"]:
        spec = FlagSpec(names=tuple(row["names"]), arity=row["arity"], kind=row.get("kind", "bool"))
        by_name.update(dict.fromkeys(spec.names, spec))
    return FlagTable(vllm=content["vllm"], by_name=by_name)
