"""Rules on rollouts, budgets and checks, and on a model's cache: complete messages."""

import pytest

from tests.support.specimens import main_container, report, role, violations, warnings


def top(**fields) -> dict:
    return {"spec": fields}


def cache(uri: str = "hf://example/model", **fields) -> dict:
    return top(model={"uri": uri, "cache": {"claimName": "models", **fields}})


REFUSED = {
    "a skew of nothing": (
        [top(rolloutStrategy={"maxSkew": "0%"})],
        (
            "spec.rolloutStrategy.maxSkew: 0% lets no rollout begin, because the first engine of a new revision has no "
            "partner yet; nearest that works: 1 [max-skew-positive]"
        ),
    ),
    "a cache for a volume": (
        [cache("pvc://models/x")],
        (
            "spec.model.cache: is stated, but spec.model.uri is no hf:// URI, and only a model of a hub is pulled "
            "into a "
            "claim [model-cache]"
        ),
    ),
    "a cache outside its claim": (
        [cache(path="a/../b")],
        'spec.model.cache.path: "a/../b" has a dot for a folder; write the path without it [model-cache]',
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(changes, message):
    assert violations(*changes) == [message]


WARNED = {
    "a budget that lets nobody go": (
        [role("decode", disruptionBudget={"maxUnavailable": "0%"})],
        (
            'spec.decode.disruptionBudget.maxUnavailable: "0%" lets no engine be evicted, so nodes that run one '
            "can't be "
            "drained; set 1 or more [budget-blocks-drains]"
        ),
    ),
    "a hook in place of the one that waits": (
        [main_container("prefill", lifecycle={"preStop": {"exec": {"command": ["/stop.sh"]}}})],
        (
            "spec.prefill.template.spec.containers[0].lifecycle.preStop: takes the place of the hook that waits until "
            "decode has fetched the KV that the engine holds; leave it out unless it does that too [drain-waits]"
        ),
    ),
    "an engine that hides its load": (
        [role("decode", extraArgs=["--enforce-eager", "--disable-log-stats"])],
        (
            "spec.decode.extraArgs[1]: --disable-log-stats hides what the engine runs and holds, so its pod takes the "
            "whole of spec.drainTimeoutSeconds and the transfer lease to go; leave it out [drain-waits]"
        ),
    ),
    "namespaces of a policy that isn't": (
        [top(networkPolicy={"enabled": False, "allowedNamespaces": ["monitoring"]})],
        (
            'spec.networkPolicy.allowedNamespaces: ["monitoring"] does nothing while spec.networkPolicy.enabled is '
            "false "
            "[without-effect]"
        ),
    ),
    "times of a check that isn't made": (
        [top(transferCheck={"enabled": False, "intervalSeconds": 600})],
        (
            "spec.transferCheck.intervalSeconds: 600 does nothing while spec.transferCheck.enabled is false "
            "[without-effect]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), WARNED.values(), ids=WARNED.keys())
def test_warns(changes, message):
    assert violations(*changes) == []
    assert warnings(*changes) == [message]


ALLOWED = {
    "a skew": [top(rolloutStrategy={"maxSkew": "10%"})],
    "a budget": [role("decode", disruptionBudget={"maxUnavailable": "50%"})],
    "no budget at all": [role("decode", disruptionBudget={"enabled": False, "maxUnavailable": 0})],
    "a policy with namespaces": [top(networkPolicy={"allowedNamespaces": ["monitoring"]})],
    "no check": [top(transferCheck={"enabled": False})],
    "a cache": [cache()],
    "a cache in a folder": [cache(path="llms/tiny.v1")],
    "a hold": [top(paused=True, revisionHistoryLimit=0, drainTimeoutSeconds=0)],
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_allows_without_a_word(changes):
    verdict = report(*changes)
    assert (verdict.violations, verdict.warnings) == ((), ())
