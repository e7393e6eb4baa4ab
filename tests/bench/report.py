"""What every bench prints and writes: a table, and build/bench/NAME.json.

The file is a list of {name, value, unit, baseline, ratio, target, met}. `baseline` was measured in the same run and
`ratio` is value / baseline. `target` is a ratio where there is a baseline, else a value; `met` says whether it was
reached. A figure that says which path the bytes took has `path` too.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from devcluster.paths import CHECKOUT

FOLDER = CHECKOUT / "build" / "bench"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure. `better` says on which side of the target it should be, `path` which one was observed."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"
    path: str | None = None

    @property
    def ratio(self) -> float | None:
        """Value over baseline, where there is a baseline."""
        return None if not self.baseline else self.value / self.baseline

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without one."""
        if self.target is None:
            return None
        measured = self.value if self.ratio is None else self.ratio
        return measured <= self.target if self.better == "lower" else measured >= self.target

    def as_json(self) -> Row:
        """Return the figure as it stands in the file."""
        row: Row = {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "baseline": self.baseline,
            "ratio": self.ratio,
            "target": self.target,
            "met": self.met,
        }
        return row if self.path is None else {**row, "path": self.path}


def publish(bench: str, figures: Sequence[Figure], *, partial: bool = False, folder: Path = FOLDER) -> bool:
    """Print the table and write the file. Returns whether every target was reached.

    A partial run, one of some figures only, leaves the others in the file as they are. Raises ValueError if two figures
    have the same name.
    """
    twice = [name for name, count in Counter(figure.name for figure in figures).items() if count > 1]
    if twice:
        raise ValueError(f"bench {bench} has several figures of one name: {', '.join(twice)}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{bench}.json"
    earlier: list[Row] = json.loads(file.read_text()) if partial and file.exists() else []
    file.write_text(json.dumps(merged(earlier, [figure.as_json() for figure in figures]), indent=2) + "\n")
    _print(bench, figures)
    kept = "; its other figures are those of earlier runs" if partial else ""
    print(f"written to {file.relative_to(CHECKOUT) if file.is_relative_to(CHECKOUT) else file}{kept}")
    return all(figure.met is not False for figure in figures)


def merged(earlier: Sequence[Row], measured: Sequence[Row]) -> list[Row]:
    """Return the earlier rows with those that were measured again in their places, and new ones at the end."""
    new = {row["name"]: row for row in measured}
    return [new.pop(row["name"], row) for row in earlier] + list(new.values())


def _print(bench: str, figures: Sequence[Figure]) -> None:
    width = max(len(figure.name) for figure in figures)
    paths = any(figure.path for figure in figures)
    title = f"{bench:{width}}  {'value':>12} {'unit':10} {'baseline':>12} {'ratio':>7} {'target':>7} met"
    print(f"{title} path" if paths else title)
    for figure in figures:
        met = {True: "yes", False: "NO", None: "-"}[figure.met]
        line = (
            f"{figure.name:{width}}  {figure.value:12.4g} {figure.unit:10} {_cell(figure.baseline, 12)}"
            f" {_cell(figure.ratio, 7)} {_cell(figure.target, 7)} {met:3}"
        )
        print(f"{line} {figure.path or '-'}" if paths else line.rstrip())


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.3g}"
