"""`python -m devcluster.engine`: the engine environment and single engines, for developers."""

import argparse
import os
import sys
from pathlib import Path

from devcluster.engine import profile
from devcluster.engine.environment import (
    engine_environment_path,
    ensure_engine_environment,
    ensure_models,
    prune,
)
from devcluster.engine.recipe import MODELS
from devcluster.errors import DevClusterError
from devcluster.paths import this_cache
from devcluster.progress import Progress


def main(argv: list[str]) -> int:
    """Run one command; 0 on success, 2 when something is missing."""
    parser = argparse.ArgumentParser(prog="python -m devcluster.engine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="make the environment if need be and print its path")
    commands.add_parser("models", help="make the tiny models if need be and print their folder")
    commands.add_parser("prune", help="delete the environments of other contents")
    start = commands.add_parser("start", help="start one engine in the foreground; more arguments go to vLLM")
    start.add_argument("--model", choices=sorted(MODELS), default="tiny-mqa")
    start.add_argument("--port", type=int, default=8000)
    start.add_argument("--tensor", type=int, default=1, metavar="T", help="tensor-parallel size")
    start.add_argument("--dcp", type=int, default=1, metavar="W", help="decode-context-parallel size")
    start.add_argument("--interleave", type=int, default=1, metavar="I", help="interleave in tokens, with --dcp")
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "start":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        return _run(arguments, rest)
    except DevClusterError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    cache, log = this_cache().root, Progress()
    match arguments.command:
        case "env":
            print(ensure_engine_environment(cache, log))
        case "models":
            print(ensure_models(cache, log))
        case "prune":
            for path in prune(cache, keep=engine_environment_path(cache)):
                log(f"deleted {path}")
        case _:
            _start(arguments, rest, ensure_engine_environment(cache, log), ensure_models(cache, log))
    return 0


def _start(arguments: argparse.Namespace, rest: list[str], environment: Path, models: Path) -> None:
    command = profile.arguments(
        models / arguments.model,
        served_model_name=arguments.model,
        host="127.0.0.1",
        port=arguments.port,
        tensor=arguments.tensor,
        dcp=arguments.dcp,
        interleave=arguments.interleave,
    )
    python = str(environment / "bin" / "python3")
    # Replaces this process, so that Ctrl-C and signals reach the engine itself.
    os.execve(  # noqa: S606 - the interpreter that was made above
        python,
        [python, "-m", profile.API_SERVER, *command, *rest],
        {**os.environ, **profile.environment(environment)},
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
