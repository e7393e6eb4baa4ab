"""The metrics of controller and webhook: every one is declared here, and the reference page is made from this list.

Counts are kept where things happen. What objects say is put together when somebody asks, from the facts that the last
pass over each object left here.
"""

import contextlib
import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from dcp_operator.reasons import Reason
from dcp_operator.rules import rule_ids

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
CONTROLLER: Final = CollectorRegistry(auto_describe=False)
WEBHOOK: Final = CollectorRegistry(auto_describe=False)

#: The reason of a pass that ended with an exception: a bug in the operator, whose traceback is in the log.
DEFECT: Final = "Defect"
_PASS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REVIEW_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_CANARY_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

#: The rule that a line of a refusal names at its end.
_RULE: Final = re.compile(r" \[([a-z][a-z0-9-]*)\]$", re.MULTILINE)
_RULES: Final = frozenset(rule_ids())

Process = Literal["controller", "webhook"]


@dataclass(frozen=True, slots=True)
class Described:
    """One metric, as the reference lists it. A counter's name ends in _total, a histogram shows as three names."""

    process: Process
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


#: All metrics, in the order of the reference.
DESCRIBED: Final[list[Described]] = []


def _counter(process: Process, name: str, words: str, *labels: str) -> Counter:
    DESCRIBED.append(Described(process, name, "counter", labels, words))
    return Counter(name, words, labels, registry=_registry(process))


def _gauge(process: Process, name: str, words: str, *labels: str) -> Gauge:
    DESCRIBED.append(Described(process, name, "gauge", labels, words))
    return Gauge(name, words, labels, registry=_registry(process))


