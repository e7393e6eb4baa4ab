"""What the two processes of the operator have in common: environment, logging, kopf's settings, waiting for the CRD."""

import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Final

import kopf

from dcp_operator.client import Api, ApiError
from dcp_operator.kinds import DEPLOYMENT_OF_ENGINES

log = logging.getLogger(__name__)

_POLL_S: Final = 5.0
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"


class SettingError(ValueError):
    """An environment variable that is missing or makes no sense; the message names it and what it should be."""


def read_port(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return the port in an environment variable. Raises SettingError."""
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise SettingError(f"{name}: found {text!r}, must be a port number from 1 to 65535")
    return int(text)


def configure_logging() -> None:
    """Log to standard error, one line an entry. Expected errors are lines; only defects bring a traceback."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(is_worth_a_line)
    handler.addFilter(_without_expected_tracebacks)
    logging.basicConfig(level=os.environ.get("DCP_LOG_LEVEL", "INFO").upper(), handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def quiet_kopf(settings: kopf.OperatorSettings) -> None:
    """Have kopf do no more than it is asked: no events, no peering, no watching of namespaces and CRDs."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.connect_timeout = 5
    settings.process.ultimate_exiting_timeout = 30


def keep_watching(settings: kopf.OperatorSettings) -> None:
    """Have kopf try a watch again for as long as it takes: after its own few retries it gives a watch up for good."""
    settings.networking.error_backoffs = _Pauses()


class _Pauses:
    """Seconds between retries, without an end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 2.0, 4.0, 8.0, 16.0, 32.0), itertools.repeat(60.0))


def new_registry() -> kopf.OperatorRegistry:
    """Return a registry of handlers that logs in as `dcp_operator.client` does: kopf's own has more handlers in it."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry, id="client")(kopf.login_via_client)
    return registry


def wait_for_api(api: Api) -> None:
    """Return when the API server answers and knows our kind; say what is waited for while it does not."""
    said = ""
    while True:
        try:
            if api.serves(DEPLOYMENT_OF_ENGINES):
                return
            why = f"the CustomResourceDefinition {DEPLOYMENT_OF_ENGINES.plural} is not installed; waiting for it"
        except ApiError as error:
            why = f"waiting for the API server: {error.message}"
        if why != said:
            log.warning(why)
            said = why
        time.sleep(_POLL_S)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a log record is not one of kopf's many about a watch that the permissions forbid.

    The reconciler says it, once for a namespace, from its own lists.
    """
    if not record.name.startswith("kopf."):
        return True
    message = record.getMessage()
    return not ("will retry" in message and "APIForbiddenError" in message)


def _without_expected_tracebacks(record: logging.LogRecord) -> bool:
    """Cut tracebacks of errors that the network or the API server's permissions cause: their message says all."""
    error = record.exc_info[1] if record.exc_info else None
    module = type(error).__module__
    if error is not None and (isinstance(error, OSError) or module.startswith(("kopf._cogs.clients", "aiohttp"))):
        record.msg = f"{record.getMessage()} ({type(error).__name__}: {error})"
        record.args = None
        record.exc_info = None
        record.exc_text = None
    return True
