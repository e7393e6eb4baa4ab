"""The webhook process over real HTTPS, without a cluster: what a caller sees of it."""

import asyncio
import json
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_operator.catalogue_file import CatalogueFile
from dcp_operator.side_server import SideServer
from dcp_operator.webhook import Webhook
from tests.support.damage import DAMAGE, REVIEW_DAMAGE, WHOLE, damaged
from tests.support.specimens import sizes, specimen
from tests.support.webhook_process import HOST, WebhookProcess, ask, make_certificate, review, webhook_process

REFUSED = specimen(sizes("decode", tensor=8, decodeContext=3))
#: Runs in the webhook's process: what it opens, connects to and starts is written to its log.
AUDIT = """
import sys
def audit(event, arguments):
    if event in ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.listdir", "os.scandir"):
        sys.stderr.write(f"AUDIT {event} {arguments[0]!r}\\n")
sys.addaudithook(audit)
"""


def body(manifest: object, **fields: object) -> bytes:
    asked = review(manifest)
    asked["request"] |= fields
    return json.dumps(asked).encode()


@pytest.fixture(scope="module")
def webhook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebhookProcess]:
    with webhook_process(tmp_path_factory.mktemp("webhook")) as found:
        yield found


def test_it_answers_with_what_the_rules_say(webhook: WebhookProcess):
    assert webhook.post(body(specimen())) == {"uid": "a-uid", "allowed": True}
    response = webhook.post(body(REFUSED))
    assert response["allowed"] is False
    assert response["status"]["code"] == 422
    assert response["status"]["message"].endswith("[dcp-divides-tp]")


def test_warnings_come_with_the_answer(webhook: WebhookProcess):
    unknown = specimen()
    del unknown["spec"]["model"]["geometry"]
    response = webhook.post(body(unknown))
    assert response["allowed"]
    assert "unknown-model" in response["warnings"][0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"[]",
        b'{"request": 3}',
        b'{"request": {"uid": "u"}}',
        b"\xff\xfe",
        b"[" * 1_000_000,
        b'{"kind":"AdmissionReview","request":{"uid":"deep","object":' + b'{"a":' * 200_000,
        body(specimen(), operation="PATCH" * 100_000),
        body({"spec": [[[{}]]]}),
        body("x" * 3_000_000),
    ],
    ids=range(11),
)
def test_whatever_is_sent_is_answered_in_words_and_without_a_traceback(webhook: WebhookProcess, content: bytes):
    response = webhook.post(content)
    assert response["allowed"] or response["status"]["message"].strip()
    assert "Traceback" not in webhook.said
    assert webhook.is_running()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DAMAGE, REVIEW_DAMAGE, st.booleans(), st.booleans())
def test_whatever_is_damaged_is_answered_over_https_too(
    webhook: WebhookProcess, damage: list, review_damage: list, is_update: bool, is_no_review: bool
):
    asked = review(damaged(WHOLE, damage), WHOLE if is_update else None)
    response = webhook.post(json.dumps(damaged(asked, review_damage) if is_no_review else asked).encode())
    assert response["allowed"] or response["status"]["code"] in (400, 422)
    assert "review failed" not in webhook.said


def test_a_review_that_is_nested_too_deeply_is_refused_under_its_own_uid(webhook: WebhookProcess):
    response = webhook.post(b'{"kind":"AdmissionReview","request":{"uid":"deep","object":' + b'{"a":' * 200_000)
    assert response["uid"] == "deep"
    assert "nested too deeply" in response["status"]["message"]


def test_a_review_beyond_all_bounds_is_refused(webhook: WebhookProcess):
    response = webhook.post(body({"a": "x" * 17_000_000}))
    assert response["status"]["code"] == 413


class Watched(Webhook):
    """A webhook that says which reviews are judged in the thread that answers all connections."""

    def __init__(self) -> None:
        super().__init__(CatalogueFile(None))
        self.in_the_loop: list[bool] = []

    def judge(self, content: bytes) -> bytes:
        self.in_the_loop.append(threading.current_thread() is threading.main_thread())
        return super().judge(content)


def test_a_large_review_is_judged_beside_the_thread_that_answers_the_others():
    watched = Watched()

    async def scenario() -> None:
        async with TestClient(TestServer(watched.application())) as client:
            for manifest in (specimen(), specimen({"spec": {f"k{number}": 1 for number in range(20_000)}})):
                answer = await client.post("/validate", data=body(manifest))
                assert (await answer.json())["response"]["uid"] == "a-uid"

    asyncio.run(scenario())
    assert watched.in_the_loop == [True, False]


def test_a_renewed_certificate_is_served_to_new_connections_while_old_ones_go_on(tmp_path: Path):
    with webhook_process(tmp_path) as webhook, closing(webhook.connection()) as before:
        assert ask(before, body(specimen()))["allowed"]
        old = ssl.get_server_certificate((HOST, webhook.port))
        make_certificate(tmp_path)
        changed = threading.Event()
        for _ in range(300):
            if ssl.get_server_certificate((HOST, webhook.port)) != old:
                changed.set()
                break
            assert ask(before, body(specimen()))["allowed"]
            changed.wait(0.05)
        assert changed.is_set(), webhook.said
        assert ask(before, body(specimen()))["allowed"]
        assert webhook.post(body(specimen()))["allowed"]


