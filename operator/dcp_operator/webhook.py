"""The webhook process: answers admission reviews over HTTPS, without state and without looking into the cluster.

kopf decodes the review and calls the handler; the server is our own, because kopf's takes no request above 1 MiB, has
no readiness endpoint, and closes its socket to load a renewed certificate.
"""

import asyncio
import hashlib
import json
import logging
import os
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import kopf
from aiohttp import web

from dcp_operator.admission import review
from dcp_operator.client import Api, ApiError
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES
from dcp_operator.process import SettingError, configure_logging, new_registry, quiet_kopf, read_port, wait_for_api

log = logging.getLogger(__name__)

#: Path of the reviews, and the id of kopf's handler.
HANDLER: Final = "validate"
_DEFAULT_PORT: Final = 9443
_DEFAULT_CERT_DIR: Final = "/etc/dcp-webhook/tls"
#: A review holds the object twice at an update, and etcd takes objects of 1.5 MiB.
_MAX_REQUEST_BYTES: Final = 16 * 1024 * 1024
_FAILED: Final = "the dcp-disagg webhook failed while it judged this object, so it refuses it; its log has the cause"
_CERT_POLL_S: Final = 5.0
_MISSING_CERT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Environment:
    """What the webhook reads from its environment."""

    cert_dir: Path
    port: int


def read_environment(environment: Mapping[str, str]) -> Environment:
    """Return the webhook's settings. Raises SettingError."""
    return Environment(
        cert_dir=Path(environment.get("DCP_WEBHOOK_CERT_DIR", "").strip() or _DEFAULT_CERT_DIR),
        port=read_port(environment, "DCP_WEBHOOK_PORT", _DEFAULT_PORT),
    )


class Certificate:
    """The serving certificate of a folder (tls.crt, tls.key), loaded again when the files change."""

    def __init__(self, folder: Path) -> None:
        self._cert, self._key = folder / "tls.crt", folder / "tls.key"
        self._loaded = ""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    @property
    def is_loaded(self) -> bool:
        """Whether a certificate has been loaded."""
        return bool(self._loaded)

    def refresh(self) -> bool:
        """Load the files if they are not what was loaded last; return whether they were loaded.

        The context stays the same: connections that exist go on, new ones get the new certificate. Raises OSError
        (ssl.SSLError among them) where the files are missing or don't belong together.
        """
        digest = hashlib.sha256(self._cert.read_bytes() + b"\0" + self._key.read_bytes()).hexdigest()
        if digest == self._loaded:
            return False
        # On a context of its own first: files that don't belong together would leave the one in use without a key.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self._cert, self._key)
        self.context.load_cert_chain(self._cert, self._key)
        self._loaded = digest
        return True

    async def keep_fresh(self) -> None:
        """Look at the files every few seconds. A Secret's mount sends no events, so there is nothing to wait for."""
        said = ""
        while True:
            try:
                if self.refresh():
                    log.info("certificate loaded file=%s", self._cert)
                said = ""
            except OSError as error:
                why = f"certificate not usable file={self._cert} error={error}"
                if why != said:
                    log.warning(why)
                    said = why
            await asyncio.sleep(_CERT_POLL_S if self.is_loaded else _MISSING_CERT_S)


