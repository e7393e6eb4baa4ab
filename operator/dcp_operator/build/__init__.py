"""Spec to manifests: pure, in a fixed order, the same for the reconciler and for `dcpctl render`."""

from dcp_operator.api.spec import Spec
from dcp_operator.build.disruption import build_disruption_budget
from dcp_operator.build.engine import build_engine
from dcp_operator.build.engine_pod import engine_pod_template
from dcp_operator.build.merge import Manifest, TemplateError
from dcp_operator.build.model_job import build_model_job
from dcp_operator.build.network_policy import build_engine_policy, build_router_policy
from dcp_operator.build.objects import Context
from dcp_operator.build.router import build_router
from dcp_operator.build.router_access import build_role, build_role_binding, build_service_account
from dcp_operator.build.router_pod import router_pod_template
from dcp_operator.build.scaler import build_scaler
from dcp_operator.build.secret import build_key_secret
from dcp_operator.build.service import build_service
from dcp_operator.build.workload import revision_of
from dcp_operator.replicas import wanted
from dcp_operator.settings import Role

__all__ = ["Context", "Manifest", "TemplateError", "check_templates", "render", "render_context", "revision_of"]


def render(name: str, namespace: str, spec: Spec, *, operator_image: str, uid: str | None = None) -> list[Manifest]:
    """Return every manifest of an object, in the order in which they are applied.

    Raises TemplateError for a pod template that can't be merged, pydantic.ValidationError for a connector option that
    doesn't exist.
    """
    return render_context(Context(name=name, namespace=namespace, spec=spec, operator_image=operator_image, uid=uid))


def render_context(context: Context, revision: str | None = None) -> list[Manifest]:
    """Return every manifest of an object: what pods refer to comes before the pods, the way in comes last.

    `revision` is that of the context, for who knows it already.
    """
    revision = revision or revision_of(context)
    engines = wanted(context.spec, context.asked).replicas
    wanted_or_none = [
        build_key_secret(context),
        build_service_account(context),
        build_role(context),
        build_role_binding(context),
        build_engine_policy(context),
        build_router_policy(context),
        *(build_disruption_budget(context, role, engines[role]) for role in Role),
        build_model_job(context),
        *(build_engine(context, role, revision) for role in Role),
        build_router(context, revision),
        build_service(context),
        *(build_scaler(context, role) for role in Role),
    ]
    return [manifest for manifest in wanted_or_none if manifest is not None]


def check_templates(name: str, namespace: str, spec: Spec) -> None:
    """Raise what rendering an object would raise, at a quarter of its cost: only pod templates can fail."""
    context = Context(name=name, namespace=namespace, spec=spec, operator_image="-")
    for role in Role:
        engine_pod_template(context, role)
    router_pod_template(context, revision="")
