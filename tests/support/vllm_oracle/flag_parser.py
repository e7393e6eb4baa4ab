"""What vLLM's own argument parser knows, and how it reads arguments."""

import argparse
import contextlib
import io
import json


def build():
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # 0.33 moved it
        from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def table(parser, version):
    """Return the flags with a row each: `names` in the parser's order, `arity` (argparse's nargs), and, where it says
    something, `off` (spellings that switch off), `type`, `optional` (an empty text or None means "not set"),
    `choices`, and `default` (where it is a plain value that doesn't depend on the machine).
    """
    spellings = {}
    for spelling, action in parser._option_string_actions.items():
        spellings.setdefault(id(action), []).append(spelling)
    rows = [_row(action, spellings[id(action)]) for action in parser._actions if id(action) in spellings]
    return {"vllm": ".".join(version.split(".")[:2]), "flags": rows}


def _row(action, names):
    from vllm.platforms import current_platform

    row = {"names": names, "arity": "1" if action.nargs is None else str(action.nargs)}
    if row["arity"] == "0":
        off = [name for name in names if _switches_off(action, name)]
        return row | ({"off": off} if off else {})
    converters = list(_converters(action.type))
    row["type"] = _type(converters)
    if row["type"] == "name" and not action.choices:
        row["type"] = "str"
    if "optional_type.<locals>._optional_type" in converters:
        row["optional"] = True
    # Choices among which the machine's own device is differ between machines.
    if action.choices and current_platform.device_type not in action.choices:
        row["choices"] = [choice for choice in action.choices if choice is not None]
    if isinstance(action.default, (bool, int, float, str)) and action.default != argparse.SUPPRESS:
        row["default"] = float(action.default) if row["type"] == "float" else action.default
    return row


def _switches_off(action, name):
    if not isinstance(action, argparse.BooleanOptionalAction):
        return False
    namespace = argparse.Namespace()
    action(None, namespace, [], name)
    return getattr(namespace, action.dest) is False


def _converters(convert):
    """Yield the names of a converter and of those that it wraps, outermost first."""
    while convert is not None:
        yield getattr(convert, "__qualname__", repr(convert))
        cells = [cell.cell_contents for cell in getattr(convert, "__closure__", None) or ()]
        convert = next((content for content in cells if callable(content)), None)


def _type(converters):
    """Name what a value must be, from the innermost converter that decides it."""
    for name in reversed(converters):
        known = {
            "int": "int",
            "float": "float",
            "human_readable_int": "size",
            "human_readable_int_or_auto": "size-or-auto",
            "loads": "json",
            "union_dict_and_str": "json-or-text",
            "_compute_kwargs.<locals>.parse_dataclass": "config",
            "EngineArgs.add_cli_args.<locals>.<lambda>": "name",
        }.get(name)
        if known:
            return known
    return "str"


class RefusedError(Exception):
    pass


def parse(parser, arguments):
    """Return the namespace. Raises RefusedError with what the parser would print before it ends the process."""

    def refuse(message):
        raise RefusedError(message)

    parser.error = refuse
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return parser.parse_args(list(arguments))
    except SystemExit as error:
        raise RefusedError(f"SystemExit: {error}") from error
    except (argparse.ArgumentError, IndexError, ValueError, AssertionError, KeyError, OSError, TypeError,
            AttributeError, RecursionError) as error:  # fmt: skip
        raise RefusedError(f"{type(error).__name__}: {error}") from error


def read(parser, arguments):
    """Return the values of all flags that are not at their defaults, by first spelling, or {"error": ...}."""
    try:
        values = vars(parse(parser, arguments))
    except RefusedError as refusal:
        return {"error": str(refusal)[:2000]}
    changed = {}
    for action in parser._actions:
        if action.dest in values and values[action.dest] != action.default:
            name = action.option_strings[0] if action.option_strings else "model_tag"
            changed[name] = _plain(values[action.dest])
    return {"values": changed}


def _plain(value):
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value