class AdmissionServer:
    """An admission server for kopf: called with the function that answers a review, it serves until it is cancelled."""

    def __init__(self, certificate: Certificate, port: int) -> None:
        self._certificate = certificate
        self._port = port

    async def __call__(self, answer: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve; yields once, as kopf's protocol asks. The webhook configuration is the chart's, not kopf's."""
        refreshing = asyncio.create_task(self._certificate.keep_fresh())
        while not self._certificate.is_loaded:
            await asyncio.sleep(0.1)
        runner = web.AppRunner(self.application(answer), handle_signals=False, access_log=None, shutdown_timeout=5.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=self._port, ssl_context=self._certificate.context).start()
            log.info("answering admission reviews port=%d", self._port)
            yield kopf.WebhookClientConfig()
            await refreshing
        finally:
            refreshing.cancel()
            await runner.cleanup()

    def application(self, answer: kopf.WebhookFn) -> web.Application:
        """Return the routes: reviews and the two probes."""

        async def validate(request: web.Request) -> web.Response:
            return await _answer_review(request, answer)

        async def ready(_: web.Request) -> web.Response:
            return await _answer_ready(answer)

        async def alive(_: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        application = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        application.add_routes(
            [web.post(f"/{HANDLER}", validate), web.get("/readyz", ready), web.get("/healthz", alive)]
        )
        return application


def build_registry(server: AdmissionServer) -> kopf.OperatorRegistry:
    """Return kopf's registry with the webhook's handler. No other is in it, so kopf watches nothing."""
    registry = new_registry()
    kind = DEPLOYMENT_OF_ENGINES

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:  # pyright: ignore[reportUnusedFunction] - registered
        quiet_kopf(settings)
        settings.admission.server = server
        # A refusal is an answer, not an error of ours; what fails in here is logged where it is caught.
        logging.getLogger("kopf.objects").setLevel(logging.CRITICAL)

    # Deletes are not asked about: kopf answers them with a yes.
    @kopf.on.validate(
        kind.group, kind.version, kind.plural, registry=registry, id=HANDLER, operations=["CREATE", "UPDATE"]
    )
    async def validate(  # pyright: ignore[reportUnusedFunction] - registered
        new: kopf.Body | None, old: kopf.Body | None, warnings: list[str], **_: Any
    ) -> None:
        try:
            verdict = review(dict(new) if new else {}, dict(old) if old else None)
        except Exception:
            log.exception("review failed")
            raise kopf.AdmissionError(_FAILED, code=500) from None
        warnings.extend(verdict.warnings)
        if verdict.refusal is not None:
            raise kopf.AdmissionError(verdict.refusal, code=422)

    return registry


def main() -> int:
    """Run the webhook until it is told to stop; return the exit status."""
    configure_logging()
    try:
        environment = read_environment(os.environ)
        wait_for_api(Api(connections=1))
        kopf.run(
            registry=build_registry(AdmissionServer(Certificate(environment.cert_dir), environment.port)),
            standalone=True,
            clusterwide=True,
        )
    except (SettingError, ApiError) as error:
        sys.stderr.write(f"dcp-operator webhook: {error}\n")
        return 1
    except Exception:
        log.exception("stopped by an error")
        return 1
    return 0


async def _answer_review(request: web.Request, answer: kopf.WebhookFn) -> web.Response:
    """Answer one review. Whatever happens, the answer is a review with words in it: a user will read it."""
    uid = ""
    try:
        body: Any = json.loads(await request.text())
        uid = str(cast("dict[str, Any]", body)["request"]["uid"])
        return web.json_response(await answer(body, webhook=HANDLER, headers=dict(request.headers)))  # pyright: ignore[reportArgumentType] - kopf's NewType
    except (ValueError, KeyError, TypeError) as error:
        log.warning("request is no admission review error=%r", error)
        return web.json_response(
            _refusal(uid, "the request is not an AdmissionReview that this webhook understands", 400)
        )
    except web.HTTPRequestEntityTooLarge:
        return web.json_response(_refusal(uid, f"the object is larger than {_MAX_REQUEST_BYTES // 2} bytes", 413))
    except Exception as error:
        if type(error).__module__.startswith("kopf."):
            # kopf's own refusals: a kind that it does not know, a review that lacks a part.
            log.warning("request is no admission review error=%r", error)
            return web.json_response(_refusal(uid, f"this webhook cannot judge the request: {error}", 400))
        log.exception("review failed uid=%s", uid)
        return web.json_response(_refusal(uid, _FAILED, 500))


async def _answer_ready(answer: kopf.WebhookFn) -> web.Response:
    """Answer the readiness probe by a review of our own: it fails while kopf does not know our kind."""
    kind = DEPLOYMENT_OF_ENGINES
    probe: dict[str, Any] = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "readiness-probe",
            "operation": "DELETE",
            "resource": {"group": kind.group, "version": kind.version, "resource": kind.plural},
            "userInfo": {},
            "oldObject": {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": "probe"}},
        },
    }
    try:
        await answer(cast("Any", probe), webhook=cast("Any", HANDLER))
    except Exception as error:
        log.exception("not ready")
        return web.Response(status=503, text=f"cannot answer admission reviews: {error}\n")
    return web.Response(text="ok\n")


def _refusal(uid: str, message: str, code: int) -> dict[str, Any]:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": uid, "allowed": False, "status": {"message": message, "code": code}},
    }
