"""How the chart has the operator log and show its metrics, and who reads them."""

from typing import Any

import pytest

from tests.support.helm import Manifest, only, refusal, render

POD_MONITOR = "monitoring.coreos.com/v1/PodMonitor"
ASKED = {"metrics": {"podMonitor": {"enabled": True, "interval": "10s", "labels": {"release": "prometheus"}}}}


def containers(manifests: list[Manifest]) -> list[dict[str, Any]]:
    found = [m["spec"]["template"]["spec"]["containers"][0] for m in manifests if m["kind"] == "Deployment"]
    assert len(found) == 2
    return found


def monitors(manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == "PodMonitor"]


def test_both_processes_show_metrics_on_a_port_of_their_own() -> None:
    for container in containers(render()):
        [port] = [port["containerPort"] for port in container["ports"] if port["name"] == "metrics"]
        assert {"name": "DCP_METRICS_PORT", "value": str(port)} in container["env"]
        assert len({port["containerPort"] for port in container["ports"]}) == 2


def test_metrics_that_are_turned_off_have_no_port() -> None:
    for container in containers(render({"metrics": {"enabled": False}})):
        assert [port["name"] for port in container["ports"] if port["name"] == "metrics"] == []
        assert "DCP_METRICS_PORT" not in [entry["name"] for entry in container["env"]]


def test_a_pod_monitor_is_made_where_it_is_asked_for_and_its_kind_is_known() -> None:
    manifests = render(ASKED, kinds=[POD_MONITOR])
    monitor = only(manifests, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == ("metrics", "10s")
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    for deployment in (m for m in manifests if m["kind"] == "Deployment"):
        assert selected <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("values", "kinds"),
    [({}, [POD_MONITOR]), (ASKED, []), ({"metrics": {"podMonitor": {"enabled": False}}}, [POD_MONITOR])],
    ids=["not asked for", "kind unknown", "turned off"],
)
def test_no_pod_monitor_is_made_otherwise(values: dict[str, Any], kinds: list[str]) -> None:
    assert monitors(render(values, kinds=kinds)) == []


def test_a_pod_monitor_without_metrics_is_refused() -> None:
    said = refusal({"metrics": {"enabled": False, "podMonitor": {"enabled": True}}})
    assert "metrics.podMonitor.enabled: needs metrics.enabled true" in said


def test_lines_of_the_log_are_json_unless_text_is_asked_for() -> None:
    for values, form in (({}, "json"), ({"logs": {"format": "text"}}, "text")):
        for container in containers(render(values)):
            assert {"name": "DCP_LOG_FORMAT", "value": form} in container["env"]


def test_the_probes_of_the_controller_ask_the_port_that_answers_beside_the_loop() -> None:
    container = only(render(), "Deployment", "-controller")["spec"]["template"]["spec"]["containers"][0]
    paths = [container[probe]["httpGet"] for probe in ("readinessProbe", "livenessProbe")]
    assert paths == [{"path": "/readyz", "port": "health"}, {"path": "/healthz", "port": "health"}]
