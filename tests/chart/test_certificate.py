"""The webhook's serving certificate, as a TLS client sees it."""

import base64
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.helm import Manifest, only, render

HOST = "rel-dcp-disagg-webhook.home.svc"
DAY_S = 86400


def handshake(manifests: list[Manifest], folder: Path, host: str) -> dict[str, Any]:
    """Connect as the API server does: trust the configuration's caBundle alone and ask for the Service's name."""
    secret = only(manifests, "Secret")["data"]
    bundle = only(manifests, "ValidatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["caBundle"]
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(base64.b64decode(secret[name]))
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.load_verify_locations(cadata=base64.b64decode(bundle).decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    seen = client.getpeercert()
    assert seen
    return seen


def test_the_api_server_can_trust_the_webhook(tmp_path: Path) -> None:
    seen = handshake(render(), tmp_path, HOST)
    names = {name for _, name in seen["subjectAltName"]}
    assert names == {HOST, f"{HOST}.cluster.local"}
    days_left = (ssl.cert_time_to_seconds(seen["notAfter"]) - time.time()) / DAY_S
    assert 364 < days_left <= 365


def test_another_name_is_not_trusted(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(render(), tmp_path, "rel-dcp-disagg-webhook.other.svc")


def test_the_longest_names_still_make_a_certificate(tmp_path: Path) -> None:
    manifests = render(release="r" * 53, namespace="n" * 63)
    service = only(manifests, "Service")["metadata"]
    handshake(manifests, tmp_path, f"{service['name']}.{service['namespace']}.svc")


def test_the_secret_says_when_certificate_and_authority_end(tmp_path: Path) -> None:
    manifests = render({"webhook": {"certificate": {"validityDays": 30, "renewBeforeDays": 10}}})
    notes = only(manifests, "Secret")["metadata"]["annotations"]
    seen = handshake(manifests, tmp_path, HOST)
    assert abs(int(notes["dcpdisagg.io/not-after"]) - ssl.cert_time_to_seconds(seen["notAfter"])) < 60
    assert abs(int(notes["dcpdisagg.io/authority-not-after"]) - time.time() - 3650 * DAY_S) < 120
    assert notes["dcpdisagg.io/host"] == HOST


def test_the_authoritys_key_stays_out_of_the_pods() -> None:
    manifests = render()
    assert "ca.key" in only(manifests, "Secret")["data"]
    volumes = only(manifests, "Deployment", "-webhook")["spec"]["template"]["spec"]["volumes"]
    [secret] = [volume["secret"] for volume in volumes if "secret" in volume]
    assert [item["key"] for item in secret["items"]] == ["tls.crt", "tls.key"]


def test_a_users_certificate_replaces_the_charts() -> None:
    authority = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"
    manifests = render({"webhook": {"certificate": {"existingSecret": "mine", "caBundle": authority}}})
    assert not [m for m in manifests if m["kind"] == "Secret"]
    [webhook] = only(manifests, "ValidatingWebhookConfiguration")["webhooks"]
    assert base64.b64decode(webhook["clientConfig"]["caBundle"]).decode() == authority


def test_an_injector_may_fill_in_the_authority() -> None:
    values = {
        "webhook": {
            "certificate": {"existingSecret": "mine"},
            "annotations": {"cert-manager.io/inject-ca-from": "home/mine"},
        }
    }
    configuration = only(render(values), "ValidatingWebhookConfiguration")
    assert configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == "home/mine"
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]
