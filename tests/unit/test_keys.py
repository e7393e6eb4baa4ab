"""Keys of the control channel: what a file may hold, and how one key takes over from another."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dcp_connector.errors import StartupError
from dcp_connector.keys import MAX_KEYS, OPENS_FOR_S, SEALS_AFTER_S, KeyFile, Ring, parse_keys, turn

OLD, NEW, NEWEST = b"the old key of the channel", b"the new key of the channel", b"the newest of the three keys"


def test_a_file_holds_one_key_a_line_the_newest_first() -> None:
    assert parse_keys(NEW + b"\n\n  " + OLD + b"  \r\n" + NEW + b"\n") == (NEW, OLD)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no key"),
        (b" \n\n", "has no key"),
        (b"short", "has a key of 5 bytes, each needs at least 16"),
        (NEW + b"\nshort\n", "has a key of 5 bytes"),
        (b"\n".join(b"a key of a great many keys %d" % n for n in range(MAX_KEYS + 1)), "has 9 keys, at most 8"),
    ],
)
def test_a_file_without_good_keys_is_refused_in_words(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_keys(content)


def test_the_first_key_of_the_first_content_seals_and_all_open() -> None:
    assert turn(Ring(), (NEW, OLD), 100).at(100) == (NEW, OLD)


def test_a_key_that_comes_later_opens_at_once_and_seals_when_all_pods_have_it() -> None:
    ring = turn(turn(Ring(), (OLD,), 0), (NEW, OLD), 100)
    assert ring.at(100) == (OLD, NEW)
    assert ring.at(100 + SEALS_AFTER_S - 1) == (OLD, NEW)
    assert ring.at(100 + SEALS_AFTER_S) == (NEW, OLD)


def test_a_key_that_is_replaced_seals_on_and_opens_on_for_a_while() -> None:
    ring = turn(turn(Ring(), (OLD,), 0), (NEW,), 100)
    assert ring.at(101) == (OLD, NEW)
    assert ring.at(100 + SEALS_AFTER_S) == (NEW, OLD)
    assert ring.at(100 + OPENS_FOR_S) == (NEW,)


def test_a_second_change_does_not_start_the_first_one_over() -> None:
    ring = turn(turn(turn(Ring(), (OLD,), 0), (NEW,), 100), (NEWEST, NEW), 150)
    assert ring.at(150) == (OLD, NEWEST, NEW)
    assert ring.at(100 + SEALS_AFTER_S)[0] == NEW
    assert ring.at(150 + SEALS_AFTER_S)[0] == NEWEST
    assert OLD not in ring.at(100 + OPENS_FOR_S)


def test_a_key_that_comes_back_is_not_forgotten() -> None:
    ring = turn(turn(turn(Ring(), (OLD,), 0), (NEW,), 100), (OLD,), 110)
    assert set(ring.at(110)) == {OLD, NEW}
    assert ring.at(110 + OPENS_FOR_S) == (OLD,)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def replace(path: Path, content: bytes) -> None:
    """Swap the file as a kubelet does: another file under the same name."""
    other = path.with_suffix(".next")
    other.write_bytes(content)
    other.replace(path)


def test_a_changed_file_is_followed(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "key"
    path.write_bytes(OLD)
    keys = KeyFile(path, clock)
    replace(path, NEW + b"\n" + OLD)
    assert keys() == (OLD,), "the file is not read for every message"
    clock.now = 2
    assert keys() == (OLD, NEW)
    clock.now = 2 + SEALS_AFTER_S
    assert keys() == (NEW, OLD)


@pytest.mark.parametrize("content", [b"", b"short", None])
def test_a_file_that_goes_bad_is_said_once_and_changes_nothing(
    tmp_path: Path, clock: Clock, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.write_bytes(OLD)
    keys = KeyFile(path, clock)
    if content is None:
        path.unlink()
    else:
        replace(path, content)
    with caplog.at_level(logging.INFO, "dcp_connector"):
        for clock.now in (2.0, 4.0, 6.0):
            assert keys() == (OLD,)
    assert len(caplog.records) == 1
    replace(path, NEW)
    clock.now = 8
    assert keys() == (OLD, NEW)


def test_a_file_that_is_not_there_refuses_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="can't be read: No such file or directory; mount the secret there"):
        KeyFile(tmp_path / "key")
