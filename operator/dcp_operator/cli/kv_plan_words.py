"""A forecast of the connector as text for people and as JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcp_connector.forecast import Delivery, Forecast, Hint
    from dcp_connector.geometry import SideLayout

#: Rank pairs that the text lists, and token ranges that it shows of each.
_SHOWN_PAIRS = 64
_SHOWN_RANGES = 4
_HEADINGS = ("prefill rank", "decode rank", "KV heads", "tokens", "count", "path", "fragments", "mean size")
_WAYS = {
    "direct": "straight from page to page",
    "pack": "gathered on prefill",
    "scatter": "gathered on prefill and put in place on decode",
}


def as_text(plan: Forecast, hints: Sequence[Hint], entry: str) -> str:
    """Return the plan for people; `entry` says what the bytes of an entry are."""
    asked = plan.question
    heads, layers = _count(asked.prefill.num_kv_heads, "KV head"), _count(asked.num_layers, "layer")
    lines = [
        f"prefill    {_side(asked.prefill)}",
        f"decode     {_side(asked.decode)}",
        f"prompt     {_count(asked.num_tokens, 'token')}, {heads}, {layers}",
        f"entry      {asked.entry_bytes} bytes of one token, head and layer ({entry})",
        f"transport  {asked.transport}",
        "",
        *_table([_HEADINGS, *(_row(each) for each in plan.deliveries[:_SHOWN_PAIRS])]),
    ]
    left_out = len(plan.deliveries) - _SHOWN_PAIRS
    if left_out > 0:
        lines.append(f"... and {_count(left_out, 'rank pair')} more; -o json lists all")
    lines += ["", *_summary(plan), ""]
    if hints:
        lines += ["What would be faster:", *(f"- {_hint(hint, plan)}" for hint in hints)]
    else:
        lines.append(_nothing_faster(plan))
    return "\n".join(lines) + "\n"


def as_json(plan: Forecast, hints: Sequence[Hint]) -> dict[str, Any]:
    """Return the plan for programs. `tokenRanges` are the first ones, each [first token, last token]."""
    asked = plan.question
    return {
        "prefill": _side_json(asked.prefill),
        "decode": _side_json(asked.decode),
        "kvHeads": asked.prefill.num_kv_heads,
        "tokens": asked.num_tokens,
        "layers": asked.num_layers,
        "entryBytes": asked.entry_bytes,
        "transport": asked.transport,
        **_totals(plan),
        "idlePrefillRanks": list(plan.idle_prefill_ranks),
        "deliveries": [
            {
                "prefillRank": each.prefill_rank,
                "decodeRank": each.decode_rank,
                "kvHeads": list(each.heads),
                "tokens": each.num_tokens,
                "numTokenRanges": each.num_ranges,
                "tokenRanges": [list(pair) for pair in each.ranges],
                "path": each.path,
                "bytes": each.num_bytes,
                "fragments": each.num_fragments,
                "meanFragmentBytes": round(each.fragment_bytes, 1),
            }
            for each in plan.deliveries
        ],
        "faster": [
            {"changes": _changes_json(hint), **_totals(hint.result), "words": _hint(hint, plan)} for hint in hints
        ],
    }


def _totals(plan: Forecast) -> dict[str, Any]:
    return {
        "bytes": plan.num_bytes,
        "fragments": plan.num_fragments,
        "meanFragmentBytes": round(plan.num_bytes / max(1, plan.num_fragments), 1),
        "pairsByPath": dict(plan.paths),
    }


def _changes_json(hint: Hint) -> dict[str, dict[str, int]]:
    changes: dict[str, dict[str, int]] = {}
    for side, setting, value in hint.changes:
        changes.setdefault(side, {})[setting] = value
    return changes


def _side(side: SideLayout) -> str:
    interleave = f", interleave {side.interleave}" if side.dcp_size > 1 else ""
    return f"tp {side.tensor_parallel_size}, dcp {side.dcp_size}{interleave}, block {side.block_size}"


def _side_json(side: SideLayout) -> dict[str, int]:
    return {
        "tp": side.tensor_parallel_size,
        "dcp": side.dcp_size,
        "interleave": side.interleave,
        "block": side.block_size,
    }


def _row(each: Delivery) -> tuple[str, ...]:
    return (
        str(each.prefill_rank),
        str(each.decode_rank),
        _ranges((head, head) for head in each.heads),
        _tokens(each),
        str(each.num_tokens),
        each.path,
        str(each.num_fragments),
        _size(each.fragment_bytes),
    )


def _tokens(each: Delivery) -> str:
    shown = each.ranges[:_SHOWN_RANGES]
    return _ranges(iter(shown)) + (", ..." if each.num_ranges > len(shown) else "")


def _ranges(pairs: Iterator[tuple[int, int]]) -> str:
    """Return "0-15, 32-47, 64": neighbours are joined."""
    joined: list[tuple[int, int]] = []
    for first, last in pairs:
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in joined)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows with their columns below one another; the last three but the path to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numbers = {4, 6, 7}
    for row in rows:
        cells = [
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _summary(plan: Forecast) -> Iterator[str]:
    if not plan.deliveries:
        yield "Nothing is sent."
        return
    ways = "; ".join(f"{number} {path} ({_WAYS[path]})" for path, number in plan.paths.items())
    yield f"{_count(len(plan.deliveries), 'rank pair')}: {ways}."
    mean = _size(plan.num_bytes / plan.num_fragments)
    yield f"{_size(plan.num_bytes)} in {_count(plan.num_fragments, 'fragment')} of {mean} on average."
    idle = plan.idle_prefill_ranks
    if idle:
        ranks = _ranges((rank, rank) for rank in idle)
        yield (
            f"Prefill {'rank' if len(idle) == 1 else 'ranks'} {ranks} send{'s' if len(idle) == 1 else ''} nothing this "
            "time: others hold the same heads and tokens, and a hash of the transfer picks one."
        )


def _hint(hint: Hint, now: Forecast) -> str:
    """Return one change in words: what to set, and what it brings."""
    sides: dict[str, list[str]] = {}
    for side, setting, value in hint.changes:
        sides.setdefault(side, []).append(f"{setting}={value}")
    settings = " and ".join(f"{side} {','.join(values)}" for side, values in sides.items())
    result = hint.result
    paths = " and ".join(f"{number} {path}" for path, number in result.paths.items())
    if result.copies < now.copies:
        gain = "nothing is copied on the hosts" if result.copies == 0 else "less is copied on the hosts"
    else:
        gain = "larger fragments"
    mean = _size(result.num_bytes / max(1, result.num_fragments))
    return f"{settings}: {gain}. {paths}, {_count(result.num_fragments, 'fragment')} of {mean} on average."


def _nothing_faster(plan: Forecast) -> str:
    if set(plan.paths) <= {"direct"}:
        return "Nothing would be much faster: large fragments go straight from page to page."
    return "No other interleave or block size that was tried would be faster."


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _size(num_bytes: float) -> str:
    """Return bytes in the largest unit of which there is at least one: "8.0 KiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
