"""The webhook process: answers admission reviews over HTTPS, from the object alone.

It asks no API server and reads no file for a request: what it needs (flag tables, model catalogue, certificate) is read
before it is ready, and again beside the requests when a mounted file changes. kopf's admission server is not used: it
takes no request above 1 MiB, compares objects by recursion, and closes its socket to load a renewed certificate.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from dcp_operator import catalogue_file, metrics
from dcp_operator.admission_review import answer, refusal, uid_in, warm_up
from dcp_operator.catalogue_file import CatalogueFile
from dcp_operator.certificate import Certificate
from dcp_operator.environment import SettingError, configure_logging, read_metrics_port, read_port
from dcp_operator.side_server import Answer, SideServer

log = logging.getLogger(__name__)

#: Path of the reviews.
PATH: Final = "/validate"
_DEFAULT_PORT: Final = 9443
_DEFAULT_CERT_DIR: Final = "/etc/dcp-webhook/tls"
_DEFAULT_DRAIN_S: Final = 8
#: A review holds the object twice at an update, and etcd takes objects of 1.5 MiB.
_MAX_REQUEST_BYTES: Final = 16 * 1024 * 1024
#: From this size on a review is judged beside the others, so that these don't wait for it.
_LARGE_BYTES: Final = 128 * 1024
_FAILED: Final = "the dcp-disagg webhook failed while it judged this object, so it refuses it; its log has the cause"


@dataclass(frozen=True, slots=True)
class Environment:
    """What the webhook reads from its environment."""

    cert_dir: Path
    port: int
    #: Seconds between the order to stop and the end, in which requests are still answered.
    drain_s: int
    #: None: metrics are not shown.
    metrics_port: int | None = None


def read_environment(environment: Mapping[str, str]) -> Environment:
    """Return the webhook's settings. Raises SettingError."""
    drain = environment.get("DCP_WEBHOOK_DRAIN_SECONDS", "").strip() or str(_DEFAULT_DRAIN_S)
    if not drain.isdecimal() or int(drain) > 600:
        raise SettingError(f"DCP_WEBHOOK_DRAIN_SECONDS: found {drain!r}, must be a number of seconds from 0 to 600")
    return Environment(
        cert_dir=Path(environment.get("DCP_WEBHOOK_CERT_DIR", "").strip() or _DEFAULT_CERT_DIR),
        port=read_port(environment, "DCP_WEBHOOK_PORT", _DEFAULT_PORT),
        drain_s=int(drain),
        metrics_port=read_metrics_port(environment),
    )


class Webhook:
    """The server. `judge` is all that happens for a review; the rest is HTTP."""

    def __init__(self, models: CatalogueFile) -> None:
        self._models = models
        self._draining = False
        # One thread: large reviews are rare, and several at once would take the processor from all others.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="large")

    def judge(self, content: bytes) -> bytes:
        """Return the answer to one review. Whatever happens, it is a review with words in it: a user will read it."""
        with metrics.REVIEW_SECONDS.time():
            try:
                answered = answer(content, self._models.catalogue)
            except Exception:
                log.exception("review failed uid=%s", uid_in(content))
                answered = refusal(uid_in(content), _FAILED, 500)
        status: dict[str, Any] = answered["response"].get("status", {})
        metrics.review_answered(answered["response"]["allowed"], status.get("code"), status.get("message", ""))
        if status.get("code") == 400:
            log.warning("request not judged error=%s", status["message"])
        return json.dumps(answered).encode()

    def application(self) -> web.Application:
        """Return the routes: reviews and the two probes."""
        application = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        application.add_routes(
            [web.post(PATH, self._validate), web.get("/readyz", self._ready), web.get("/healthz", _alive)]
        )
        application.on_response_prepare.append(self._close_when_draining)
        return application

    async def drain(self, seconds: float) -> None:
        """Answer for some time yet, and have callers look for another pod.

        The API server keeps connections to a pod after its address is gone from the Service, and does not repeat a
        review whose connection breaks: it refuses the object. So nothing is cut while requests can still come.
        """
        self._draining = True
        log.info("stopping, requests are answered for some time yet seconds=%g", seconds)
        await asyncio.sleep(seconds)

    async def _validate(self, request: web.Request) -> web.Response:
        try:
            content = await request.read()
        except web.HTTPRequestEntityTooLarge:
            said = refusal("", f"the review is larger than {_MAX_REQUEST_BYTES} bytes", 413)
            return web.json_response(said)
        if len(content) < _LARGE_BYTES:
            answered = self.judge(content)
        else:
            answered = await asyncio.get_running_loop().run_in_executor(self._aside, self.judge, content)
        return web.Response(body=answered, content_type="application/json")

    async def _ready(self, _: web.Request) -> web.Response:
        if self._draining:
            return web.Response(status=503, text="stopping\n")
        return web.Response(text="ok\n")

    async def _close_when_draining(self, _: web.Request, response: web.StreamResponse) -> None:
        if self._draining:
            response.headers["Connection"] = "close"
            response.force_close()


async def _alive(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def serve(environment: Environment, models: CatalogueFile, stop: asyncio.Event) -> None:
    """Serve from the moment there is a certificate until `stop` is set, and then for as long as draining takes."""
    certificate = Certificate(environment.cert_dir)
    webhook = Webhook(models)
    stopped = asyncio.create_task(stop.wait())
    beside = [asyncio.create_task(certificate.keep_fresh()), asyncio.create_task(models.keep_fresh())]
    runner = web.AppRunner(webhook.application(), handle_signals=False, access_log=None, shutdown_timeout=5.0)
    try:
        while not certificate.is_loaded and not stopped.done():
            await asyncio.sleep(0.1)
        if stopped.done():
            return
        await runner.setup()
        await web.TCPSite(runner, port=environment.port, ssl_context=certificate.context, backlog=1024).start()
        log.info("answering admission reviews port=%d", environment.port)
        ended, _ = await asyncio.wait([stopped, *beside], return_when=asyncio.FIRST_COMPLETED)
        for task in ended - {stopped}:
            # Neither ends by itself: without them the webhook would serve an old certificate or catalogue for ever.
            task.result()
        await webhook.drain(environment.drain_s)
    finally:
        for task in (stopped, *beside):
            task.cancel()
        await runner.cleanup()


async def _run(environment: Environment, models: CatalogueFile) -> None:
    stop = asyncio.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(ending, stop.set)
    await serve(environment, models, stop)


def main() -> int:
    """Run the webhook until it is told to stop; return the exit status."""
    try:
        configure_logging(os.environ)
        environment = read_environment(os.environ)
        models = catalogue_file.from_environment(os.environ.get(catalogue_file.VARIABLE, ""))
        if environment.metrics_port is not None:
            page = Answer(200, b"", metrics.CONTENT_TYPE)
            SideServer(
                environment.metrics_port, {"/metrics": lambda: page._replace(content=metrics.page(metrics.WEBHOOK))}
            )
        warm_up()
        # Nothing that exists now is ever garbage: collections in a request need not look at it.
        gc.collect()
        gc.freeze()
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_run(environment, models))
    except (SettingError, OSError) as error:
        sys.stderr.write(f"dcp-operator webhook: {error}\n")
        return 1
    except Exception:
        log.exception("stopped by an error")
        return 1
    return 0
