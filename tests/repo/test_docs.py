"""The documentation: links lead somewhere, examples are legal, commands exist, prose keeps to STYLE.md."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dcp_operator.reasons import Reason
from dcp_operator.rules import check_body
from tests.support.markdown import ROOT, anchors, blocks, links, pages, prose

PAGES = pages()
#: Words that STYLE.md leaves out: they call a thing easy, or promise what isn't there.
BANNED = re.compile(r"\b(simply|just|easily|obviously|of course|coming soon|TODO|TBD)\b", re.IGNORECASE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def objects_in(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for block in blocks(text):
        if block.language in ("yaml", "yml"):
            found += [document for document in yaml.safe_load_all(block.text) if isinstance(document, dict)]
    return [document for document in found if document.get("kind") == "DCPDisaggDeployment"]


def test_the_documentation_is_there() -> None:
    assert {"README.md", "CONTRIBUTING.md", "STYLE.md", "SECURITY.md", "CHANGELOG.md"} <= {name(path) for path in PAGES}
    for folder in ("tutorial", "how-to", "reference", "explanation", "adr"):
        assert list((ROOT / "docs" / folder).glob("*.md")), folder


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in links(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} leads nowhere"
        assert there.is_relative_to(ROOT), f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{target}: the page has no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if objects_in(page.read_text())], ids=name)
def test_objects_in_the_documentation_are_legal(page: Path) -> None:
    for document in objects_in(page.read_text()):
        report = check_body(document)
        assert report.violations == ()
        assert report.warnings == ()


def test_the_readme_shows_an_object() -> None:
    assert objects_in((ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if "reference" not in page.parts], ids=name)
def test_prose_leaves_out_words_that_call_a_thing_easy(page: Path) -> None:
    assert BANNED.findall(prose(page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_starts_with_its_one_title(page: Path) -> None:
    text = re.sub(r"<!--.*?-->\s*", "", page.read_text(), flags=re.DOTALL)
    if "changelog.d" in page.parts:
        assert not text.startswith("#"), "a fragment is one sentence"
        assert len(text.strip().splitlines()) == 1
        assert text.strip().endswith(".")
        return
    assert text.startswith("# ")
    outside = "\n".join(line for line in prose(text).splitlines() if line.startswith("# "))
    assert outside.count("\n") == 0, "a second title"


def test_headings_are_in_sentence_case() -> None:
    names = {"API", "CustomResourceDefinition", "DCPDisaggDeployment", "GPU", "Helm", "Kubernetes", "Mooncake's", "KV"}
    for page in PAGES:
        for heading in re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE):
            words = re.sub(r"^\d+\. ", "", heading).split()[1:]
            odd = [word for word in words if word[:1].isupper() and word.strip(".,:") not in names]
            assert odd == [], f"{name(page)}: {heading}"


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        spans = re.findall(r"`(make [a-z -]+)`", text)
        lines = [line for block in blocks(text) for line in block.text.splitlines() if line.startswith("make ")]
        for command in (*spans, *lines):
            assert set(command.split()[1:]) <= targets, f"{name(page)}: {command}"


def test_every_file_that_a_command_names_exists() -> None:
    pattern = re.compile(r"(?<![\w/.])((?:examples|charts|docker|devcluster|docs)/[\w./-]+)")
    for page in PAGES:
        for block in blocks(page.read_text()):
            for path in pattern.findall(block.text):
                assert (ROOT / path).exists(), f"{name(page)}: {path}"


def test_every_reason_that_means_trouble_has_a_row_in_the_debugging_page() -> None:
    text = (ROOT / "docs/how-to/debug.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    well = {Reason.RULES_PASSED, Reason.PODS_READY, Reason.ROLLED_OUT, Reason.SERVING, Reason.VERIFIED}
    well |= {Reason.OWN_ROUTER}
    missing = [reason.value for reason in Reason if reason not in well and not re.search(rf"\b{reason.value}\b", rows)]
    assert missing == []


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs/adr").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))
    for path in (ROOT / "docs/adr").glob("*.md"):
        first = path.read_text().splitlines()[0]
        assert first.startswith(f"# {int(path.name[:4])}. "), name(path)


def test_nothing_names_the_machine_that_it_was_written_on() -> None:
    pattern = re.compile("|".join(re.escape(f"{folder}/") for folder in (Path.home(), ROOT.parent)))
    suffixes = {".md", ".py", ".yaml", ".yml", ".toml", ".json", ".txt", ".sh", ".tpl", ".Dockerfile", ".mod"}
    skipped = {".venv", "build", ".git", ".hypothesis", "node_modules"}
    for path in ROOT.rglob("*"):
        if path.suffix in suffixes and path.is_file() and not skipped & set(path.relative_to(ROOT).parts[:1]):
            found = pattern.findall(path.read_text())
            assert found == [], f"{name(path)} names {found}"
