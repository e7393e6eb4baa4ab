"""What the connector shows, through vLLM's own classes: metrics that start at 0, and its bootstrap server's /query."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dcp_connector.errors import Reason
from dcp_connector.stats import METRICS, OUTCOMES
from devcluster.engine.environment import ensure_engine_environment
from devcluster.paths import CHECKOUT, this_cache

SCRIPT = Path(__file__).with_name("vllm_observed.py")


@pytest.fixture(scope="module")
def observed() -> dict:
    python = ensure_engine_environment(this_cache().root, lambda message: None) / "bin" / "python3"
    result = subprocess.run(
        [str(python), str(SCRIPT)],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(CHECKOUT / "connector")},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def samples(text: str, engine: str) -> dict[str, float]:
    """Values of our metrics of one engine, by name and last label; buckets are left out."""
    found = {}
    for name, labels, value in re.findall(r"^(vllm:dcp_kv_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert values.pop("model_name") == "tiny"
        if values.pop("engine") == engine and not name.endswith(("_bucket", "_created")):
            found[" ".join([name, *values.values()])] = float(value)
    return found


def test_query_is_exactly_what_vllms_own_bootstrap_server_answers(observed: dict) -> None:
    assert observed["query"]["ours"] == observed["query"]["vllm"]
    assert observed["query"]["ours"]["status"] == 200
    assert observed["query"]["ours"]["body"].keys() == {"0"}


@pytest.mark.parametrize("engine", ["0", "1"])
def test_every_metric_shows_0_before_anything_happened(observed: dict, engine: str) -> None:
    found = samples(observed["start"], engine)
    assert set(found.values()) == {0.0}
    assert {f"vllm:dcp_kv_failed_transfers_total {reason}" for reason in Reason} <= found.keys()
    assert {f"vllm:dcp_kv_transfers_total {outcome}" for outcome in OUTCOMES} <= found.keys()
    assert {f"vllm:dcp_kv_staging_bytes {rank}" for rank in range(2)} <= found.keys()
    for metric in METRICS:
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
        assert any(key.split()[0] == metric.name + suffix for key in found), metric.name


def test_readings_are_recorded_and_odd_ones_left_out(observed: dict) -> None:
    """vLLM issue 43828: an error while recording ends the loop that logs for all engines."""
    assert set(samples(observed["end"], "0").values()) == {0.0}
    changed = {key: value for key, value in samples(observed["end"], "1").items() if value}
    assert changed == {
        "vllm:dcp_kv_bytes_sent_total": 11,
        "vllm:dcp_kv_failed_transfers_total deadline": 2,
        "vllm:dcp_kv_staging_bytes 1": 64,
        "vllm:dcp_kv_write_seconds_count": 2,
        "vllm:dcp_kv_write_seconds_sum": 0.5,
        "vllm:dcp_kv_receive_seconds_count": 1,
        "vllm:dcp_kv_receive_seconds_sum": 1.5,
        "vllm:dcp_kv_tokens_recomputed_total params_missing": 30,
    }


def test_the_log_line_of_an_interval_holds_what_was_counted_and_the_next_one_is_not_there(observed: dict) -> None:
    [line] = observed["log"]
    assert line.startswith("KV Transfer metrics: bytes_sent=")
    assert "failed.deadline=2" in line
    assert "write_seconds.mean=0.25" in line
