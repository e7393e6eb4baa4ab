"""tests/acceptance.md names tests that exist."""

import re

import pytest

from tests.support.markdown import ROOT

TABLE = ROOT / "tests/acceptance.md"


def named_tests() -> list[tuple[str, str]]:
    """Return (file, test) of each `file::test` of the table, once; `::test` alone belongs to the file before it."""
    found: list[tuple[str, str]] = []
    file = ""
    for path, test in re.findall(r"`([\w/.-]*)::(\w+)(?:::\w+)*`", TABLE.read_text()):
        file = path or file
        found.append((file, test))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("file", "test"), named_tests(), ids=lambda part: part.rpartition("/")[2])
def test_every_test_that_the_table_names_exists(file: str, test: str) -> None:
    text = (ROOT / file).read_text()
    assert re.search(rf"^ *(?:def|class) {test}\b", text, re.MULTILINE), f"{file} has no {test}"


def test_the_table_names_tests() -> None:
    assert len(named_tests()) > 5
