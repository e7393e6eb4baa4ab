"""The command line: arguments in, exit code out. Commands are imported when they run, so that help is instant."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from dcp_operator.cli.numbers import positive
from dcp_operator.cli.problems import EXIT_ALLOWED, EXIT_UNREADABLE, CliError, Outcome
from dcp_operator.cli.rollout_arguments import add_rollout

Command = Callable[[argparse.Namespace], Outcome]

#: What shells expect of a command that was interrupted: 128 and the signal's number.
_EXIT_INTERRUPTED = 130
_PROGRAM = "dcpctl"
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
    return "kubectl dcpd" if name.startswith("kubectl") else _PROGRAM


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Check, plan and render DCPDisaggDeployment objects without a cluster; follow and undo rollouts.",
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
    validate.add_argument("more", nargs="*", metavar="FILE", help="the same as -f FILE, as git hooks call it")
    validate.add_argument(
        "-o",
        "--output",
        choices=("text", "json", "sarif", "github"),
        default="text",
        help="text; json: one line per object; sarif: one SARIF 2.1.0 log; github: annotations of GitHub Actions",
    )
    validate.add_argument(
        "--suggest",
        action="store_true",
        help="print each object with the smallest change that makes it allowed; with -o json name the changes",
    )
    _add_catalogue(validate)
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

    crds = commands.add_parser("crds", help="print the CustomResourceDefinitions")
    crds.set_defaults(run=_crds)

    explain = commands.add_parser("explain", help="say what a rule asks for, why, and how to satisfy it")
    explain.add_argument("rule", nargs="?", metavar="RULE", help="a rule's id; without one, all rules are listed")
    explain.set_defaults(run=_explain)

    _add_plan(commands.add_parser("plan", help="list the sizes that suit a model and its GPUs, and print an object"))
    _add_kv_plan(commands.add_parser("kv-plan", help="say who sends which tokens to whom between two layouts, and how"))

    add_rollout(commands.add_parser("rollout", help="watch, list, undo, hold and let go changes of an object"))

    completion = commands.add_parser("completion", help="print a completion script for a shell")
    completion.add_argument("shell", choices=("bash", "fish", "zsh"), metavar="SHELL", help="bash, fish or zsh")
    completion.set_defaults(run=_completion)
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the legal (tensor, decodeContext) sizes of an engine within one node, with the KV cache that each holds "
        "by vLLM's own reckoning and the gain over decodeContext 1, and print an object with --choose."
    )
    parser.epilog = "exit codes: 0 a plan, 1 a chosen object that the rules refuse, 2 wrongly called or nothing fits"
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="a model of the catalogue, such as Qwen/Qwen3-32B"
    )
    parser.add_argument("--gpu-memory", required=True, metavar="SIZE", help="memory of one GPU, such as 80GiB")
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="GPUs of a node; 8 by default")
    parser.add_argument("--context", required=True, type=positive, metavar="N", help="longest sequence, in tokens")
    parser.add_argument(
        "--weights",
        required=True,
        metavar="SIZE",
        help="the model's weights as they lie in memory, such as the size of its safetensors files; spread over tensor",
    )
    parser.add_argument(
        "--reserve", default="4GiB", metavar="SIZE", help="of each GPU for activations and graphs; 4GiB by default"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        dest="utilization",
        type=_share,
        default=0.92,
        metavar="SHARE",
        help="share of a GPU's memory that vLLM uses; 0.92 by default, as vLLM has it",
    )
    parser.add_argument("--block-size", type=positive, default=64, metavar="N", help="tokens of a block; 64 by default")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        default="auto",
        help="type of the KV cache; auto is 2 bytes",
    )
    parser.add_argument("--role", choices=("prefill", "decode", "both"), default="both", help="whose choices to list")
    parser.add_argument(
        "--choose", metavar="N", help="print the object with decode's row N, or PREFILL,DECODE such as 1,2"
    )
    parser.add_argument(
        "--image", default="vllm/vllm-openai:v0.33.0", metavar="IMAGE", help="engine image of the object"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="text, or one JSON object")
    _add_catalogue(parser)
    parser.set_defaults(run=_plan)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, must be a number above 0 and up to 1")
    return share


def _add_kv_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say who sends which tokens to whom when a prompt's KV cache moves from prefill to decode, by which path, in "
        "fragments of what size, and which settings would be faster. Nothing is contacted."
    )
    parser.epilog = "exit codes: 0 a plan, 1 a side or pair that can't work, 2 wrongly called"
    sizes = (
        "sizes as tp=4,dcp=2,interleave=16,block=64; left out, tp and dcp are 1, block 64, interleave the block size"
    )
    parser.add_argument("--prefill", metavar="SIZES", required=True, help=f"prefill's {sizes}")
    parser.add_argument("--decode", metavar="SIZES", required=True, help="decode's sizes, in the same form")
    parser.add_argument("--kv-heads", metavar="N", required=True, help="KV heads of the model; 1 with MLA")
    parser.add_argument("--tokens", metavar="N", required=True, help="length of the prompt")
    parser.add_argument("--layers", metavar="N", default="1", help="layers of the model (default: 1, so per layer)")
    parser.add_argument("--head-size", metavar="N", help="head size (default: 128)")
    parser.add_argument(
        "--dtype", metavar="TYPE", help="type of the KV cache: bfloat16 (default), float16, float32, fp8"
    )
    parser.add_argument(
        "--entry-bytes",
        metavar="N",
        help="instead of head size and type: bytes of one token and head in a layer, key and value together; "
        "1152 with DeepSeek's MLA in bfloat16",
    )
    parser.add_argument("--transport", choices=("rdma", "tcp"), default="rdma", help="transport (default: rdma)")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="text, or one JSON object")
    parser.set_defaults(run=_kv_plan)


def _add_catalogue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--catalogue",
        metavar="FILE",
        help="models beside those of this release, as the chart's value catalogue has them",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--filename",
        dest="files",
        metavar="FILE",
        action="append",
        default=[],
        help="a file, a folder (its .yaml, .yml and .json files, subfolders included) or - for stdin; may be repeated",
    )


def _named(*files: Sequence[str]) -> list[str]:
    """Return all files that were named. Raises CliError if there are none."""
    named = [file for several in files for file in several]
    if not named:
        raise CliError("no file is named; use -f FILE, and -f - for stdin")
    return named


class _Version(argparse.Action):
    """Prints the version of the installed distribution; looking it up is left until it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from dcp_operator.cli.version import version

        print(f"{parser.prog} {version()}")
        parser.exit(EXIT_ALLOWED)


def _validate(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.models import read_catalogue
    from dcp_operator.cli.validate import validate

    models = read_catalogue(arguments.catalogue)
    return validate(
        _named(arguments.files, arguments.more), output=arguments.output, suggest=arguments.suggest, catalogue=models
    )


def _render(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.render import render_files

    return render_files(_named(arguments.files), operator_image=arguments.operator_image)


def _crds(_: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.crds import crd_yaml

    return Outcome(EXIT_ALLOWED, crd_yaml())


def _explain(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.explain import explain_rule

    return Outcome(EXIT_ALLOWED, explain_rule(arguments.rule) + "\n")


def _plan(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.models import read_catalogue
    from dcp_operator.cli.plan import Asked, plan

    words = {name: getattr(arguments, name) for name in Asked.__dataclass_fields__}
    return plan(Asked(**words), catalogue=read_catalogue(arguments.catalogue))


def _completion(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.completion import completion_script

    return Outcome(EXIT_ALLOWED, completion_script(arguments.shell, _parser(_PROGRAM)))


def _kv_plan(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.kv_plan import Asked, kv_plan

    words = {name: getattr(arguments, name) for name in Asked.__dataclass_fields__}
    return kv_plan(Asked(**words), output=arguments.output)
