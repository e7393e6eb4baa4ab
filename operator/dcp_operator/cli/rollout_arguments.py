"""The arguments of `dcpctl rollout`."""

import argparse

from dcp_operator.cli.numbers import duration_s, positive
from dcp_operator.cli.problems import CliError, Outcome


def add_rollout(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dcpctl rollout` to its parser."""
    parser.description = (
        "status waits until a change is rolled out; history lists the states that are kept, with what changed by role; "
        "undo goes back to one and keeps replicas, scaling, strategy and pause; pause and resume hold rollouts and let "
        "them go. Talks to the cluster of the kubeconfig."
    )
    parser.epilog = "exit codes: 0 done, 1 not rolled out, refused or nothing to undo, 2 wrongly called or not found"
    parser.add_argument(
        "action",
        choices=("status", "history", "undo", "pause", "resume"),
        metavar="ACTION",
        help="status, history, undo, pause or resume",
    )
    parser.add_argument("name", metavar="NAME", help="the DCPDisaggDeployment")
    parser.add_argument(
        "-n", "--namespace", default="", metavar="NS", help="its namespace; by default that of the kubeconfig's context"
    )
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig; the current one by default")
    parser.add_argument(
        "--to-revision", type=positive, metavar="N", help="with undo: the number to go back to; the one before if none"
    )
    parser.add_argument(
        "--revision", type=positive, metavar="N", help="with history: print the stored spec of one number"
    )
    parser.add_argument(
        "--timeout",
        type=duration_s,
        metavar="TIME",
        help="with status: longest wait, such as 90s or 5m; no end if none",
    )
    parser.add_argument(
        "-w", "--watch", choices=("true", "false"), default="true", help="with status: whether to wait; true by default"
    )
    parser.add_argument(
        "--dry-run",
        choices=("none", "client"),
        default="none",
        help="with undo, pause and resume: client prints the patch and changes nothing",
    )
    parser.set_defaults(run=_rollout)


def _rollout(arguments: argparse.Namespace) -> Outcome:
    from dcp_operator.cli.cluster import run_rollout
    from dcp_operator.cli.rollout import Asked

    action = arguments.action
    for option, value, belongs in (
        ("--to-revision", arguments.to_revision, "undo"),
        ("--revision", arguments.revision, "history"),
        ("--timeout", arguments.timeout, "status"),
    ):
        if value is not None and action != belongs:
            raise CliError(f"{option} goes with rollout {belongs}, not with rollout {action}")
    asked = Asked(
        action,
        arguments.name,
        arguments.namespace,
        number=arguments.to_revision or arguments.revision,
        timeout_s=arguments.timeout or None,
        watch=arguments.watch == "true",
        dry_run=arguments.dry_run == "client",
    )
    return run_rollout(asked, arguments.context)
