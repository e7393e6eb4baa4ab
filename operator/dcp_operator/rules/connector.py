"""Rules on the KV connector's options."""

import difflib
from collections.abc import Iterator

from pydantic import ValidationError

from dcp_operator.api.findings import Severity, show
from dcp_operator.rules.context import Context, Problem, Rule
from dcp_operator.rules.edits import REMOVED, Fix

_PATH = "spec.kvConnector.extraConfig"
#: Comparing texts takes time with the product of their lengths; nothing longer resembles an option.
_LONGEST_NAME = 40


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


RULES = (Rule("connector-config", connector_config),)
