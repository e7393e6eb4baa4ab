"""Lines of the log: a constant message and fields in JSON, the whole sentence in text, the pass in both."""

import asyncio
import json
import logging

import pytest

from dcp_operator.environment import SettingError, configure_logging
from dcp_operator.logs import JsonFormatter, TextFormatter, pass_over, take_apart


def record(template: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    raised = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("dcp_operator.x", logging.INFO, "x.py", 1, template, arguments, raised)


@pytest.mark.parametrize(
    ("template", "arguments", "message", "fields"),
    [
        ("nothing to fill in", (), "nothing to fill in", {}),
        ("applied object=%s child=%s", ("a/b", "Service c"), "applied", {"object": "a/b", "child": "Service c"}),
        ("watching objects=%d", (3,), "watching", {"objects": 3}),
        (
            "undone again object=%s next_s=%d: find out who, for example with kubectl",
            ("a/b", 4),
            "undone again: find out who, for example with kubectl",
            {"object": "a/b", "next_s": 4},
        ),
        ("about %s of %s object=%s", (1, 2, "x"), "about 1 of 2", {"object": "x"}),
        ("100%% of object=%s", ("x",), "100% of", {"object": "x"}),
        ("too few object=%s child=%s", ("x",), None, {}),
    ],
)
def test_a_template_is_taken_apart_into_a_constant_message_and_fields(
    template: str, arguments: tuple[object, ...], message: str | None, fields: dict[str, object]
):
    given = record(template, *arguments)
    if message is None:
        with pytest.raises(TypeError):
            take_apart(given)
    else:
        assert take_apart(given) == (message, fields)


def test_a_line_of_json_has_the_pass_and_the_object_it_is_about():
    with pass_over("models", "models/chat", "1f0c"):
        line = JsonFormatter().format(record("applied child=%s", "Service chat"))
    said = json.loads(line)
    assert said | {"time": ""} == {
        "time": "",
        "level": "info",
        "logger": "dcp_operator.x",
        "message": "applied",
        "object": "models/chat",
        "namespace": "models",
        "reconcile": "1f0c",
        "child": "Service chat",
    }
    assert "\n" not in line
    assert "reconcile" not in json.loads(JsonFormatter().format(record("idle")))


def test_a_line_of_text_reads_as_it_was_written_with_the_pass_at_its_end():
    with pass_over("models", "models/chat", "1f0c"):
        assert TextFormatter().format(record("applied child=%s", "x")).endswith("applied child=x reconcile=1f0c")
    assert TextFormatter().format(record("applied child=%s", "x")).endswith("applied child=x")


def test_passes_that_run_at_the_same_time_keep_their_lines_apart():
    async def one(number: str) -> str:
        with pass_over("models", f"models/{number}", number):
            await asyncio.sleep(0)
            return json.loads(JsonFormatter().format(record("applied")))["reconcile"]

    async def both() -> list[str]:
        return await asyncio.gather(one("a"), one("b"))

    assert asyncio.run(both()) == ["a", "b"]


def test_a_defects_traceback_is_one_field_of_one_line():
    with pytest.raises(ZeroDivisionError) as raised:
        print(1 / 0)
    line = JsonFormatter().format(record("pass failed", error=raised.value))
    assert "\n" not in line
    assert "ZeroDivisionError: division by zero" in json.loads(line)["traceback"]


def test_no_field_takes_the_place_of_the_lines_own():
    said = json.loads(JsonFormatter().format(record("odd message=%s level=%s", "theirs", "theirs")))
    assert (said["message"], said["level"]) == ("odd", "info")
    assert (said["message_"], said["level_"]) == ("theirs", "theirs")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"DCP_LOG_FORMAT": "xml"}, "DCP_LOG_FORMAT: found 'xml', must be text or json"),
        ({"DCP_LOG_LEVEL": "loud"}, "DCP_LOG_LEVEL: found 'LOUD', must be one of DEBUG, INFO, WARNING, ERROR"),
    ],
)
def test_a_setting_of_the_log_that_makes_no_sense_is_named(environment: dict[str, str], words: str):
    with pytest.raises(SettingError, match=words):
        configure_logging(environment)
