"""How a start that can't work ends: with one sentence, where people look for it.

vLLM's own last words are a traceback of another process. So the sentence goes to the log by itself, and into the
container's termination message, which Kubernetes shows in the pod's status.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dcp_connector.errors import StartupError

logger = logging.getLogger(__name__)

#: Kubernetes' default terminationMessagePath.
TERMINATION_LOG = Path("/dev/termination-log")


@contextmanager
def explained(termination_log: Path = TERMINATION_LOG) -> Generator[None]:
    """Say a StartupError's sentence in the log and in the termination message, and let it pass."""
    try:
        yield
    except StartupError as error:
        logger.error("dcp: the engine can't start: %s", error)  # noqa: TRY400 - the sentence is for people
        try:
            if termination_log.is_file():
                termination_log.write_text(f"{error}\n")
        except OSError as problem:
            logger.debug("dcp: no termination message: %s", problem)
        raise
