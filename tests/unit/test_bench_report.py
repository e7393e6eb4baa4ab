"""What a bench writes: every figure it measured, and none of those that it did not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import mapping
from tests.bench.report import Figure, publish


def rows(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((folder / "some.json").read_text())}


def test_a_whole_run_replaces_all_figures(tmp_path: Path) -> None:
    publish("some", [Figure("gone", 1.0, "s")], folder=tmp_path)
    publish("some", [Figure("new", 2.0, "s")], folder=tmp_path)
    assert list(rows(tmp_path)) == ["new"]


def test_a_partial_run_replaces_its_own_figures_in_their_places_and_no_others(tmp_path: Path) -> None:
    publish("some", [Figure(name, 1.0, "s") for name in ("a", "b", "c")], folder=tmp_path)
    publish("some", [Figure("d", 3.0, "s"), Figure("b", 2.0, "s")], partial=True, folder=tmp_path)
    assert {name: row["value"] for name, row in rows(tmp_path).items()} == {"a": 1.0, "b": 2.0, "c": 1.0, "d": 3.0}
    assert list(rows(tmp_path)) == ["a", "b", "c", "d"]


def test_a_partial_run_needs_no_earlier_one(tmp_path: Path) -> None:
    assert publish("some", [Figure("a", 1.0, "s")], partial=True, folder=tmp_path)
    assert list(rows(tmp_path)) == ["a"]


def test_a_partial_run_is_judged_by_its_own_figures(tmp_path: Path) -> None:
    assert not publish("some", [Figure("slow", 9.0, "s", target=1.0)], folder=tmp_path)
    assert publish("some", [Figure("quick", 1.0, "s", target=1.0)], partial=True, folder=tmp_path)


def test_two_figures_of_one_name_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="several figures of one name: a"):
        publish("some", [Figure("a", 1.0, "s"), Figure("a", 2.0, "s")], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_target_beside_a_baseline_is_a_ratio_and_the_path_is_told_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [
        Figure("linear", 7.0, "ms", baseline=4.0, target=2.0),
        Figure("too slow", 9.0, "ms", baseline=4.0, target=2.0),
        Figure("rate", 3.0, "GB/s", baseline=4.0, target=0.6, better="higher", path="pack"),
        Figure("value", 3.0, "ms", target=4.0),
    ]
    assert not publish("some", figures, folder=tmp_path)
    found = rows(tmp_path)
    assert {name: row["met"] for name, row in found.items()} == {
        "linear": True,
        "too slow": False,
        "rate": True,
        "value": True,
    }
    assert found["rate"]["ratio"] == 0.75
    assert {name: row.get("path") for name, row in found.items() if "path" in row} == {"rate": "pack"}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rate")]
    assert line.split()[-2:] == ["yes", "pack"]


def test_the_bench_of_planning_measures_what_it_names_and_how_each_way_to_plan_grows() -> None:
    figures = mapping.measure(repeats=1)
    assert [figure.name for figure in figures] == mapping.names()
    grown = [figure for figure in figures if figure.baseline is not None]
    assert [(figure.name, figure.target) for figure in grown] == [
        (f"planning: {way}, 4 times the tokens", 2.0) for way in mapping.CACHED
    ]