def test_a_webhook_that_is_to_stop_answers_on_until_callers_have_gone_elsewhere(tmp_path: Path):
    with webhook_process(tmp_path, DCP_WEBHOOK_DRAIN_SECONDS="4") as webhook:
        with closing(webhook.connection()) as connection:
            ask(connection, body(specimen()))
            webhook.order_to_stop()
            while webhook.get("/readyz") == 200:
                pass
            connection.request("POST", "/validate", body(specimen()))
            answer = connection.getresponse()
            assert json.loads(answer.read())["response"]["allowed"]
            assert answer.getheader("Connection") == "close"
            assert webhook.get("/readyz") == 503
            assert webhook.get("/healthz") == 200
        assert webhook.wait() == 0
        assert "Traceback" not in webhook.said


def test_a_request_opens_no_file_and_no_connection(tmp_path: Path):
    models = tmp_path / "models.yaml"
    models.write_text("models: []")
    with webhook_process(tmp_path, code=AUDIT, DCP_CATALOGUE_FILE=str(models)) as webhook:
        assert "AUDIT open" in webhook.said
        watched = (str(tmp_path / "tls."), str(models))
        before = len(webhook.said.splitlines())
        known = {"model": {"geometry": None, "uri": "hf://Qwen/Qwen3-32B"}, "image": "x/vllm:v0.33.1"}
        odd = {"prefill": {"extraArgs": ["--x", "-tp=2"]}}
        manifests = (specimen(), REFUSED, specimen({"spec": known}), specimen({"spec": odd}))
        with closing(webhook.connection()) as connection:
            for manifest in manifests:
                for _ in range(5):
                    ask(connection, body(manifest))
                    ask(connection, json.dumps(review(manifest, specimen())).encode())
        said = webhook.said.splitlines()[before:]
        # The certificate and the catalogue are looked at beside the requests, on a clock of their own.
        assert [line for line in said if "AUDIT" in line and not any(path in line for path in watched)] == []


def test_a_model_that_the_file_adds_is_known_without_a_restart(tmp_path: Path):
    models = tmp_path / "models.yaml"
    models.write_text("models: [")
    with webhook_process(tmp_path, DCP_CATALOGUE_FILE=str(models)) as webhook:
        assert "is no YAML" in webhook.said
        manifest = specimen()
        manifest["spec"]["model"] = {"uri": "hf://acme/big"}
        assert "unknown-model" in webhook.post(body(manifest))["warnings"][0]
        models.write_text(
            "models:\n- {names: [acme/big], attention: gqa, attentionHeads: 32, kvHeads: 4, layers: 32, headSize: 64}\n"
        )
        known = threading.Event()
        for _ in range(300):
            if not webhook.post(body(manifest)).get("warnings"):
                known.set()
                break
            known.wait(0.05)
        assert known.is_set(), webhook.said


def test_refusals_are_counted_by_their_rules_on_a_port_of_their_own(tmp_path: Path):
    server = SideServer(0, {}, host=HOST)
    port = server.port
    server.close()
    two = specimen(sizes("decode", tensor=8, decodeContext=3), {"spec": {"decode": {"extraArgs": ["--port=1"]}}})
    with webhook_process(tmp_path, DCP_METRICS_PORT=str(port)) as webhook:
        for content in (body(specimen()), body(REFUSED), body(two), b"garbage"):
            webhook.post(content)
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        assert 'dcp_webhook_reviews_total{outcome="allowed"} 1.0' in page
        assert 'dcp_webhook_reviews_total{outcome="refused"} 2.0' in page
        assert 'dcp_webhook_reviews_total{outcome="failed"} 1.0' in page
        assert 'dcp_webhook_denials_total{rule="dcp-divides-tp"} 2.0' in page
        assert 'dcp_webhook_denials_total{rule="connector-args"} 1.0' in page
        assert "dcp_webhook_review_seconds_count 4.0" in page


def test_every_line_of_its_log_is_a_json_object_with_a_constant_message_if_so_wanted(tmp_path: Path):
    with webhook_process(tmp_path, DCP_LOG_FORMAT="json") as webhook:
        webhook.post(b"garbage")
        lines = [json.loads(line) for line in webhook.said.splitlines()]
    assert {"message": "request not judged", "level": "warning"}.items() <= lines[-1].items()
    assert "it is no JSON" in lines[-1]["error"]
    assert {"message": "answering admission reviews", "port": webhook.port}.items() <= lines[-2].items()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"DCP_WEBHOOK_PORT": "x"}, "DCP_WEBHOOK_PORT: found 'x', must be a port number from 1 to 65535"),
        ({"DCP_WEBHOOK_DRAIN_SECONDS": "-1"}, "DCP_WEBHOOK_DRAIN_SECONDS: found '-1', must be a number of seconds"),
    ],
)
def test_a_setting_that_makes_no_sense_ends_it_with_a_sentence(tmp_path: Path, environment: dict[str, str], said: str):
    with pytest.raises(AssertionError, match=said), webhook_process(tmp_path, **environment):
        pass
