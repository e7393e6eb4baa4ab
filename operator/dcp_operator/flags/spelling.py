"""The rewriting that vLLM does before argparse sees its arguments (`FlexibleArgumentParser.parse_args`).

Underscores of a flag's name become dashes, `-O3` becomes `--optimization-level 3`, and dotted keys
(`--kv-transfer-config.kv_role x`) are gathered into one JSON value per flag, which is put behind all other arguments.
Every token remembers the item of `extraArgs` it came from.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from dcp_operator.flags.convert import BadValueError, size

_NAME = re.compile(r"(?<=--)[^\.]*")
#: Dotted keys deeper than this are no configuration of vLLM's.
_MAX_DEPTH = 32
_OPTIMIZATION_LEVELS = frozenset("0123")


class Token(NamedTuple):
    """One argument as argparse would see it, and the index of the item of `extraArgs` that it stems from."""

    text: str
    origin: int


class Rewritten(NamedTuple):
    """Rewritten arguments, and the origins of dotted keys that lack their value or nest beyond reason."""

    tokens: tuple[Token, ...]
    unreadable: tuple[int, ...]


def rewrite(arguments: Sequence[str]) -> Rewritten:
    """Return the arguments as vLLM hands them to argparse. Never fails."""
    return _gather_dotted(_normalise(arguments))


def _normalise(arguments: Sequence[str]) -> list[Token]:
    tokens: list[Token] = []
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = _NAME.sub(lambda match: match.group(0).replace("_", "-"), name, count=1)
            tokens.append(Token(name + equals + value, index))
        elif argument.startswith("-O") and argument != "-O":
            tokens.append(Token("--optimization-level", index))
            tokens.append(Token(argument[3:] if argument[2] == "=" else argument[2:], index))
        elif argument == "-O" and "".join(arguments[index + 1 : index + 2]) in _OPTIMIZATION_LEVELS:
            tokens.append(Token("--optimization-level", index))
        else:
            tokens.append(Token(argument, index))
    return tokens


def _gather_dotted(tokens: list[Token]) -> Rewritten:
    plain: list[Token] = []
    gathered: dict[str, dict[str, Any]] = {}
    first_index: dict[str, int] = {}
    unreadable: list[int] = []
    position = 0
    while position < len(tokens):
        text, index = tokens[position]
        position += 1
        name, equals, value = text.partition("=")
        if not name.startswith("-") or "." not in name:
            plain.append(Token(text, index))
            continue
        if not equals:
            if position == len(tokens):
                unreadable.append(index)
                continue
            value = tokens[position].text
            position += 1
        if name.count(".") > _MAX_DEPTH:
            unreadable.append(index)
            continue
        if name.endswith("+"):
            name = name[:-1]
            value = json.dumps(value.split(","))
        flag, *keys = name.split(".")
        try:
            content = _nest(keys, _value(value))
        except OverflowError:
            unreadable.append(index)
            continue
        first_index.setdefault(flag, index)
        _merge(gathered.setdefault(flag, {}), content)
    for flag, content in gathered.items():
        try:
            text = json.dumps(content)
        except (RecursionError, ValueError):
            unreadable.append(first_index[flag])
        else:
            plain += [Token(flag, first_index[flag]), Token(text, first_index[flag])]
    return Rewritten(tuple(plain), tuple(unreadable))


def _value(text: str) -> Any:
    """Return what a dotted key's value means: JSON, a size such as 80g, or the text itself.

    Raises OverflowError where vLLM ends with an error of Python: too deep, or a number with thousands of digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        try:
            return size(text)
        except BadValueError as error:
            if isinstance(error.__cause__, OverflowError):
                raise OverflowError from error
            return text
    except (ValueError, RecursionError) as error:
        raise OverflowError from error


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value


def _merge(target: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        present = target.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            _merge(cast("dict[str, Any]", present), cast("dict[str, Any]", value))
        elif isinstance(value, list) and isinstance(present, list):
            cast("list[Any]", present).extend(cast("list[Any]", value))
        else:
            target[key] = value
