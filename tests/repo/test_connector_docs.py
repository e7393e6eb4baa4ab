"""The pages about the connector: their commands are what the code takes, and their numbers are the code's."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dcp_connector.config import ConnectorConfig, kv_transfer_config
from dcp_connector.errors import Reason
from dcp_connector.geometry import SideLayout
from dcp_connector.health import RANK_TIMEOUT_S
from dcp_connector.mapping import check_pair
from dcp_connector.paths import CHUNK_BYTES, DIRECT_MIN_FRAGMENT_BYTES, PACK_MIN_FRAGMENT_BYTES
from dcp_connector.stats import METRICS
from dcp_connector.units import KIB, MIB
from dcp_operator.cli import main
from tests.support.markdown import ROOT
from tests.support.plain_engines import HOW_TO, served_engines

EXPLANATION = ROOT / "docs/explanation/connector.md"
PAGES = [EXPLANATION, HOW_TO]


def test_both_engines_of_the_how_to_get_the_transfer_configuration_that_the_operator_would_render() -> None:
    prefill, decode = served_engines()
    for engine, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        given = json.loads(engine["--kv-transfer-config"])
        config = ConnectorConfig.model_validate(given["kv_connector_extra_config"])
        assert given == kv_transfer_config(role, config, load_failure_policy="recompute")  # type: ignore[arg-type]
        assert int(engine["--port"]) == config.api_port


def test_the_two_engines_of_the_how_to_fit() -> None:
    sides: list[SideLayout] = []
    for engine in served_engines():
        sides.append(
            SideLayout(
                tensor_parallel_size=int(engine["--tensor-parallel-size"]),
                dcp_size=int(engine.get("--decode-context-parallel-size", "1")),
                interleave=int(engine.get("--cp-kv-cache-interleave-size", "1")),
                block_size=int(engine["--block-size"]),
                num_kv_heads=1,
            )
        )
    check_pair(*sides)
    assert [side.dcp_size for side in sides] == [1, 4]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_kv_plan_commands_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    joined = page.read_text().replace("\\\n", " ")
    commands = re.findall(r"^dcpctl (kv-plan .*)$", joined, re.MULTILINE)
    assert commands
    for command in commands:
        assert main(shlex.split(command)) == 0
        assert "What would be faster" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_reasons_and_options_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    names = {f"{metric.name}_total" if metric.kind == "counter" else metric.name for metric in METRICS}
    assert set(re.findall(r"`(vllm:dcp_kv_\w+)`", text)) <= names
    known = {reason.value for reason in Reason} | set(ConnectorConfig.model_fields)
    known |= {metric.key for metric in METRICS}
    vllm = {
        "kv_load_failure_policy",
        "kv_transfer_params",
        "kv_connector_extra_config",
        "do_remote_decode",
        "get_finished",
    }
    words = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text))
    assert words - vllm <= known, words - vllm - known


def test_every_way_to_fail_that_is_not_a_fault_of_the_asker_is_explained() -> None:
    text = EXPLANATION.read_text()
    for reason in (Reason.RELEASED, Reason.LEASE_EXPIRED, Reason.PREFILL_ABORTED, Reason.PEER_LOST, Reason.DEADLINE,
                   Reason.STALE_ENGINE_ID, Reason.TRANSFER_ERROR, Reason.REUSED_TRANSFER_ID, Reason.OTHER_PROMPT,
                   Reason.PARAMS_MISSING):  # fmt: skip
        assert f"`{reason.value}`" in text, reason


def test_the_table_of_paths_has_the_numbers_of_the_code() -> None:
    rows = {row.split("|")[1].strip(): row for row in EXPLANATION.read_text().splitlines() if row.startswith("| ")}
    for path, limits, unit, name in (
        ("direct", DIRECT_MIN_FRAGMENT_BYTES, KIB, "KiB"),
        ("pack", PACK_MIN_FRAGMENT_BYTES, KIB, "KiB"),
        ("scatter", CHUNK_BYTES, MIB, "MiB"),
    ):
        for transport in ("tcp", "rdma"):
            words = f"{limits[transport] // unit} {name} over {transport.upper()}"  # type: ignore[index]
            assert words in rows[path], words


def test_the_probe_timeout_is_above_the_time_that_a_rank_is_given() -> None:
    assert f"within {RANK_TIMEOUT_S:.0f} s" in EXPLANATION.read_text()


def test_pictures_are_there_and_describe_themselves() -> None:
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+\.svg)\)", EXPLANATION.read_text())
    assert len(pictures) == 3
    for words, file in pictures:
        root = ET.parse(EXPLANATION.parent / file).getroot()
        space = "{http://www.w3.org/2000/svg}"
        assert root.tag == f"{space}svg"
        assert root.findtext(f"{space}title")
        assert root.findtext(f"{space}desc")
        assert len(words) > 20
