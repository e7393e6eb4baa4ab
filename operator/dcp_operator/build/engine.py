"""What runs one role's engines, one per revision: a Deployment, or a LeaderWorkerSet where an engine spans pods."""

from functools import partial

from dcp_operator import names
from dcp_operator.build.engine_pod import engine_pod_template
from dcp_operator.build.leader_worker_set import leader_worker_set
from dcp_operator.build.objects import Context, Manifest, metadata
from dcp_operator.build.workload import deployment
from dcp_operator.replicas import wanted
from dcp_operator.settings import Role, role_spec


def build_engine(context: Context, role: Role, revision: str) -> Manifest:
    """Return the workload of a role's engines."""
    strategy = context.spec.rollout_strategy
    multinode = role_spec(context.spec, role).multinode
    build = deployment if multinode is None else partial(leader_worker_set, multinode=multinode)
    return build(
        context,
        metadata(context, names.workload(context.name, role, revision), role, revision),
        component=role,
        revision=revision,
        replicas=wanted(context.spec, context.asked).of(role).replicas,
        # For changes within the revision, such as a sidecar's image; the planner has revisions take turns.
        rolling_update={"maxSurge": strategy.max_surge, "maxUnavailable": strategy.max_unavailable},
        template=engine_pod_template(context, role, revision),
    )
