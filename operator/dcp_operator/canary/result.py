"""What KVTransferVerified says, and what the status remembers of the last check."""

from dataclasses import dataclass

from dcp_operator.api.spec import Spec
from dcp_operator.api.status import TransferCheckStatus
from dcp_operator.canary.request import stored_condition
from dcp_operator.canary.schedule import Subject
from dcp_operator.connectors import PROFILES
from dcp_operator.observed import Observed
from dcp_operator.reasons import Reason, Said, Verdict

#: The condition's type.
CONDITION = "KVTransferVerified"
_RESULTS = frozenset(
    {
        Reason.VERIFIED,
        Reason.NO_KV_CONNECTOR,
        Reason.HANDSHAKE_REFUSED,
        Reason.TRANSFER_FAILED,
        Reason.RECOMPUTED,
    }
)


@dataclass(frozen=True, slots=True)
class Result:
    """The last check that told something about the transfer: of what, what it found, and when (RFC 3339)."""

    subject: Subject
    said: Said
    at: str

    def as_status(self) -> TransferCheckStatus:
        """Return what the status remembers of it, beside the condition."""
        return TransferCheckStatus(revision=self.subject.revision, engines=self.subject.engines, last_time=self.at)


def stored_result(observed: Observed) -> Result | None:
    """Return the result that the stored status tells, None where it tells none."""
    said = stored_condition(observed, CONDITION)
    status, reason = said.get("status"), said.get("reason")
    if status not in ("True", "False") or reason not in _RESULTS:
        return None
    try:
        about = TransferCheckStatus.model_validate(observed.status.get("transferCheck"))
    except ValueError:
        return None
    found: Verdict = "True" if status == "True" else "False"
    words = said.get("message", "").removeprefix(_of(about.revision))
    return Result(Subject(about.revision, about.engines), Said(found, Reason(reason), words), about.last_time)


def say(
    spec: Spec | None, serving: str | None, result: Result | None, inconclusive: tuple[Subject, str] | None
) -> Said:
    """Return what the condition says.

    `serving` is the revision that serves. A result stands for its revision until another check of it tells something
    else; `inconclusive` is the subject and the words of a later check that told nothing.
    """
    if spec is not None and not spec.transfer_check.enabled:
        return Said("Unknown", Reason.DISABLED, "spec.transferCheck.enabled is false: no check is made")
    if spec is not None and not PROFILES[spec.kv_connector.type].bundled:
        name = PROFILES[spec.kv_connector.type].words
        words = f"{name} has no counters that tell a transfer from a recomputed prompt"
        return Said("Unknown", Reason.NO_COUNTERS, words)
    if spec is not None and spec.router.replicas == 0:
        words = (
            "spec.router.replicas is 0: a check asks through a router of the operator's making, and doesn't know the "
            "way through yours; compare the engines' counters before and after a prompt of your own"
        )
        return Said("Unknown", Reason.NOT_CHECKED, words)
    if result is not None and serving in (None, result.subject.revision):
        return Said(result.said.status, result.said.reason, _of(result.subject.revision) + result.said.message)
    if inconclusive is not None and serving in (None, inconclusive[0].revision):
        return Said("Unknown", Reason.NOT_CHECKED, _of(inconclusive[0].revision) + inconclusive[1])
    what = "no transfer has been checked" if serving is None else f"revision {serving} has not been checked"
    return Said("Unknown", Reason.NOT_CHECKED, f"{what} yet; that is done when Ready is True")


def _of(revision: str) -> str:
    return f"revision {revision}: "
