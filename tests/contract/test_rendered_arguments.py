"""The arguments that the operator renders, read by vLLM's own parser in the environment where vLLM is installed."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from dcp_operator.api.load import load_spec
from dcp_operator.build.engine_args import engine_args
from dcp_operator.connectors import PROFILES
from dcp_operator.rules.attention import BACKENDS
from dcp_operator.rules.edits import Fix, changed_spec
from dcp_operator.settings import Role
from devcluster.engine.environment import ensure_engine_environment
from devcluster.paths import this_cache
from tests.support.vllm_process import VERSIONS, vllm_process

GOLDEN = Path(__file__).parents[1] / "unit" / "golden"
EXAMPLES = Path(__file__).parents[2] / "examples"
SPECS = {
    "cpu-demo": EXAMPLES / "cpu-demo.yaml",
    "gpu-rdma": GOLDEN / "gpu-rdma.input.yaml",
    "image-delivery": GOLDEN / "image-delivery.input.yaml",
}
#: Connectors that vLLM brings -> their classes.
OWN_CLASSES = {"mooncake-upstream": "MooncakeConnector", "nixl": "NixlConnector"}


@pytest.fixture(scope="module", params=VERSIONS)
def read_by_vllm(request: pytest.FixtureRequest) -> dict[tuple[str, Role], dict]:
    cases = {}
    for name, path in SPECS.items():
        spec = load_spec(yaml.safe_load(path.read_text()))
        assert spec is not None
        cases |= {(name, role): engine_args(name, spec, role) for role in Role}
        for connector in OWN_CLASSES if name == "gpu-rdma" else ():
            other = changed_spec(spec, Fix("spec.kvConnector.type", connector))
            cases |= {(connector, role): engine_args(name, other, role) for role in Role}
    answers = vllm_process(request.param).ask("read", cases=list(cases.values()))
    return {case: answer.get("values", answer) for case, answer in zip(cases, answers, strict=True)}


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("name", SPECS)
def test_vllm_takes_what_is_rendered(read_by_vllm: dict, name: str, role: Role):
    read = read_by_vllm[name, role]
    assert "error" not in read
    transfer = read["--kv-transfer-config"]
    said = transfer if isinstance(transfer, str) else json.dumps(transfer)
    assert "DCPMooncakeConnector" in said
    assert ("kv_producer" if role is Role.PREFILL else "kv_consumer") in said


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("connector", OWN_CLASSES)
def test_vllm_takes_what_is_rendered_for_its_own_connectors(read_by_vllm: dict, connector: str, role: Role):
    read = read_by_vllm[connector, role]
    assert "error" not in read
    said = str(read["--kv-transfer-config"])
    assert f"kv_connector='{OWN_CLASSES[connector]}'" in said
    assert "kv_connector_module_path=None" in said
    assert ("kv_producer" if role is Role.PREFILL else "kv_consumer") in said


@pytest.mark.parametrize("connector", OWN_CLASSES)
def test_vllm_has_the_connector_and_the_variables_that_its_pods_get(connector: str):
    """Read from the source, because importing a connector wants its transfer library."""
    profile = PROFILES[connector]
    python = ensure_engine_environment(this_cache().root, lambda message: None) / "lib"
    (vllm,) = python.glob("python3*/site-packages/vllm")
    factory = (vllm / "distributed/kv_transfer/kv_connector/factory.py").read_text()
    assert f'"{profile.vllm_class}"' in factory
    envs = (vllm / "envs.py").read_text()
    for name in (profile.port_env, profile.host_env):
        assert name is None or f'"{name}"' in envs
    folder = vllm / "distributed/kv_transfer/kv_connector/v1" / connector.removesuffix("-upstream")
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    options = [*profile.options.model_fields, *profile.operator_sets]
    assert [name for name in options if f'"{name}"' not in sources] == []


def test_the_table_of_attention_backends_is_what_vllm_says():
    """Read from the source: the classes can't be imported without their devices."""
    python = ensure_engine_environment(this_cache().root, lambda message: None) / "lib"
    (vllm,) = python.glob("python3*/site-packages/vllm")
    tree = ast.parse((vllm / "v1/attention/backends/registry.py").read_text())
    classes = {
        node.targets[0].id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.targets[0], ast.Name)
    }
    said = {}
    for name in BACKENDS:
        source = (vllm.parent / (classes[name].rpartition(".")[0].replace(".", "/") + ".py")).read_text()
        implementation = source[source.index("Impl(") :]
        said[name] = tuple(
            re.search(rf"^    {flag}\b.*= True", implementation, re.MULTILINE) is not None
            for flag in ("supports_dcp", "supports_mtp_with_cp_non_trivial_interleave_size")
        )
    assert said == {name: (backend.shards, backend.speculates) for name, backend in BACKENDS.items()}


def test_vllm_reads_the_sizes_that_were_meant(read_by_vllm: dict):
    decode = read_by_vllm["gpu-rdma", Role.DECODE]
    assert decode["--tensor-parallel-size"] == decode["--decode-context-parallel-size"] == 8
    assert decode["--cp-kv-cache-interleave-size"] == 64
    assert decode["--max-model-len"] == 32768
    assert decode["--shutdown-timeout"] == 60
    prefill = read_by_vllm["gpu-rdma", Role.PREFILL]
    assert prefill["--tensor-parallel-size"] == 4
    assert "--decode-context-parallel-size" not in prefill
    assert read_by_vllm["image-delivery", Role.DECODE]["--cp-kv-cache-interleave-size"] == 16
