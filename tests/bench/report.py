"""What every bench prints and writes: a table, and build/bench/NAME.json.

The file is a list of {name, value, unit, baseline, ratio, target, met}. `baseline` was measured in the same run and
`ratio` is value / baseline. `target` is a ratio where there is a baseline, else a value; `met` says whether it was
reached.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from devcluster.paths import CHECKOUT

FOLDER = CHECKOUT / "build" / "bench"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure. `better` says on which side of the target it should be."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"

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

    def as_json(self) -> dict[str, object]:
        """Return the figure as it stands in the file."""
        fields = asdict(self)
        del fields["better"]
        return {
            "name": fields["name"],
            "value": fields["value"],
            "unit": fields["unit"],
            "baseline": fields["baseline"],
            "ratio": self.ratio,
            "target": fields["target"],
            "met": self.met,
        }


def publish(bench: str, figures: Sequence[Figure]) -> bool:
    """Print the table and write the file. Returns whether every target was reached."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{bench}.json"
    file.write_text(json.dumps([figure.as_json() for figure in figures], indent=2) + "\n")
    width = max(len(figure.name) for figure in figures)
    print(f"{bench:{width}}  {'value':>12} {'unit':10} {'baseline':>12} {'ratio':>7} {'target':>7} met")
    for figure in figures:
        met = {True: "yes", False: "NO", None: "-"}[figure.met]
        print(
            f"{figure.name:{width}}  {figure.value:12.4g} {figure.unit:10} {_cell(figure.baseline, 12)}"
            f" {_cell(figure.ratio, 7)} {_cell(figure.target, 7)} {met}"
        )
    print(f"written to {file.relative_to(CHECKOUT)}")
    return all(figure.met is not False for figure in figures)


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.3g}"
