"""What is rendered: goldens for whole objects, and one test for each thing that must hold for all of them.

Goldens are written anew with UPDATE_GOLDEN=1; tests/cluster/test_operator.py has the real API server judge them.
"""

import os
from pathlib import Path

import pytest
import yaml

from dcp_operator import names
from dcp_operator.api.load import load_spec
from dcp_operator.api.spec import Spec
from dcp_operator.build import Context, TemplateError, render, render_context, revision_of
from dcp_operator.settings import Role
from tests.support.objects import spec

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = Path(__file__).parents[2] / "examples"

#: name -> what this golden is there for.
SPECS = {
    "cpu-demo": "the demo: a claim, a runtime class, a command of the user's own",
    "gpu-rdma": "accelerators, RDMA, a gated hub model, sidecars and probes of the user's own",
    "image-delivery": "the connector inside the engine image, the model in an image volume, an autoscaled role",
    "model-cache": "a model that a Job pulls into a claim",
    "rdma-host-network": "the host's network, RDMA devices, shared memory of a size, one domain for both roles",
}


def spec_of(name: str) -> Spec:
    own = GOLDEN / f"{name}.input.yaml"
    path = own if own.exists() else EXAMPLES / f"{name}.yaml"
    found = load_spec(yaml.safe_load(path.read_text()))
    assert found is not None
    return found


def context(**changes) -> Context:
    return Context("chat", "models", Spec.model_validate(spec(**changes)), "acme/operator:1")


def by_kind(manifests: list[dict], kind: str, component: str | None = None) -> dict:
    labels = {} if component is None else {names.LABEL_ROLE: component}
    found = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and labels.items() <= manifest["metadata"]["labels"].items()
    ]
    assert len(found) == 1
    return found[0]


def main_of(deployment: dict) -> dict:
    return deployment["spec"]["template"]["spec"]["containers"][0]


def with_template(**pod) -> dict:
    return {"parallelism": {"tensor": 1}, "blockSize": 32, "template": {"spec": pod}}


@pytest.mark.parametrize("name", SPECS)
def test_rendering_is_as_recorded(name: str):
    manifests = render(name, "models", spec_of(name), operator_image="acme/operator:1", uid="the-uid")
    text = yaml.safe_dump_all(manifests, sort_keys=False, width=10**9)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed ({SPECS[name]}); UPDATE_GOLDEN=1 writes it anew"


def test_rendering_twice_gives_the_same():
    assert render_context(context()) == render_context(context())


def test_every_child_goes_with_its_owner_and_bears_its_name():
    for manifest in render("chat", "models", context().spec, operator_image="o", uid="the-uid"):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert owner["uid"] == "the-uid"
        assert owner["controller"] is True
        assert manifest["metadata"]["namespace"] == "models"
        assert manifest["metadata"]["labels"][names.LABEL_NAME] == "chat"


def test_both_engine_pods_start_with_the_connector():
    manifests = render_context(context())
    for role in Role:
        deployment = by_kind(manifests, "Deployment", role)
        pod = deployment["spec"]["template"]["spec"]
        assert [container["name"] for container in pod["initContainers"]] == ["connector"]
        env = {variable["name"]: variable.get("value") for variable in main_of(deployment)["env"]}
        assert env["PYTHONPATH"] == "/dcp-connector"
        assert env["DCP_KV_SECRET_FILE"] == "/etc/dcp-kv/key"
        assert any(arg.startswith("--kv-transfer-config=") for arg in main_of(deployment)["args"])


