"""The command line: arguments in, exit code out. Commands are imported when they run, so that help is instant."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from dcp_operator.cli.problems import EXIT_ALLOWED, EXIT_UNREADABLE, CliError, Outcome

Command = Callable[[argparse.Namespace], Outcome]

#: What shells expect of a command that was interrupted: 128 and the signal's number.
_EXIT_INTERRUPTED = 130
_EXIT_CODES = "exit codes: 0 allowed, 1 refused, 2 unreadable or wrongly called"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what goes wrong is one sentence on stderr."""
    arguments = _parser(_program()).parse_args(argv)
    command: Command = arguments.run
    try:
        outcome = command(arguments)
    except CliError as error:
        _note(f"{_program()}: {error}")
        return EXIT_UNREADABLE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    for note in outcome.notes:
        _note(note)
    return outcome.code if _write(outcome.out) else EXIT_UNREADABLE


def _write(text: str) -> bool:
    """Write to stdout; return False if the text was lost."""
    out: TextIO | None = sys.stdout
    if out is None or not text:
        # The shell has closed stdout on purpose (`>&-`): only the exit code is wanted.
        return True
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        # The reader has what it wanted (`dcpctl ... | head`), and the exit code still tells the verdict.
        _silence_stdout()
    except OSError as error:
        _silence_stdout()
        _note(f"{_program()}: the output can't be written: {error.strerror or error}")
        return False
    return True


def _note(message: str) -> None:
    err: TextIO | None = sys.stderr
    if err is not None:
        with contextlib.suppress(OSError):
            print(message, file=err)


def _silence_stdout() -> None:
    """Point stdout at nothing: Python flushes it once more at exit and would complain about the same error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "kubectl dcpd" if name.startswith("kubectl") else "dcpctl"


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Check and render DCPDisaggDeployment objects, without a cluster.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    validate = commands.add_parser(
        "validate",
        help="check objects with the rules of the admission webhook",
        description="Check objects with the rules of the admission webhook. Objects of other kinds are passed over.",
        epilog=_EXIT_CODES,
    )
    _add_files(validate)
    validate.add_argument(
        "-o",
        "--output",
        choices=("text", "json"),
        default="text",
        help="text, or json: one line per object with allowed, violations and warnings",
    )
    validate.set_defaults(run=_validate)

    render = commands.add_parser(
        "render",
        help="print every manifest that the operator would apply",
        description="Print every manifest that the operator would apply, as YAML. Refused objects are not rendered.",
        epilog=_EXIT_CODES,
    )
    _add_files(render)
    render.add_argument(
        "--operator-image",
        metavar="IMAGE",
        help="image of the router and of the connector's init container; by default that of this version",
    )
    render.set_defaults(run=_render)

    crds = commands.add_parser("crds", help="print the CustomResourceDefinition")
    crds.set_defaults(run=_crds)

    explain = commands.add_parser("explain", help="say what a rule asks for, why, and how to satisfy it")
    explain.add_argument("rule", nargs="?", metavar="RULE", help="a rule's id; without one, all rules are listed")
    explain.set_defaults(run=_explain)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--filename",
        dest="files",
        metavar="FILE",
        action="append",
        required=True,
        help="a file, a folder (its .yaml, .yml and .json files, subfolders included) or - for stdin; may be repeated",
    )


class _Version(argparse.Action):
    """Prints the version of the installed distribution; looking it up is left until it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from dcp_operator.cli.version import version

        print(f"{parser.prog} {version()}")
        parser.exit(EXIT_ALLOWED)


def _validate(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.validate import validate

    return validate(arguments.files, output=arguments.output)


def _render(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.render import render_files

    return render_files(arguments.files, operator_image=arguments.operator_image)


def _crds(_: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.crds import crd_yaml

    return Outcome(EXIT_ALLOWED, crd_yaml())


def _explain(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.explain import explain_rule

    return Outcome(EXIT_ALLOWED, explain_rule(arguments.rule) + "\n")
