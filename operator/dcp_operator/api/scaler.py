"""A DCPDisaggRoleScaler: the object through which an autoscaler owns the replica count of one role.

The operator makes one for each role that states `scaling`, and never writes its `spec.replicas` afterwards. Autoscalers
reach it by its scale subresource (docs/adr/0012).
"""

from typing import Annotated

from pydantic import Field

from dcp_operator.api.base import ApiModel
from dcp_operator.api.spec import MAX_REPLICAS
from dcp_operator.api.status import Condition

#: The one condition of a scaler: whether fewer or more engines are run than were asked for.
BOUNDED = "Bounded"


class ScalerSpec(ApiModel):
    """What an autoscaler, or `kubectl scale`, asks for."""

    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = Field(
        description="Engines of the role that are asked for. Written by autoscalers and kubectl scale; what is run "
        "lies within spec.ROLE.scaling and spec.ratio of the object that the scaler belongs to."
    )


class ScalerStatus(ApiModel):
    """What the operator makes of it."""

    replicas: int = Field(default=0, description="Engines of the role that exist, over all revisions.")
    selector: str | None = Field(
        default=None, description="Label selector of the role's pods over all revisions; autoscalers count with it."
    )
    conditions: list[Condition] = Field(
        default_factory=list[Condition],
        description="Bounded: True while another number of engines is wanted than asked for, and why.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