#: type -> role -> the connector's port, readiness, and variables beside VLLM_HOST_IP.
OWN_CONNECTORS = {
    "mooncake-upstream": {
        Role.PREFILL: ({"kv-bootstrap": 8998}, ("/query", "kv-bootstrap"), {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"}),
        Role.DECODE: ({}, ("/health", "http"), {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"}),
    },
    "nixl": {
        role: (
            {"kv-bootstrap": 5600},
            ("/health", "http"),
            {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600", "VLLM_NIXL_SIDE_CHANNEL_HOST": None, "UCX_TLS": "^ib"},
        )
        for role in Role
    },
}


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("kind", OWN_CONNECTORS)
def test_an_engine_with_a_connector_of_vllms_own_gets_what_that_needs_and_nothing_of_ours(kind: str, role: Role):
    ports, readiness, env = OWN_CONNECTORS[kind][role]
    deployment = by_kind(render_context(context(kvConnector={"type": kind, "protocol": "tcp"})), "Deployment", role)
    pod, main = deployment["spec"]["template"]["spec"], main_of(deployment)
    assert "initContainers" not in pod
    assert [volume["name"] for volume in pod["volumes"]] == ["dshm"]
    given = {port["name"]: port["containerPort"] for port in main["ports"]}
    assert given == {"http": 8000, **ports}
    probe = main["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"]) == readiness
    variables = {variable["name"]: variable.get("value") for variable in main["env"]}
    assert variables == {"VLLM_HOST_IP": None, **env}
    assert all("fieldRef" in variable["valueFrom"] for variable in main["env"] if "valueFrom" in variable)


@pytest.mark.parametrize(
    ("kind", "ports"), [("mooncake", [8998, 8999]), ("nixl", [5600, 5601]), ("mooncake-upstream", [])]
)
def test_each_data_parallel_rank_of_a_pod_has_a_port_where_the_connector_gives_it_one(kind: str, ports: list[int]):
    decode = {**spec()["decode"], "parallelism": {"tensor": 2, "decodeContext": 2, "data": 2}}
    manifests = render_context(context(kvConnector={"type": kind, "protocol": "tcp"}, decode=decode))
    declared = main_of(by_kind(manifests, "Deployment", Role.DECODE))["ports"]
    assert [port["containerPort"] for port in declared] == [8000, *ports]
    assert all(len(port["name"]) <= 15 for port in declared)


@pytest.mark.parametrize(("kind", "flow"), [("mooncake", "nixl"), ("nixl", "nixl"), ("mooncake-upstream", "mooncake")])
def test_the_router_is_told_the_flow_of_the_connector(kind: str, flow: str):
    manifests = render_context(context(kvConnector={"type": kind, "protocol": "tcp"}))
    assert f"--kv-connector={flow}" in main_of(by_kind(manifests, "Deployment", names.ROUTER))["args"]


def test_a_role_runs_its_own_image_where_it_states_one():
    manifests = render_context(context(decode={**spec()["decode"], "image": "acme/engine:2"}))
    images = {role: main_of(by_kind(manifests, "Deployment", role))["image"] for role in Role}
    assert images == {Role.PREFILL: "acme/engine:1", Role.DECODE: "acme/engine:2"}


def test_an_image_that_has_the_connector_gets_no_init_container_and_keeps_its_path():
    manifests = render_context(context(kvConnector={"protocol": "tcp", "delivery": "Image"}))
    deployment = by_kind(manifests, "Deployment", Role.DECODE)
    assert "initContainers" not in deployment["spec"]["template"]["spec"]
    assert "PYTHONPATH" not in {variable["name"] for variable in main_of(deployment)["env"]}


def test_the_users_python_path_comes_after_the_connectors():
    main = {"name": "main", "env": [{"name": "PYTHONPATH", "value": "/mine:/other"}]}
    manifests = render_context(context(prefill=with_template(containers=[main])))
    env = {
        variable["name"]: variable.get("value")
        for variable in main_of(by_kind(manifests, "Deployment", "prefill"))["env"]
    }
    assert env["PYTHONPATH"] == "/dcp-connector:/mine:/other"


def test_a_python_path_that_is_not_plain_is_refused_with_its_path():
    main = {"name": "main", "env": [{"name": "PYTHONPATH", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}
    with pytest.raises(TemplateError, match=r"^spec\.prefill\.template\.spec\.containers\[main\]\.env\[PYTHONPATH\]: "):
        render_context(context(prefill=with_template(containers=[main])))


def test_the_operators_variables_come_first_so_that_the_users_can_refer_to_them():
    main = {
        "name": "main",
        "env": [{"name": "MINE", "value": "$(VLLM_HOST_IP)"}, {"name": "VLLM_HOST_IP", "value": "x"}],
    }
    env = main_of(by_kind(render_context(context(prefill=with_template(containers=[main]))), "Deployment", "prefill"))[
        "env"
    ]
    assert [variable["name"] for variable in env].index("VLLM_HOST_IP") < [variable["name"] for variable in env].index(
        "MINE"
    )
    assert next(variable for variable in env if variable["name"] == "VLLM_HOST_IP")["valueFrom"]


def test_what_the_user_says_in_a_template_wins_over_defaults_and_loses_to_what_the_operator_owns():
    main = {
        "name": "main",
        "command": ["mine"],
        "image": "theirs",
        "args": ["theirs"],
        "livenessProbe": {"periodSeconds": 99},
        "securityContext": {"runAsUser": 1000},
    }
    template = with_template(containers=[main, {"name": "side", "image": "s"}], terminationGracePeriodSeconds=500)
    deployment = by_kind(render_context(context(decode=template)), "Deployment", Role.DECODE)
    found = main_of(deployment)
    assert found["command"] == ["mine"]
    assert found["livenessProbe"]["periodSeconds"] == 99
    assert found["livenessProbe"]["httpGet"]["path"] == "/health"
    assert found["securityContext"]["runAsUser"] == 1000
    assert found["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert found["image"] == "acme/engine:1"
    assert "theirs" not in found["args"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 500
    assert [container["name"] for container in pod["containers"]] == ["main", "side"]


def test_a_users_label_does_not_take_a_pod_out_of_its_selector():
    template = {"metadata": {"labels": {names.LABEL_ROLE: "other", "team": "a"}}}
    decode = {"parallelism": {"tensor": 1}, "blockSize": 32, "template": template}
    spec_ = by_kind(render_context(context(decode=decode)), "Deployment", Role.DECODE)["spec"]
    assert spec_["selector"]["matchLabels"].items() <= spec_["template"]["metadata"]["labels"].items()
    assert spec_["template"]["metadata"]["labels"]["team"] == "a"


def test_accelerators_are_counted_from_the_parallel_sizes():
    decode = {"parallelism": {"tensor": 4, "pipeline": 2}, "blockSize": 32}
    manifests = render_context(context(accelerator={"resourceName": "nvidia.com/gpu"}, decode=decode))
    main = main_of(by_kind(manifests, "Deployment", Role.DECODE))
    assert main["resources"] == {"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8"}}


@pytest.mark.parametrize(("protocol", "added"), [("tcp", None), ("rdma", ["IPC_LOCK"])])
def test_engines_get_no_capability_but_the_one_that_rdma_needs(protocol: str, added: list[str] | None):
    manifests = render_context(context(kvConnector={"protocol": protocol}))
    for role in Role:
        security = main_of(by_kind(manifests, "Deployment", role))["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"], **({"add": added} if added else {})}
        assert security["allowPrivilegeEscalation"] is False


def test_the_router_pairs_engines_of_its_own_revision_only():
    manifests = render_context(context())
    deployment = by_kind(manifests, "Deployment", names.ROUTER)
    revision = deployment["metadata"]["labels"][names.LABEL_REVISION]
    args = main_of(deployment)["args"]
    for role in Role:
        start = args.index(f"--{role}-selector")
        assert set(args[start + 1 : start + 4]) == {
            "dcpdisagg.io/name=chat",
            f"dcpdisagg.io/role={role}",
            f"dcpdisagg.io/revision={revision}",
        }
    assert "--kv-connector=nixl" in args
    assert "--service-discovery-namespace=models" in args


def test_the_router_may_read_pods_of_its_namespace_and_nothing_else():
    manifests = render_context(context())
    assert by_kind(manifests, "Role")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    assert not [manifest for manifest in manifests if manifest["kind"].startswith("Cluster")]


def test_the_public_service_selects_the_routers_of_all_revisions():
    service = by_kind(render_context(context()), "Service")
    assert service["metadata"]["name"] == "chat"
    assert service["spec"]["selector"] == {names.LABEL_NAME: "chat", names.LABEL_ROLE: "router"}
    assert service["spec"]["ports"][0]["port"] == 80


def role_with(role: str, pod: dict) -> dict:
    """Return a role of the specimen with something in its pod template."""
    return {role: {**spec()[role], "template": {"spec": pod}}}


class TestRevision:
    def test_it_has_eight_hex_digits_and_is_in_the_names_and_labels_of_all_workloads(self):
        manifests = render_context(context())
        revision = revision_of(context())
        assert len(revision) == 8
        assert int(revision, 16) >= 0
        for manifest in manifests:
            if manifest["kind"] == "Deployment":
                assert manifest["metadata"]["name"].endswith(f"-{revision}")
                assert manifest["spec"]["template"]["metadata"]["labels"][names.LABEL_REVISION] == revision

    @pytest.mark.parametrize(
        "changes",
        [
            {"image": "acme/engine:2"},
            {"kvConnector": {"protocol": "rdma"}},
            {"decode": {"parallelism": {"tensor": 2, "decodeContext": 1}, "blockSize": 32}},
            {"decode": {"parallelism": {"tensor": 2, "decodeContext": 2}, "blockSize": 32, "kvCacheInterleaveSize": 8}},
            {"prefill": {"parallelism": {"tensor": 1}, "blockSize": 32, "extraArgs": ["--enforce-eager"]}},
            {"model": {"uri": "pvc://models/tiny"}},
            {"kvConnector": {"protocol": "tcp", "delivery": "Image"}},
            role_with("decode", {"containers": [{"name": "main", "envFrom": [{"configMapRef": {"name": "tuning"}}]}]}),
            role_with("decode", {"containers": [{"name": "main", "command": ["numactl", "python3"]}]}),
            role_with("prefill", {"initContainers": [{"name": "connector", "env": [{"name": "A", "value": "1"}]}]}),
        ],
    )
    def test_it_changes_with_whatever_the_two_roles_have_to_agree_on(self, changes: dict):
        assert revision_of(context(**changes)) != revision_of(context())

    @pytest.mark.parametrize(
        "changes",
        [
            {"prefill": {"replicas": 7, "parallelism": {"tensor": 1}, "blockSize": 32}},
            {"prefill": {"scaling": {"maxReplicas": 7}, "parallelism": {"tensor": 1}, "blockSize": 32}},
            {"router": {"replicas": 5}},
            {"rolloutStrategy": {"maxSurge": "50%"}},
        ],
    )
    def test_a_scale_never_changes_it(self, changes: dict):
        assert revision_of(context(**changes)) == revision_of(context())

    @pytest.mark.parametrize(
        ("component", "changes"),
        [
            ("prefill", role_with("prefill", {"containers": [{"name": "sidecar", "image": "acme/sidecar:2"}]})),
            ("decode", role_with("decode", {"tolerations": [{"operator": "Exists"}], "priorityClassName": "high"})),
            ("decode", role_with("decode", {"containers": [{"name": "main", "resources": {"limits": {"cpu": 4}}}]})),
            ("prefill", role_with("prefill", {"terminationGracePeriodSeconds": 900})),
            ("router", {"router": {"template": {"spec": {"priorityClassName": "high"}}}}),
        ],
    )
    def test_what_concerns_one_component_changes_its_template_and_not_the_revision(self, component: str, changes: dict):
        assert revision_of(context(**changes)) == revision_of(context())
        before, after = render_context(context()), render_context(context(**changes))
        for each in names.COMPONENTS:
            templates = [by_kind(made, "Deployment", each)["spec"]["template"] for made in (before, after)]
            assert (templates[0] == templates[1]) is (each != component)

    def test_an_upgrade_of_the_operator_does_not_change_it(self):
        spec_ = Spec.model_validate(spec())
        new = Context("chat", "models", spec_, "acme/operator:2", pull_policy="Always")
        assert revision_of(new) == revision_of(context())

    def test_a_new_key_changes_neither_it_nor_the_pods(self):
        spec_ = Spec.model_validate(spec())
        keys = [Context("chat", "models", spec_, "acme/operator:1", kv_key=key) for key in ("QQ==", "Qg==")]
        assert revision_of(keys[0]) == revision_of(keys[1])
        templates = [by_kind(render_context(one), "Deployment", "prefill")["spec"]["template"] for one in keys]
        assert templates[0] == templates[1]
