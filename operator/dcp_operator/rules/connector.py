"""Rules on the KV connector: its options, what it can transfer, and what it needs."""

import difflib
from collections.abc import Iterator

from pydantic import ValidationError

from dcp_connector.config import ConnectorConfig
from dcp_operator.api.findings import Severity, show
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.pod_template import as_list, as_map

_PATH = "spec.kvConnector.extraConfig"

#: Options that the operator sets: where they are stated instead, or why they are fixed.
_OPERATOR_SETS = {
    "mooncake_protocol": "state spec.kvConnector.protocol instead",
    "bootstrap_port": "the probes and the Services rely on its value; remove it",
    "api_port": "the probes and the router rely on its value; remove it",
}
#: Comparing texts takes time with the product of their lengths; nothing longer resembles an option.
_LONGEST_NAME = 40
#: Words in the names of resources that give a pod RDMA devices.
_RDMA_WORDS = ("rdma", "hca", "roce", "infiniband", "efa", "ib")


def connector_takes_pair(context: Context) -> Iterator[Problem]:
    """The bundled connector can transfer between these two engines.

    It takes every pair of tensor, decodeContext, interleave and block sizes that the engines themselves accept. It does
    not yet transfer with prefill context, data or pipeline parallelism, and refuses at start-up.

    Set prefillContext, data and pipeline to 1. Use more replicas instead of data parallelism.
    """
    for role in context.roles:
        sizes = role.settings
        for field, value in (
            ("prefillContext", sizes.prefill_context),
            ("data", sizes.data),
            ("pipeline", sizes.pipeline),
        ):
            if value > 1:
                yield Problem(
                    f"{role.path}.parallelism.{field}",
                    f"{value} is not yet supported by the bundled connector; nearest that works: 1",
                )


def connector_config(context: Context) -> Iterator[Problem]:
    """extraConfig holds options that the connector has, with values that it takes.

    The connector refuses to start with any other, so that a typing error doesn't go unnoticed. What the operator sets
    itself (transport, ports) is stated elsewhere.

    Correct the option that the message names.
    """
    stated = context.spec.kv_connector.extra_config
    known = [name for name in ConnectorConfig.model_fields if name not in _OPERATOR_SETS]
    ours: dict[str, object] = {}
    for name, value in stated.items():
        if name in _OPERATOR_SETS:
            yield Problem(f"{_PATH}.{name}", f"{show(value)} is set by the operator; {_OPERATOR_SETS[name]}")
        elif name not in known:
            near = difflib.get_close_matches(name[:_LONGEST_NAME], known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"its options are {', '.join(known)}"
            yield Problem(f"{_PATH}.{name}", f"is no option of the bundled connector; {hint}")
        else:
            ours[name] = value
    try:
        ConnectorConfig.model_validate(ours)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0]) if detail["loc"] else ""
            # pydantic's sentences read on from "the input": Input should be greater than 0.
            wanted = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
            yield Problem(f"{_PATH}.{name}", f"found {show(detail['input'])}, which {wanted}")


def rdma_resources(context: Context) -> Iterator[Problem]:
    """With protocol rdma the engines' containers ask for an RDMA device (a warning).

    A pod sees no RDMA device unless its container requests one from a device plugin, claims one, or is privileged; the
    transfer engine then ends at start-up. How the resource is called depends on the cluster.

    Put the resource into the limits of the container main, or set protocol tcp.
    """
    if context.spec.kv_connector.protocol != "rdma":
        return
    for role in context.roles:
        if not _has_rdma(role):
            yield Problem(
                f"{role.template.main.path}.resources.limits",
                "has no RDMA resource, and spec.kvConnector.protocol is rdma; request the cluster's "
                "RDMA device for the container main, or set protocol tcp",
                Severity.WARNING,
            )


def _has_rdma(role: RoleContext) -> bool:
    main = role.template.main
    names = [*main.resources("limits"), *main.resources("requests")]
    words = [word for name in names for word in name.lower().replace("/", "_").replace("-", "_").split("_")]
    privileged = as_map(main.content.get("securityContext")).get("privileged") is True
    claims = as_list(as_map(main.content.get("resources")).get("claims"))
    return privileged or bool(claims) or any(word.startswith(_RDMA_WORDS) for word in words)


RULES = (
    Rule("connector-takes-pair", connector_takes_pair),
    Rule("connector-config", connector_config),
    Rule("rdma-resources", rdma_resources),
)
