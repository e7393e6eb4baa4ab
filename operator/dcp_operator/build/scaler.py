"""The scaler of a role: the object through which autoscalers say how many engines they want."""

from dcp_operator import names
from dcp_operator.build.objects import Context, Manifest, metadata
from dcp_operator.kinds import SCALER
from dcp_operator.replicas import wanted
from dcp_operator.settings import Role, role_spec


def build_scaler(context: Context, role: Role) -> Manifest | None:
    """Return the scaler of a role, None where the role states no `scaling`.

    It begins with the role's minimum, or with what runs if that is more and allowed: neither switching `scaling` on nor
    deleting the scaler by mistake takes engines away. Its spec is given once (`dcp_operator.kinds.GIVEN_ONCE`).
    """
    scaling = role_spec(context.spec, role).scaling
    if scaling is None:
        return None
    asked = wanted(context.spec, context.asked).of(role).asked
    return {
        "apiVersion": SCALER.api_version,
        "kind": SCALER.kind,
        "metadata": metadata(context, names.scaler(context.name, role), role),
        "spec": {"replicas": max(scaling.min_replicas, min(asked, scaling.max_replicas))},
    }
