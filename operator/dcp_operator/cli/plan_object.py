"""The object of a plan: sizes chosen, everything else as the chart's example has it."""

import re
from typing import Any

from dcp_operator.api.base import API_VERSION, KIND
from dcp_operator.catalogue import Catalogue, ModelFacts
from dcp_operator.rules import Report, check_body
from dcp_operator.settings import Role

Sizes = dict[Role, tuple[int, int]]


def planned_object(
    model: str,
    facts: ModelFacts,
    sizes: Sizes,
    context: int,
    block_size: int,
    kv_cache_dtype: str,
    image: str,
    catalogue: Catalogue,
) -> tuple[dict[str, Any], Report]:
    """Return an object with tensor and decode context sizes per role, and what the rules find in it."""
    uri = model if "://" in model else f"hf://{model}"
    geometry = facts.geometry.model_dump(by_alias=True, exclude_none=True)
    spec: dict[str, Any] = {"model": {"uri": uri, "geometry": geometry}, "image": image}
    # Works everywhere. How a cluster calls its RDMA devices can't be known here, and without them rdma does not start.
    spec["kvConnector"] = {"protocol": "tcp"}
    for role, (tensor, decode_context) in sizes.items():
        stated: dict[str, Any] = {"replicas": 1, "parallelism": {"tensor": tensor}, "blockSize": block_size}
        if decode_context > 1:
            stated["parallelism"]["decodeContext"] = decode_context
            stated["kvCacheInterleaveSize"] = block_size
        if kv_cache_dtype != "auto":
            stated["kvCacheDtype"] = kv_cache_dtype
        spec[role.value] = {**stated, "maxModelLen": context}
    body: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": _name(model)}, "spec": spec}
    return body, check_body(body, catalogue=catalogue)


def _name(model: str) -> str:
    """Return a name for the object: the model's last part in the letters that Kubernetes takes, 30 at most."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:30].strip("-") or "model"
