"""Calls to a simulated API server: made where they are awaited, in one order, and nobody is waited for."""

from collections.abc import Callable
from typing import Any

from dcp_operator.calls import Calls


class CallsInTurn(Calls):
    """Calls without threads: the number of a call names the same moment in every run."""

    async def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def give_way(self, seconds: float) -> None:
        """The simulated server has nothing to do meanwhile."""
