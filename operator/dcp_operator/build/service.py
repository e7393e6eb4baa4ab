"""The Service that clients talk to."""

from dcp_operator import names
from dcp_operator.build.objects import Context, Manifest, metadata


def build_service(context: Context) -> Manifest | None:
    """Return the public Service: it selects the routers of every revision. None where there are none.

    A router is Ready only while its own revision has both roles, so during a change requests go to what can answer.
    """
    if context.spec.router.replicas == 0:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(context, names.public_service(context.name), names.ROUTER),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(context.name, names.ROUTER),
            "ports": [
                {
                    "name": names.PORT_NAME_HTTP,
                    "port": names.PORT_PUBLIC,
                    "targetPort": names.PORT_NAME_HTTP,
                    "protocol": "TCP",
                }
            ],
        },
    }
