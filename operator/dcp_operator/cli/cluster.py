"""The cluster that a command talks to: that of the kubeconfig, as with kubectl."""

import sys
from typing import TYPE_CHECKING

from dcp_operator.cli.problems import EXIT_REFUSED, CliError, Outcome
from dcp_operator.cli.rollout import Asked, rollout

if TYPE_CHECKING:
    from dcp_operator.client import Api

#: Answers that say no to what was asked, rather than that nothing can be asked: forbidden, conflict, invalid.
_REFUSALS = (400, 403, 409, 422)


def run_rollout(asked: Asked, context: str | None) -> Outcome:
    """Carry out `dcpctl rollout` on the cluster of a kubeconfig context; None for the current one. Raises CliError."""
    api, namespace = _connect(context)
    from dcp_operator.client import ApiError

    try:
        return rollout(asked.within(namespace), api, _say)
    except ApiError as error:
        if error.status in _REFUSALS:
            return Outcome(EXIT_REFUSED, "", (f"the API server refuses it: {error.message}",))
        raise CliError(error.message) from None
    finally:
        api.close()


def _connect(context: str | None) -> "tuple[Api, str]":
    """Return access to the cluster, and the namespace that the context names."""
    try:
        from dcp_operator.client import Api, ApiError, context_namespace
    except ImportError as error:
        raise CliError(
            f"rollout talks to the cluster and needs the operator's packages ({error.name} is missing); install them "
            "with: pip install 'dcp-disagg[operator]'"
        ) from None
    try:
        return Api(connections=1, context=context), context_namespace(context)
    except ApiError as error:
        raise CliError(error.message) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
