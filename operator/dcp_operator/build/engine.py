"""The Deployment of one role's engines, one per revision."""

from dcp_operator import names
from dcp_operator.build.engine_pod import engine_pod_template
from dcp_operator.build.objects import Context, Manifest, metadata
from dcp_operator.build.workload import deployment
from dcp_operator.settings import Role, role_spec, wanted_replicas


def build_engine(context: Context, role: Role, revision: str) -> Manifest:
    """Return the Deployment of a role's engines."""
    strategy = context.spec.rollout_strategy
    replicas = wanted_replicas(role_spec(context.spec, role), context.live_replicas.get(role))
    return deployment(
        context,
        metadata(context, names.workload(context.name, role, revision), role, revision),
        component=role,
        revision=revision,
        replicas=replicas,
        # Within a revision pods are replaced for one reason only: the control channel's key has changed.
        rolling_update={"maxSurge": strategy.max_surge, "maxUnavailable": strategy.max_unavailable},
        template=engine_pod_template(context, role),
    )
