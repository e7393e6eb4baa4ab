"""What every process of the operator reads and says: settings from the environment, and lines of a log."""

import logging
import sys
from collections.abc import Mapping
from typing import Final

from dcp_operator.logs import FORMATS, JsonFormatter, TextFormatter

_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")


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


def read_metrics_port(environment: Mapping[str, str]) -> int | None:
    """Return the port that metrics are shown on, None where they aren't. Raises SettingError."""
    return read_port(environment, "DCP_METRICS_PORT", 0) or None


def configure_logging(environment: Mapping[str, str]) -> None:
    """Log to standard error, one line an entry. Expected errors are lines; only defects bring a traceback.

    Raises SettingError.
    """
    form = environment.get("DCP_LOG_FORMAT", "").strip().lower() or "text"
    if form not in FORMATS:
        raise SettingError(f"DCP_LOG_FORMAT: found {form!r}, must be {' or '.join(FORMATS)}")
    level = environment.get("DCP_LOG_LEVEL", "").strip().upper() or "INFO"
    if level not in _LEVELS:
        raise SettingError(f"DCP_LOG_LEVEL: found {level!r}, must be one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(is_worth_a_line)
    handler.addFilter(_without_expected_tracebacks)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


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
        given = record.args if isinstance(record.args, tuple) else ()
        record.msg, record.args = f"{record.msg} error=%s", (*given, f"{type(error).__name__}: {error}")
        record.exc_info = None
        record.exc_text = None
    return True