def _histogram(process: Process, name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    DESCRIBED.append(Described(process, name, "histogram", labels, words))
    return Histogram(name, words, labels, buckets=buckets, registry=_registry(process))


def _family(name: str, words: str, *labels: str) -> Callable[[], GaugeMetricFamily]:
    DESCRIBED.append(Described("controller", name, "gauge", labels, words))
    return lambda: GaugeMetricFamily(name, words, labels=labels)


def _registry(process: Process) -> CollectorRegistry:
    return CONTROLLER if process == "controller" else WEBHOOK


RECONCILE_SECONDS: Final = _histogram(
    "controller", "dcp_operator_reconcile_seconds", "Time of a pass over one object, its writes included.", _PASS_S
)
RECONCILE_ERRORS: Final = _counter(
    "controller",
    "dcp_operator_reconcile_errors_total",
    "Passes that could not do all that they wanted, by reason; Defect is a bug in the operator.",
    "reason",
)
WRITES: Final = _counter(
    "controller",
    "dcp_operator_writes_total",
    "Writes that the API server was asked for, by resource (with its subresource) and verb.",
    "resource",
    "verb",
)
API_ERRORS: Final = _counter(
    "controller",
    "dcp_operator_api_errors_total",
    "Requests that the API server refused or did not answer (code 0), by verb and HTTP status.",
    "verb",
    "code",
)
WATCH_EVENTS: Final = _counter(
    "controller", "dcp_operator_watch_events_total", "Events that watches brought, by resource.", "resource"
)
WATCH_RESTARTS: Final = _counter(
    "controller",
    "dcp_operator_watch_restarts_total",
    "Watches that began anew with a list, by resource; what happened in between is compared with a list.",
    "resource",
)
LOOP_LAG_SECONDS: Final = _gauge(
    "controller", "dcp_operator_loop_lag_seconds", "For how long the event loop has been busy with one thing."
)
CANARIES: Final = _counter(
    "controller",
    "dcp_operator_transfer_checks_total",
    "Checks of the KV transfer that ended, by the reason that KVTransferVerified got.",
    "reason",
)
CANARY_PROMPTS: Final = _counter(
    "controller",
    "dcp_operator_transfer_check_prompts_total",
    "Prompts that checks of the KV transfer sent, by object: subtract them from the engines' requests to have users' "
    "alone.",
    "namespace",
    "name",
)
CANARY_TOKENS: Final = _counter(
    "controller",
    "dcp_operator_transfer_check_tokens_total",
    "Prompt tokens that checks of the KV transfer sent, by object: subtract them from the engines' prompt tokens.",
    "namespace",
    "name",
)
ENGINE_RESTARTS: Final = _counter(
    "controller",
    "dcp_operator_engine_restarts_total",
    "Engines that started anew in the same pod, by role; the event EngineRestarted says which and why.",
    "role",
)
CANARY_SECONDS: Final = _histogram(
    "controller", "dcp_operator_transfer_check_seconds", "Time of one check of the KV transfer.", _CANARY_S
)
_objects = _family(
    "dcp_operator_objects",
    "Objects, by condition, its status and its reason.",
    "condition",
    "status",
    "reason",
)
_engines = _family(
    "dcp_operator_role_replicas",
    "Pods of a role (prefill, decode, router) of an object: wanted, existing, scheduled, ready, updated.",
    "namespace",
    "name",
    "role",
    "count",
)
_rollouts = _family(
    "dcp_operator_rollout_share",
    "Part of the wanted capacity that a revision gives, from 0 to 1, while a rollout is under way.",
    "namespace",
    "name",
    "revision",
)
_scalers = _family(
    "dcp_operator_scaler_replicas",
    "Engines of a role that is left to an autoscaler: asked for, wanted (within the bounds and the ratio), min, max.",
    "namespace",
    "name",
    "role",
    "count",
)
REVIEWS: Final = _counter(
    "webhook", "dcp_webhook_reviews_total", "Admission reviews answered: allowed, refused, failed.", "outcome"
)
DENIALS: Final = _counter(
    "webhook",
    "dcp_webhook_denials_total",
    "Reviews that a rule refused; a review that several rules refuse counts for each.",
    "rule",
)
REVIEW_SECONDS: Final = _histogram("webhook", "dcp_webhook_review_seconds", "Time of judging one review.", _REVIEW_S)


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What the last pass over an object left for the metrics."""

    status: Mapping[str, Any]
    #: Engines wanted, by role.
    wanted: Mapping[str, int] = field(default_factory=dict[str, int])
    #: Of roles that are left to an autoscaler: asked, wanted, min, max.
    scalers: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])


class _Objects(Collector):
    """Metrics of the objects as they are."""

    def __init__(self) -> None:
        self.facts: dict[tuple[str, str], ObjectFacts] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        objects, engines, rollouts, scalers = _objects(), _engines(), _rollouts(), _scalers()
        conditions: Tally[tuple[str, str, str]] = Tally()
        # Scrapes come from another thread than the passes: a copy is made at one stroke.
        for (namespace, name), facts in list(self.facts.items()):
            for entry in facts.status.get("conditions", []):
                conditions[entry["type"], entry["status"], entry["reason"]] += 1
            for role, counts in _roles(facts):
                for what, value in counts.items():
                    engines.add_metric([namespace, name, role, what], value)
            for revision in facts.status.get("rollout", {}).get("revisions", []):
                share = int(revision["share"].removesuffix("%")) / 100
                rollouts.add_metric([namespace, name, revision["revision"]], share)
            for role, counts in facts.scalers.items():
                for what, value in counts.items():
                    scalers.add_metric([namespace, name, role, what], value)
        for labels, count in sorted(conditions.items()):
            objects.add_metric(list(labels), count)
        yield from (objects, engines, rollouts, scalers)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return (_objects(), _engines(), _rollouts(), _scalers())


def _roles(facts: ObjectFacts) -> Iterator[tuple[str, dict[str, int]]]:
    names = {"replicas": "existing", "readyReplicas": "ready", "updatedReplicas": "updated"}
    names["scheduledReplicas"] = "scheduled"
    for role in ("prefill", "decode", "router"):
        counts = {names[key]: value for key, value in facts.status.get(role, {}).items() if key in names}
        if role in facts.wanted:
            counts["wanted"] = facts.wanted[role]
        yield role, counts


OBJECTS: Final = _Objects()
CONTROLLER.register(OBJECTS)
for _each in (CONTROLLER, WEBHOOK):
    ProcessCollector(registry=_each)
for _reason in (Reason.PERMISSION_DENIED, Reason.NAME_TAKEN, Reason.APPLY_REJECTED, Reason.API_UNAVAILABLE, DEFECT):
    RECONCILE_ERRORS.labels(str(_reason))
for _rule in sorted(_RULES):
    DENIALS.labels(_rule)
for _outcome in ("allowed", "refused", "failed"):
    REVIEWS.labels(_outcome)


def request_made(method: str, path: str, status: int) -> None:
    """Count one request to the API server; `status` is 0 where it did not answer."""
    if not 200 <= status < 300 and not (method == "GET" and status == 404):
        API_ERRORS.labels(method, str(status)).inc()
    if method != "GET":
        WRITES.labels(resource_in(path), method).inc()


def resource_in(path: str) -> str:
    """Return the resource that a path of the API names, such as deployments or deployments/scale."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return "/".join([*parts[:1], *parts[2:3]])


def review_answered(is_allowed: bool, code: int | None, message: str) -> None:
    """Count one answered review; the lines of a refusal end with the ids of their rules."""
    outcome = "allowed" if is_allowed else "refused" if code == 422 else "failed"
    REVIEWS.labels(outcome).inc()
    if outcome == "refused":
        # A line can hold what a user wrote: only rules that exist become labels.
        for rule in _RULES.intersection(_RULE.findall(message)):
            DENIALS.labels(rule).inc()


def canary_ended(reason: Reason, seconds: float) -> None:
    """Count one check of the KV transfer: the reason that the condition got, and its time."""
    CANARIES.labels(str(reason)).inc()
    CANARY_SECONDS.observe(seconds)


def canary_sent(namespace: str, name: str, prompts: int, tokens_each: int) -> None:
    """Count the prompts that one check of an object sent."""
    CANARY_PROMPTS.labels(namespace, name).inc(prompts)
    CANARY_TOKENS.labels(namespace, name).inc(prompts * tokens_each)


def canary_forgotten(namespace: str, name: str) -> None:
    """Take in that an object is gone: its counts are no longer shown."""
    for counter in (CANARY_PROMPTS, CANARY_TOKENS):
        with contextlib.suppress(KeyError):
            counter.remove(namespace, name)


def page(registry: CollectorRegistry) -> bytes:
    """Return the metrics as Prometheus reads them."""
    return generate_latest(registry)
