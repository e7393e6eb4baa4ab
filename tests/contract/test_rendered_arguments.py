"""The arguments that the operator renders, read by vLLM's own parser in the environment where vLLM is installed."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from dcp_operator.api.load import load_spec
from dcp_operator.build.engine_args import engine_args
from dcp_operator.settings import Role
from devcluster.engine.environment import ensure_engine_environment
from devcluster.paths import this_cache

SCRIPT = Path(__file__).with_name("vllm_flags.py")
GOLDEN = Path(__file__).parents[1] / "unit" / "golden"
EXAMPLES = Path(__file__).parents[2] / "examples"
SPECS = {
    "cpu-demo": EXAMPLES / "cpu-demo.yaml",
    "gpu-rdma": GOLDEN / "gpu-rdma.input.yaml",
    "image-delivery": GOLDEN / "image-delivery.input.yaml",
}


@pytest.fixture(scope="module")
def read_by_vllm() -> dict[tuple[str, Role], dict]:
    python = ensure_engine_environment(this_cache().root, lambda message: None) / "bin" / "python3"
    cases = {}
    for name, path in SPECS.items():
        spec = load_spec(yaml.safe_load(path.read_text()))
        assert spec is not None
        cases |= {(name, role): engine_args(name, spec, role) for role in Role}
    result = subprocess.run(
        [str(python), str(SCRIPT), "compare"],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    readings = json.loads(result.stdout.splitlines()[-1])["readings"]
    return dict(zip(cases, readings, strict=True))


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("name", SPECS)
def test_vllm_takes_what_is_rendered(read_by_vllm: dict, name: str, role: Role):
    read = read_by_vllm[name, role]
    assert "error" not in read
    transfer = read["--kv-transfer-config"]
    said = transfer if isinstance(transfer, str) else json.dumps(transfer)
    assert "DCPMooncakeConnector" in said
    assert ("kv_producer" if role is Role.PREFILL else "kv_consumer") in said


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
