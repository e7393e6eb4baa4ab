"""The command line. Exit codes: 0 done, 1 `status` found something not running, 2 a step can't go on."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from devcluster import buildah, clients, images, preflight, startup, status, teardown
from devcluster.commands import guarded
from devcluster.components import NAMES
from devcluster.errors import DevClusterError
from devcluster.files import locked
from devcluster.owner import Verdict
from devcluster.paths import Cache, this_cache
from devcluster.progress import Log, Progress
from devcluster.shell import child_environment
from devcluster.traces import clear_noted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="devcluster", description="A real single-node Kubernetes on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start the cluster, or repair it; does nothing when all is well")
    up.add_argument("--with-engine", action="store_true", help="also make the CPU engines' environment and tiny models")
    down = commands.add_parser("down", help="stop the cluster and remove everything outside of the cache")
    down.add_argument("--force", action="store_true", help="even when another checkout started it")
    commands.add_parser("status", help="say what runs; exit code 1 when something does not")
    commands.add_parser("env", help='print lines for eval "$(...)": KUBECONFIG, and PATH with kubectl and helm')
    load = commands.add_parser("load-image", help="import an image archive into the cluster")
    load.add_argument("archive", type=Path, help="an OCI or Docker image archive")
    build = commands.add_parser("build-image", help="build a Dockerfile with buildah and import the image")
    build.add_argument("dockerfile", type=Path)
    build.add_argument("context", type=Path)
    build.add_argument("tag", help="as in local.dev/operator:0.1.0")
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    logs = commands.add_parser("logs", help="print the end of a component's log")
    logs.add_argument("component", choices=NAMES)
    logs.add_argument("--lines", type=int, default=100, metavar="N", help="how many lines from the end (default 100)")
    kubectl = commands.add_parser("kubectl", help="run kubectl on the cluster", add_help=False)
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _require_running(cache: Cache) -> None:
    preflight.check_machine(cache)
    if startup.refuse_foreign(cache) is not Verdict.OURS:
        raise DevClusterError("no local cluster runs on this machine; `python -m devcluster up` starts one")


def _engine_finder(cache: Cache, log: Log, make: bool) -> Callable[[], Path | None]:
    def find() -> Path | None:
        # Imported here: the other commands need nothing of it.
        from devcluster.engine import environment

        if not make:
            return environment.engine_environment_path(cache.root)
        folder = environment.ensure_engine_environment(cache.root, log)
        environment.ensure_models(cache.root, log)
        return folder

    return find


def _up(cache: Cache, log: Log, arguments: argparse.Namespace) -> int:
    preflight.check_machine(cache)
    with locked(cache.locks / "cluster.lock", log, "the local cluster"):
        startup.up(cache, log, _engine_finder(cache, log, arguments.with_engine))
    return 0


def _down(cache: Cache, log: Log, arguments: argparse.Namespace) -> int:
    preflight.check_machine(cache)
    with locked(cache.locks / "cluster.lock", log, "the local cluster"):
        if not arguments.force:
            startup.refuse_foreign(cache)
        teardown.remove_cluster(cache.cluster, log)
    with locked(cache.locks / "buildah.lock", log, "an image build"):
        clear_noted(cache.traces_of_builds)
    return 0


def _status(cache: Cache, _log: Log, _arguments: argparse.Namespace) -> int:
    preflight.check_machine(cache)
    decided, owner = startup.verdict(cache.cluster)
    paths = cache.cluster
    running = decided in (Verdict.OURS, Verdict.FOREIGN)
    states = status.component_states(paths)
    node = status.node_state(paths) if running else "no cluster"
    print(status.describe(paths, decided, owner, states, node), end="")
    return 0 if running and not node and all(state.alive for state in states) else 1


def _env(cache: Cache, _log: Log, _arguments: argparse.Namespace) -> int:
    _require_running(cache)
    for name, value in clients.client_environment(cache).items():
        print(f"export {name}='{value}'")
    print(f'export PATH="{clients.clients_folder(cache)}:$PATH"')
    return 0


def _load_image(cache: Cache, log: Log, arguments: argparse.Namespace) -> int:
    _require_running(cache)
    images.import_archive(cache.cluster, arguments.archive.resolve(), log)
    return 0


def _build_image(cache: Cache, log: Log, arguments: argparse.Namespace) -> int:
    _require_running(cache)
    buildah.build_image(
        cache, arguments.dockerfile.resolve(), arguments.context.resolve(), arguments.tag, arguments.build_arg, log
    )
    return 0


def _logs(cache: Cache, _log: Log, arguments: argparse.Namespace) -> int:
    path = cache.cluster.logs / f"{arguments.component}.log"
    if not path.exists():
        raise DevClusterError(f"{arguments.component} has no log: no local cluster runs on this machine")
    print(f"# {path}")
    for line in path.read_text(errors="replace").splitlines()[-max(arguments.lines, 0) :]:
        print(line)
    return 0


def _kubectl(cache: Cache, _log: Log, arguments: argparse.Namespace) -> int:
    _require_running(cache)
    program = clients.clients_folder(cache) / "kubectl"
    environment = child_environment(clients.client_environment(cache), proxies=False)
    os.execve(program, [str(program), *arguments.arguments], environment)  # noqa: S606 - no shell is wanted


_COMMANDS: dict[str, Callable[[Cache, Log, argparse.Namespace], int]] = {
    "up": _up,
    "down": _down,
    "status": _status,
    "env": _env,
    "load-image": _load_image,
    "build-image": _build_image,
    "logs": _logs,
    "kubectl": _kubectl,
}


def main(argv: Sequence[str]) -> int:
    """Run one command."""
    arguments = _parser().parse_args(argv)
    log, cache = Progress(), this_cache()
    command = _COMMANDS[arguments.command]
    return guarded(f"devcluster {arguments.command}", cache, lambda: command(cache, log, arguments))
