"""The Deployment of the routers, one per revision."""

from dcp_operator import names
from dcp_operator.build.objects import Context, Manifest, metadata
from dcp_operator.build.router_pod import router_pod_template
from dcp_operator.build.workload import deployment


def build_router(context: Context, revision: str) -> Manifest:
    """Return the Deployment of a revision's routers."""
    return deployment(
        context,
        metadata(context, names.workload(context.name, names.ROUTER, revision), names.ROUTER, revision),
        component=names.ROUTER,
        revision=revision,
        replicas=context.spec.router.replicas,
        rolling_update={"maxSurge": 1, "maxUnavailable": 0},
        template=router_pod_template(context, revision),
    )
