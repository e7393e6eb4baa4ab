"""Pod template of the request router, vllm-router 0.1.17.

Its serial flow ("nixl") is the one that works with Kubernetes discovery: prefill's answer carries everything that
decode needs. Connectors that need another flow are refused together with routers (rule router-drives-connector).
The selectors name the revision, so a router never pairs engines of two revisions.
"""

from dcp_operator import names
from dcp_operator.build.engine_pod import OPERATOR_UID, restricted
from dcp_operator.build.merge import Manifest, merge, readable
from dcp_operator.build.objects import Context
from dcp_operator.build.stopping import pause, router_grace_s, with_pre_stop
from dcp_operator.build.wiring import profile_of
from dcp_operator.ports import engine_ports
from dcp_operator.settings import Role


def router_pod_template(context: Context, revision: str) -> Manifest:
    """Return the pod template of a revision's routers, without the revision's label."""
    path = "spec.router.template"
    merged = merge(_defaults(context), context.spec.router.template, path)
    result = merge(merged, _owned(context, revision), path)
    containers = result["spec"]["containers"]
    # Clients go on connecting for a while: the router takes them until nobody has its address any more.
    handler = pause(result["spec"]["terminationGracePeriodSeconds"])
    containers[0] = readable(with_pre_stop(containers[0], handler, path))
    return result


def router_args(context: Context, revision: str) -> list[str]:
    """Return the router's arguments for the engines of one revision, which all listen on one port."""
    engine_port = engine_ports(context.spec, Role.PREFILL, context.host_ports).api

    def pairs(role: Role) -> list[str]:
        return [f"{key}={value}" for key, value in sorted(names.selector(context.name, role, revision).items())]

    return [
        "--host=0.0.0.0",
        f"--port={names.PORT_ROUTER}",
        "--vllm-pd-disaggregation",
        f"--kv-connector={profile_of(context.spec).router_flow}",
        "--service-discovery",
        f"--service-discovery-port={engine_port}",
        f"--service-discovery-namespace={context.namespace}",
        "--prefill-selector",
        *pairs(Role.PREFILL),
        "--decode-selector",
        *pairs(Role.DECODE),
        # Prompts that begin alike go to the prefill engine that has their prefix; decode engines share the load evenly.
        "--prefill-policy=cache_aware",
        "--decode-policy=round_robin",
        "--health-check-endpoint=/health",
        "--health-check-interval-secs=10",
        "--worker-startup-check-interval=2",
        # Of each engine's whole answer: nothing else ends a request whose engine is healthy and never answers.
        f"--request-timeout-secs={context.spec.router.request_timeout_seconds}",
        "--prometheus-host=0.0.0.0",
        f"--prometheus-port={names.PORT_ROUTER_METRICS}",
    ]


def _defaults(context: Context) -> Manifest:
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "command": ["vllm-router"],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": restricted(uid=OPERATOR_UID),
        # 200 only while both roles have a healthy engine: the object's Service then sends it requests.
        "readinessProbe": _probe("/readiness", periodSeconds=2, failureThreshold=2, timeoutSeconds=2),
        "livenessProbe": _probe("/health", periodSeconds=10, failureThreshold=6, timeoutSeconds=5),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": names.VOLUME_TMP, "mountPath": "/tmp"}],  # noqa: S108 - a path in the container
    }
    return {
        "metadata": {},
        "spec": {
            "terminationGracePeriodSeconds": router_grace_s(context.spec),
            "containers": [main],
            "volumes": [{"name": names.VOLUME_TMP, "emptyDir": {}}],
        },
    }


def _owned(context: Context, revision: str) -> Manifest:
    main: Manifest = {
        "name": names.CONTAINER_MAIN,
        "image": context.operator_image,
        "imagePullPolicy": context.pull_policy,
        "args": router_args(context, revision),
        "ports": [
            {"name": names.PORT_NAME_HTTP, "containerPort": names.PORT_ROUTER, "protocol": "TCP"},
            {"name": names.PORT_NAME_METRICS, "containerPort": names.PORT_ROUTER_METRICS, "protocol": "TCP"},
        ],
    }
    return {
        "metadata": {"labels": names.labels(context.name, names.ROUTER)},
        "spec": {
            # Without its own ServiceAccount the router can't list pods, and then it knows no engine.
            "serviceAccountName": names.router_account(context.name),
            "automountServiceAccountToken": True,
            "containers": [main],
        },
    }


def _probe(path: str, **timing: int) -> Manifest:
    return {"httpGet": {"path": path, "port": names.PORT_NAME_HTTP, "scheme": "HTTP"}, "successThreshold": 1, **timing}
