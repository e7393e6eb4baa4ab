"""Tasks beside the passes: kept from being forgotten, and those that should never end are missed when they do."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Background:
    """Runs tasks on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        #: What should run for ever and has ended.
        self._ended: set[str] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None], lasting: str | None = None) -> None:
        """Run a task; `lasting` names one that should never end."""
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._take_in_end(ended, lasting))

    async def stop(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def problems(self) -> list[str]:
        """Return what has ended and should not have. Safe from every thread."""
        return [f"{what} has ended" for what in sorted(self._ended.copy())]

    def _take_in_end(self, task: asyncio.Task[None], lasting: str | None) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("task failed task=%s", lasting or "list", exc_info=error)
        if lasting is not None:
            self._ended.add(lasting)
