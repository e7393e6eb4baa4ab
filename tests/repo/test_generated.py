"""Generated files are current, and nothing else lies among them."""

from devcluster.generate import CHECKOUT, generated_files, stray_files


def test_every_generated_file_says_what_its_source_says() -> None:
    files = generated_files()
    stale = [
        path for path, text in files.items() if not (CHECKOUT / path).exists() or (CHECKOUT / path).read_text() != text
    ]
    assert stale == [], "run `make generate`"


def test_nothing_else_lies_among_generated_files() -> None:
    assert stray_files(generated_files()) == []


def test_generating_twice_gives_the_same_bytes() -> None:
    assert generated_files() == generated_files()
