"""Rollouts: prefill and decode of a new revision take over from the old ones in paired steps.

`planner` decides from numbers, `counts` reads them from what is observed, `revisions` says which revisions there are,
and `asked` how many engines an autoscaler wants.
Nothing here acts.
"""

from dcp_operator.rollout.asked import asked_replicas, missing_scaler
from dcp_operator.rollout.revisions import is_routed, is_router, revisions, routers_remain, serving_revisions
from dcp_operator.rollout.situation import is_users_router
from dcp_operator.rollout.state import RolloutState, rollout_state

__all__ = [
    "RolloutState",
    "asked_replicas",
    "is_routed",
    "is_router",
    "is_users_router",
    "missing_scaler",
    "revisions",
    "rollout_state",
    "routers_remain",
    "serving_revisions",
]
