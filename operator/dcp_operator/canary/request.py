"""What a check asks, and whom: from the spec and what is observed."""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.canary.schedule import Subject
from dcp_operator.connectors import API_PORT, PROFILES
from dcp_operator.observed import Body, Observed, entries, section
from dcp_operator.ports import api_port_of, engine_ports
from dcp_operator.settings import Role, resolve_role
from dcp_operator.workloads import is_ready, pods_of

#: Value of a check's `user`, and the beginning of its cache salt: how engines' logs and traces tell it from others.
MARK: Final = "dcpd-canary"
#: Tokens that a check generates; one is prefill's.
MAX_TOKENS: Final = 2
#: Ids of the prompt's tokens: every vocabulary has as many.
_FIRST_ID: Final = 10
_NUM_IDS: Final = 80
#: Room that a prompt leaves within the longest context.
_SPARE: Final = MAX_TOKENS + 2


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that a check watches. `failures_url` is where decode's connector tells what failed."""

    pod: str
    role: Role
    metrics_url: str
    failures_url: str | None


@dataclass(frozen=True, slots=True)
class Request:
    """One check."""

    subject: Subject
    router_url: str
    model: str
    num_tokens: int
    engines: tuple[Engine, ...]


def subject_of(observed: Observed, spec: Spec | None) -> Subject | None:
    """Return what a check would speak about now, None while none can be made or is wanted.

    Ready is read from the stored status: what users see is what is checked.
    """
    if spec is None or not spec.transfer_check.enabled or not PROFILES[spec.kv_connector.type].bundled:
        return None
    if spec.router.replicas == 0:
        return None
    ready = stored_condition(observed, "Ready")
    revision: str | None = observed.status.get("currentRevision")
    if ready.get("status") != "True" or ready.get("observedGeneration") != observed.generation or not revision:
        return None
    if not _addresses(observed, names.ROUTER, revision):
        return None
    engines = [_start_of(pod) for role in Role for pod in _ready(observed, role, revision)]
    both = all(_addresses(observed, role, revision) for role in Role)
    return Subject(revision, _digest(engines)) if both else None


def stored_condition(observed: Observed, kind: str) -> Body:
    """Return a condition of the stored status, empty where it has none of the kind."""
    none: Body = {}
    return next((each for each in entries(observed.status, "conditions") if each.get("type") == kind), none)


def request_of(observed: Observed, spec: Spec, subject: Subject) -> Request | None:
    """Return the check of a subject, None where what it needs is gone."""
    routers = _addresses(observed, names.ROUTER, subject.revision)
    engines: list[Engine] = []
    for role in Role:
        workload = observed.workload(role, subject.revision)
        api = (api_port_of(workload.body) if workload is not None else None) or API_PORT
        # On the host's network the block of a revision's ports begins with that of HTTP.
        side = engine_ports(spec, role, api).side if role is Role.DECODE else None
        for pod, address in _addresses(observed, role, subject.revision):
            failures = _url(address, side, "/v1/failures") if side is not None else None
            engines.append(Engine(pod, role, _url(address, api, "/metrics"), failures))
    if not routers or {engine.role for engine in engines} != set(Role):
        return None
    return Request(
        subject=subject,
        router_url=_url(routers[0][1], names.PORT_ROUTER, ""),
        model=spec.model.served_name or observed.key.name,
        num_tokens=num_tokens(spec),
        engines=tuple(engines),
    )


def num_tokens(spec: Spec) -> int:
    """Return the length of a check's prompt: beyond one block of every rank on both sides, within the context.

    A decode engine's block table counts in B * W tokens, so B * W + 1 tokens put some on each of its W ranks.
    """
    settings = [resolve_role(spec, role) for role in Role]
    wanted = 1 + max(each.block_size * each.decode_context for each in settings)
    longest = [each.max_model_len for each in settings if each.max_model_len is not None]
    return max(2, min([wanted, *(length - _SPARE for length in longest)]))


def completion_body(request: Request, nonce: str) -> dict[str, Any]:
    """Return the body of the check's completion.

    The prompt is given as token ids, so its length is known without a tokenizer. The salt keeps it out of every prefix
    cache, and what it leaves there from every other prompt.
    """
    stream = hashlib.shake_256(nonce.encode()).digest(request.num_tokens)
    return {
        "model": request.model,
        "prompt": [_FIRST_ID + byte % _NUM_IDS for byte in stream],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": False,
        "user": MARK,
        "cache_salt": f"{MARK}-{nonce}",
    }


def _ready(observed: Observed, component: str, revision: str) -> list[Body]:
    return [pod for pod in pods_of(observed, component, revision) if is_ready(pod)]


def _addresses(observed: Observed, component: str, revision: str) -> list[tuple[str, str]]:
    """Return (name, address) of a component's ready pods."""
    ready = _ready(observed, component, revision)
    found = ((pod["metadata"]["name"], section(pod, "status").get("podIP")) for pod in ready)
    return [(name, address) for name, address in found if address]


def _start_of(pod: Body) -> str:
    """Return what tells one start of an engine from every other."""
    main = [each for each in entries(pod, "status", "containerStatuses") if each.get("name") == names.CONTAINER_MAIN]
    return f"{pod['metadata']['uid']}/{main[0].get('restartCount', 0) if main else 0}"


def _digest(engines: list[str]) -> str:
    return names.digest({"engines": sorted(engines)})


def _url(address: str, port: int, path: str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}{path}"
