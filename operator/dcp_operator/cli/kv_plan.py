"""`dcpctl kv-plan`: who sends which tokens to whom in a transfer between two layouts, and what would be faster."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dcp_connector.geometry import GeometryError, SideLayout
from dcp_operator.cli.kv_plan_words import as_json, as_text
from dcp_operator.cli.problems import EXIT_ALLOWED, EXIT_REFUSED, CliError, Outcome

if TYPE_CHECKING:
    from types import ModuleType

    from dcp_connector.forecast import Question

#: A side's settings by the words that `--prefill` and `--decode` take; the defaults are the custom resource's.
_DEFAULTS = {"tp": 1, "dcp": 1, "interleave": 0, "block": 64}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
#: More would take minutes, and tell nothing new.
_MOST_RANKS = 256
_MOST_TOKENS = 1 << 20
_MOST_LAYERS = 10_000
_MOST_ENTRY_BYTES = 1 << 20

_DEFAULT_HEAD_SIZE = 128
_DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line's words, as they were given. `None` where an option wasn't."""

    prefill: str
    decode: str
    kv_heads: str
    tokens: str
    layers: str
    head_size: str | None
    dtype: str | None
    entry_bytes: str | None
    transport: Literal["tcp", "rdma"]


def kv_plan(asked: Asked, *, output: str) -> Outcome:
    """Return the plan as text or JSON; a side or a pair that can't work is refused with its rules.

    Raises CliError for words that can't be read, and where numpy isn't installed.
    """
    kv_heads = _number("--kv-heads", asked.kv_heads, 1 << 20)
    entry_bytes, meaning = _entry(asked)
    sides = {name: _settings(f"--{name}", getattr(asked, name)) for name in ("prefill", "decode")}
    num_tokens = _number("--tokens", asked.tokens, _MOST_TOKENS)
    num_layers = _number("--layers", asked.layers, _MOST_LAYERS)
    layouts: list[SideLayout] = []
    refusals: list[str] = []
    for name, settings in sides.items():
        try:
            layouts.append(_layout(settings, kv_heads))
        except GeometryError as error:
            refusals += [f"{name}: {each.message} [{each.rule}]" for each in error.violations]
    if refusals:
        return Outcome(EXIT_REFUSED, notes=tuple(refusals))
    for name, layout in zip(sides, layouts, strict=True):
        if layout.tensor_parallel_size > _MOST_RANKS:
            raise CliError(f"--{name}: kv-plan takes up to {_MOST_RANKS} ranks, found {layout.tensor_parallel_size}")
    planner = _planner()
    question: Question = planner.Question(*layouts, num_tokens, entry_bytes, num_layers, asked.transport)
    plan = planner.forecast(question)
    hints = planner.faster(plan)
    if output == "json":
        return Outcome(EXIT_ALLOWED, json.dumps(as_json(plan, hints), ensure_ascii=False) + "\n")
    return Outcome(EXIT_ALLOWED, as_text(plan, hints, meaning))


def _planner() -> ModuleType:
    """Import the connector's planning. It needs numpy, which the operator by itself does not."""
    try:
        from dcp_connector import forecast
    except ModuleNotFoundError as error:
        raise CliError(f"kv-plan needs {error.name}, which isn't installed: pip install numpy") from error
    return forecast


def _settings(option: str, text: str) -> dict[str, int]:
    """Read "tp=4,block=16". Raises CliError in one sentence for every other spelling."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise CliError(f"{option}: found {_quoted(part)} where SETTING=NUMBER is expected, as in tp=4,block=16")
        if name not in _DEFAULTS:
            near = difflib.get_close_matches(name, _DEFAULTS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(_DEFAULTS)}"
            raise CliError(f"{option}: there is no setting {_quoted(name)}; {hint}")
        if name in found:
            raise CliError(f"{option}: {name} is given twice")
        found[name] = _integer(f"{option}: {name}", value)
    return found


def _layout(settings: dict[str, int], kv_heads: int) -> SideLayout:
    """Return the side's geometry. Raises GeometryError."""
    given = _DEFAULTS | settings
    return SideLayout(
        tensor_parallel_size=given["tp"],
        dcp_size=given["dcp"],
        interleave=given["interleave"] if "interleave" in settings else given["block"],
        block_size=given["block"],
        num_kv_heads=kv_heads,
    )


def _entry(asked: Asked) -> tuple[int, str]:
    """Return the bytes of one token and head in a layer, and what they are in words."""
    if asked.entry_bytes is not None:
        if asked.head_size is not None or asked.dtype is not None:
            raise CliError("--entry-bytes already says what --head-size and --dtype say: give one or the other")
        return _number("--entry-bytes", asked.entry_bytes, _MOST_ENTRY_BYTES), "as given"
    head_size = _number("--head-size", asked.head_size or str(_DEFAULT_HEAD_SIZE), _MOST_ENTRY_BYTES // 8)
    dtype = asked.dtype or _DEFAULT_DTYPE
    if dtype not in _DTYPE_BYTES:
        raise CliError(f"--dtype: there is no {_quoted(dtype)}; the types are {', '.join(_DTYPE_BYTES)}")
    return 2 * head_size * _DTYPE_BYTES[dtype], f"key and value of head size {head_size} in {dtype}"


def _number(option: str, text: str, most: int) -> int:
    """Return a number from 1 to `most`. Raises CliError."""
    value = _integer(option, text)
    if not 1 <= value <= most:
        raise CliError(f"{option}: found {value}, must be from 1 to {most}")
    return value


def _integer(where: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise CliError(f"{where}: found {_quoted(text)} where a whole number is expected")
    return int(text)


def _quoted(text: str) -> str:
    """Return what was found, on one line and not too long of it."""
    return ascii(text if len(text) <= 40 else f"{text[:40]}...")
