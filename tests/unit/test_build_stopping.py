"""What pods do before they are stopped, as it is rendered."""

import pytest

from dcp_operator import names
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context, TemplateError, render_context
from dcp_operator.settings import Role
from tests.support.objects import spec


def context(**changes) -> Context:
    return Context("chat", "models", Spec.model_validate(spec(**changes)), "acme/operator:1")


def pod_of(component: str, **changes) -> dict:
    (template,) = [
        manifest["spec"]["template"]
        for manifest in render_context(context(**changes))
        if manifest["kind"] == "Deployment" and manifest["metadata"]["labels"][names.LABEL_ROLE] == component
    ]
    return template["spec"]


def pre_stop(component: str, **changes) -> dict | None:
    return pod_of(component, **changes)["containers"][0].get("lifecycle", {}).get("preStop")


def role_with(main: dict | None = None, **pod) -> dict:
    template = {"spec": {**pod, "containers": [{"name": "main", **(main or {})}]}}
    return {"parallelism": {"tensor": 1}, "blockSize": 32, "template": template}


@pytest.mark.parametrize("role", list(Role))
def test_an_engine_waits_for_its_requests_and_its_kv_as_long_as_the_spec_says(role: Role):
    connector = {"protocol": "tcp", "extraConfig": {"lease_s": 44.5}}
    assert pre_stop(role, drainTimeoutSeconds=7, kvConnector=connector) == {
        "exec": {
            "command": [
                *("python3", "-m", "dcp_connector.drain", "--port=8000"),
                *("--settle=5", "--requests=7", "--kv=45"),
            ]
        }
    }
    pod = pod_of(role, drainTimeoutSeconds=7, kvConnector=connector)
    assert pod["terminationGracePeriodSeconds"] == 7 + 45 + 30
    assert "--shutdown-timeout=7" in pod["containers"][0]["args"]


def test_the_grace_period_covers_the_pause_of_an_engine_without_time_to_drain():
    connector = {"protocol": "tcp", "extraConfig": {"lease_s": 1}}
    assert (
        pod_of("prefill", drainTimeoutSeconds=0, kvConnector=connector)["terminationGracePeriodSeconds"] == 5 + 1 + 30
    )


@pytest.mark.parametrize(
    ("command", "interpreter"),
    [
        (["/opt/engine/bin/python3.12", "-m", "engine"], "/opt/engine/bin/python3.12"),
        (["python", "-c", "serve()"], "python"),
        (["vllm", "serve"], "python3"),
        (["/bin/sh", "-c", "exec vllm serve"], "python3"),
        ([], "python3"),
    ],
)
def test_the_hook_runs_in_the_interpreter_that_has_the_connector(command: list[str], interpreter: str):
    handler = pre_stop("prefill", prefill=role_with({"command": command}))
    assert handler is not None
    assert handler["exec"]["command"][0] == interpreter


@pytest.mark.parametrize("kind", ["nixl", "mooncake-upstream"])
def test_an_engine_with_a_connector_of_vllms_own_pauses_and_then_drains_by_itself(kind: str):
    changes = {"kvConnector": {"type": kind, "protocol": "tcp"}, "router": {"replicas": 0}, "drainTimeoutSeconds": 90}
    pod = pod_of("prefill", **changes)
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert "--shutdown-timeout=90" in pod["containers"][0]["args"]


@pytest.mark.parametrize(("grace_s", "seconds"), [(3, 3), (60, 5)])
def test_a_pause_is_no_longer_than_a_grace_period_that_the_template_states(grace_s: int, seconds: int):
    router = {"template": {"spec": {"terminationGracePeriodSeconds": grace_s}}}
    assert pre_stop("router", router=router) == {"sleep": {"seconds": seconds}}


def test_without_a_grace_period_a_router_does_not_pause():
    assert pre_stop("router", router={"template": {"spec": {"terminationGracePeriodSeconds": 0}}}) is None


def test_a_router_takes_requests_until_nobody_has_its_address_and_then_as_long_as_engines_would():
    assert pre_stop("router") == {"sleep": {"seconds": 5}}
    assert pod_of("router", drainTimeoutSeconds=100)["terminationGracePeriodSeconds"] == 105


def test_a_hook_of_the_template_stays_as_it_is_and_what_else_it_states_too():
    own = {"preStop": {"exec": {"command": ["/drain.sh"]}}}
    assert pre_stop("decode", decode=role_with({"lifecycle": own})) == own["preStop"]
    start = {"postStart": {"exec": {"command": ["/start.sh"]}}}
    main = pod_of("decode", decode=role_with({"lifecycle": start}))["containers"][0]
    assert set(main["lifecycle"]) == {"postStart", "preStop"}


def test_a_lifecycle_of_the_wrong_shape_is_named():
    with pytest.raises(TemplateError) as refusal:
        render_context(context(decode=role_with({"lifecycle": "none"})))
    assert str(refusal.value).startswith("spec.decode.template.spec.containers[main].lifecycle: expected a mapping")
