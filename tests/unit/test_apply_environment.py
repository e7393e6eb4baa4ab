"""What the two processes read from their environment, and what they say when it makes no sense."""

import itertools
import logging
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import kopf
import pytest

from dcp_operator import controller, webhook
from dcp_operator.environment import SettingError, is_worth_a_line
from dcp_operator.process import keep_watching

IMAGE = {"DCP_OPERATOR_IMAGE": "acme/operator:1"}


def test_the_controller_needs_its_own_image_and_nothing_else():
    read = controller.read_environment(IMAGE)
    assert (read.operator.image, read.operator.pull_policy) == ("acme/operator:1", "IfNotPresent")
    assert read.namespaces == ()
    assert read.health_port == 8080


def test_the_controller_knows_its_namespace_where_it_has_one():
    assert controller.read_environment(IMAGE).operator.namespace is None
    assert controller.read_environment({**IMAGE, "POD_NAMESPACE": "dcp-system"}).operator.namespace == "dcp-system"


def test_namespaces_are_a_list_with_commas():
    assert controller.read_environment({**IMAGE, "DCP_WATCH_NAMESPACES": " b, a ,,a"}).namespaces == ("a", "b")


def test_the_webhook_has_defaults_for_everything():
    read = webhook.read_environment({})
    assert (read.cert_dir, read.port) == (Path("/etc/dcp-webhook/tls"), 9443)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "DCP_OPERATOR_IMAGE: is not set"),
        ({**IMAGE, "DCP_OPERATOR_IMAGE_PULL_POLICY": "Sometimes"}, "DCP_OPERATOR_IMAGE_PULL_POLICY: found 'Sometimes'"),
        ({**IMAGE, "DCP_HEALTH_PORT": "http"}, "DCP_HEALTH_PORT: found 'http', must be a port number"),
        ({**IMAGE, "DCP_HEALTH_PORT": "70000"}, "DCP_HEALTH_PORT: found '70000', must be a port number"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(environment: dict[str, str], message: str):
    with pytest.raises(SettingError) as refusal:
        controller.read_environment(environment)
    assert str(refusal.value).startswith(message)


def test_a_watch_that_is_refused_is_tried_again_for_ever_and_said_by_the_reconciler_alone():
    settings = kopf.OperatorSettings()
    keep_watching(settings)
    assert isinstance(settings.networking.error_backoffs, Iterable)
    pauses = list(itertools.islice(settings.networking.error_backoffs, 1000))
    assert (pauses[0], pauses[-1]) == (1.0, 60.0)
    assert list(itertools.islice(settings.networking.error_backoffs, 1000)) == pauses

    def line(name: str, error: str) -> logging.LogRecord:
        words = f"Request attempt #3 failed; will retry: GET https://api -> {error}('Forbidden')"
        return logging.LogRecord(name, logging.ERROR, "", 0, words, None, None)

    assert not is_worth_a_line(line("kopf._cogs.clients.watching", "APIForbiddenError"))
    assert is_worth_a_line(line("kopf._cogs.clients.watching", "APIServerError"))
    assert is_worth_a_line(line("dcp_operator.reconciler", "APIForbiddenError"))


def test_a_fresh_key_is_new_each_time_and_long_enough():
    import base64

    first, second = controller.fresh_key(), controller.fresh_key()
    assert first != second
    assert len(bytes.fromhex(base64.b64decode(first).decode())) == 32


def test_the_webhook_runs_without_kopf_and_without_a_client_of_the_cluster():
    code = "import sys, dcp_operator.webhook; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"kopf", "kubernetes", "urllib3"} & set(loaded) == set()
