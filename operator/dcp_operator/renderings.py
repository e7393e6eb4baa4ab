"""Answers that the passes over an object share: reading, judging and rendering a spec costs most of a pass.

Whatever is kept is the answer of a pure function, and it is given again only for an equal question, so nothing here can
be out of date. It is bounded: what was asked longest ago is worked out again when it is asked next.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final, Generic, TypeVar

from dcp_operator.api.load import Loaded, load
from dcp_operator.build import Context, Manifest, render_context, revision_of
from dcp_operator.catalogue import Catalogue
from dcp_operator.observed import Body, Observed
from dcp_operator.rules.engine import Report, check

Answer = TypeVar("Answer")

#: Objects whose answers are kept: those of a burst. An object at rest is looked at every few minutes.
KEPT: Final = 128


@dataclass(frozen=True, slots=True)
class Judged:
    """A spec as it was read, and what the rules say of it; no report where it could not be read."""

    loaded: Loaded
    report: Report | None


class Renderings:
    """The last answers of a number of objects. Whoever gets one leaves it as it is."""

    def __init__(self) -> None:
        self._judged: _Last[Judged] = _Last()
        self._revisions: _Last[str] = _Last()
        self._manifests: _Last[tuple[Manifest, ...]] = _Last()

    def judge(self, observed: Observed, catalogue: Catalogue | None) -> Judged:
        """Return the object's spec and what the rules say of it."""
        question = (observed.generation, catalogue)
        return self._judged.answer(observed.uid, question, lambda: _judge(observed.body, catalogue))

    def revision(self, context: Context) -> str:
        """Return the revision of a context. Raises what rendering raises."""
        question = (context.name, context.namespace, context.spec)
        return self._revisions.answer(context.uid, question, lambda: revision_of(context))

    def manifests(self, context: Context, revision: str) -> tuple[Manifest, ...]:
        """Return the manifests of a context, which has this revision. Raises what rendering raises."""
        return self._manifests.answer(context.uid, _question(context), lambda: tuple(render_context(context, revision)))


class _Last(Generic[Answer]):
    """The last question of each object and its answer."""

    def __init__(self) -> None:
        self._known: OrderedDict[str | None, tuple[object, Answer]] = OrderedDict()

    def answer(self, uid: str | None, question: object, work_out: Callable[[], Answer]) -> Answer:
        known = self._known.pop(uid, None)
        if known is None or known[0] != question:
            known = (question, work_out())
        self._known[uid] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return known[1]


def _judge(body: Body, catalogue: Catalogue | None) -> Judged:
    loaded = load(body)
    return Judged(loaded, check(loaded.obj, catalogue=catalogue) if loaded.obj is not None else None)


def _question(context: Context) -> tuple[object, ...]:
    """Return all that a context holds. The specs of two contexts are the same one as a rule, which is seen at once."""
    return tuple(getattr(context, each.name) for each in fields(context))
