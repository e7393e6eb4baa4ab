"""Rules on rollouts, drains and checks: settings that can't do what they say, and settings that do nothing."""

from collections.abc import Iterator

from dcp_operator.api import sentences
from dcp_operator.api.findings import Severity, show
from dcp_operator.rules.context import Context, Problem, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.pod_template import as_map


def max_skew_positive(context: Context) -> Iterator[Problem]:
    """maxSkew lets the new revision have at least one engine more than its other role pairs with.

    A rollout begins with an engine that has no partner yet. With 0% it could never begin.

    Set 1 or more, or leave it out for as many as maxSurge allows.
    """
    if context.spec.rollout_strategy.max_skew == "0%":
        path = "spec.rolloutStrategy.maxSkew"
        yield Problem(path, sentences.MAX_SKEW_POSITIVE.say(), fixes=(Fix(path, 1), Fix(path, REMOVED)))


def budget_blocks_drains(context: Context) -> Iterator[Problem]:
    """A disruption budget lets at least one engine be evicted (a warning).

    With maxUnavailable 0 no engine may ever be evicted, so a node that runs one can't be drained, and upgrades of the
    cluster wait for somebody to delete the pod.

    Set maxUnavailable to 1 or more; engines drain before they go in any case.
    """
    for role in context.roles:
        budget = role.stated.disruption_budget
        if budget.enabled and budget.max_unavailable in (0, "0%"):
            yield Problem(
                f"{role.path}.disruptionBudget.maxUnavailable",
                f"{show(budget.max_unavailable)} lets no engine be evicted, so nodes that run one can't be drained; "
                "set 1 or more",
                Severity.WARNING,
            )


def drain_waits(context: Context) -> Iterator[Problem]:
    """An engine that goes can wait for its requests and for KV that it holds (a warning).

    The operator gives the engine's container a preStop hook that waits for both, from the engine's own metrics. A hook
    of the template takes its place, and without metrics it knows nothing and always waits for as long as it may.

    Leave the hook out, or have it end with python3 -m dcp_connector.drain; leave --disable-log-stats out.
    """
    if not context.profile.bundled:
        return
    for role in context.roles:
        main = role.template.main
        if as_map(main.content.get("lifecycle")).get("preStop"):
            yield Problem(
                f"{main.path}.lifecycle.preStop",
                "takes the place of the hook that waits until decode has fetched the KV that the engine holds; leave "
                "it out unless it does that too",
                Severity.WARNING,
            )
        silent = role.arguments.last("--disable-log-stats")
        if silent is not None:
            yield Problem(
                role.argument_path(silent.index),
                "--disable-log-stats hides what the engine runs and holds, so its pod takes the whole of "
                "spec.drainTimeoutSeconds and the transfer lease to go; leave it out",
                Severity.WARNING,
            )


def without_effect(context: Context) -> Iterator[Problem]:
    """Nothing is stated that another setting switches off (a warning).

    Who reads the object takes what it states for what is done.

    Remove the setting, or switch on what it belongs to.
    """
    policy, check = context.spec.network_policy, context.spec.transfer_check
    if not policy.enabled and policy.allowed_namespaces is not None:
        yield Problem(
            "spec.networkPolicy.allowedNamespaces",
            f"{show(policy.allowed_namespaces)} does nothing while spec.networkPolicy.enabled is false",
            Severity.WARNING,
        )
    if not check.enabled and check.interval_seconds is not None:
        yield Problem(
            "spec.transferCheck.intervalSeconds",
            f"{check.interval_seconds} does nothing while spec.transferCheck.enabled is false",
            Severity.WARNING,
        )


RULES = (
    Rule("max-skew-positive", max_skew_positive, sources=("rbg #307",)),
    Rule("budget-blocks-drains", budget_blocks_drains),
    Rule("drain-waits", drain_waits, sources=("dynamo #7319",)),
    Rule("without-effect", without_effect),
)
