"""Rules on the KV connector: its options and what it needs of the pods."""

import difflib
from collections.abc import Iterator

from pydantic import ValidationError

from dcp_operator.api.findings import Severity, show
from dcp_operator.rules.context import Context, Problem, RoleContext, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.pod_template import as_list, as_map

_PATH = "spec.kvConnector.extraConfig"
#: Comparing texts takes time with the product of their lengths; nothing longer resembles an option.
_LONGEST_NAME = 40
#: Words in the names of resources that give a pod RDMA devices.
_RDMA_WORDS = ("rdma", "hca", "roce", "infiniband", "efa", "ib")


def connector_config(context: Context) -> Iterator[Problem]:
    """extraConfig holds options that the connector has, with values that it takes.

    The bundled connector refuses to start with any other, so that a typing error doesn't go unnoticed. vLLM's own pass
    an unknown option over, which is a warning. What the operator sets itself (transport, ports) is stated elsewhere.

    Correct the option that the message names.
    """
    profile, stated = context.profile, context.spec.kv_connector.extra_config
    known = [name for name in profile.options.model_fields if name not in profile.operator_sets]
    ours: dict[str, object] = {}
    for name, value in stated.items():
        path = f"{_PATH}.{name}"
        if name in profile.operator_sets:
            yield Problem(
                path,
                f"{show(value)} is set by the operator; {profile.operator_sets[name]}",
                fixes=(Fix(path, REMOVED),),
            )
        elif name not in known:
            near = difflib.get_close_matches(name[:_LONGEST_NAME], known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"its options are {', '.join(known)}"
            severity = Severity.ERROR if profile.bundled else Severity.WARNING
            yield Problem(path, f"is no option of {profile.words}; {hint}", severity, (Fix(path, REMOVED),))
        else:
            ours[name] = value
    try:
        profile.options.model_validate(ours)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = f"{_PATH}.{detail['loc'][0]}" if detail["loc"] else _PATH
            # pydantic's sentences read on from "the input": Input should be greater than 0.
            wanted = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
            yield Problem(path, f"found {show(detail['input'])}, which {wanted}", fixes=(Fix(path, REMOVED),))


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
    Rule("connector-config", connector_config),
    Rule("rdma-resources", rdma_resources, sources=("dynamo #3724", "dynamo #5884")),
)
