"""Rollouts: prefill and decode of a new revision take over from the old ones in paired steps.

`planner` decides from numbers, `counts` reads them from what is observed, `revisions` says which revisions there are.
Nothing here acts.
"""

from dcp_operator.rollout.revisions import is_router, revisions, routers_remain, serving_revisions
from dcp_operator.rollout.state import RolloutState, rollout_state

__all__ = ["RolloutState", "is_router", "revisions", "rollout_state", "routers_remain", "serving_revisions"]
