"""Every example is allowed by the rules, and shows nothing that they warn of."""

from pathlib import Path

import pytest

from dcp_operator.cli.documents import read_files
from dcp_operator.rules import check_body

EXAMPLES = sorted(Path("examples").glob("*.yaml"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_holds_objects_that_are_allowed_without_a_word(path):
    contents = read_files([str(path)])
    assert contents.unreadable == ()
    assert contents.documents
    for document in contents.documents:
        report = check_body(document.body)
        assert (report.violations, report.warnings) == ((), ())
