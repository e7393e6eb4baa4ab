"""Leaving arguments out of extraArgs, with the values that stand behind them."""

from collections.abc import Iterable

from dcp_operator.flags import Flag
from dcp_operator.rules.context import RoleContext
from dcp_operator.rules.edits import REMOVED, Fix


def without_flag(role: RoleContext, flag: Flag) -> Fix:
    """Return the change that leaves every use of a flag out: its items, and those of its values that are items too."""
    arguments = role.stated.extra_args
    gone: set[int] = set()
    for use in role.arguments.flags:
        if use.name == flag.name:
            behind = arguments[use.index + 1 : use.index + 1 + len(use.values)]
            gone.update(range(use.index, use.index + 1 + (len(behind) if behind == list(use.values) else 0)))
    return _without(role, gone)


def without_item(role: RoleContext, index: int) -> Fix:
    """Return the change that leaves one item out."""
    return _without(role, {index})


def _without(role: RoleContext, gone: Iterable[int]) -> Fix:
    left = tuple(text for index, text in enumerate(role.stated.extra_args) if index not in gone)
    return Fix(f"{role.path}.extraArgs", left or REMOVED)
