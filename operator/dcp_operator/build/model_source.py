"""Where a model comes from: the engine's arguments, the volume and the environment that `model.uri` asks for."""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from dcp_operator import names
from dcp_operator.api.spec import Model

#: Key of the Secret named by model.authSecretName.
TOKEN_KEY = "token"  # noqa: S105 - the name of a key, not a secret
#: The model is on a volume: the engine has no reason to ask a hub, and a pod without a way out would wait for it.
_OFFLINE: Final[tuple[dict[str, Any], ...]] = ({"name": "HF_HUB_OFFLINE", "value": "1"},)
#: What the name of a folder is kept free of.
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What one engine pod needs to find the model."""

    #: Value of --model: a repository's name, or a folder in the container.
    reference: str
    #: Value of --revision, for models of a hub.
    revision: str | None = None
    volume: dict[str, Any] | None = None
    env: tuple[dict[str, Any], ...] = field(default=())
    #: Environment that the user's template may override.
    default_env: tuple[dict[str, Any], ...] = field(default=())


def model_source(model: Model) -> ModelSource:
    """Return what `model.uri` asks for: hf://REPOSITORY, pvc://CLAIM[/PATH] or oci://IMAGE.

    A hub's model with a cache is a folder on that claim (`build.model_job` brings it there).
    """
    scheme, _, rest = model.uri.partition("://")
    if scheme == "hf" and model.cache is not None:
        return ModelSource(
            reference=f"{names.PATH_MODELS}/{cache_folder(model)}",
            volume=claim_volume(model.cache.claim_name, read_only=True),
            default_env=_OFFLINE,
        )
    if scheme == "hf":
        return ModelSource(reference=rest, revision=model.revision, env=token_env(model))
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        volume = claim_volume(claim, read_only=True)
    else:
        path = ""
        volume = {"name": names.VOLUME_MODEL, "image": {"reference": rest, "pullPolicy": "IfNotPresent"}}
    folder = f"{names.PATH_MODELS}/{path.strip('/')}".rstrip("/")
    return ModelSource(reference=folder, volume=volume, env=token_env(model), default_env=_OFFLINE)


def cache_folder(model: Model) -> str:
    """Return the folder on the claim of `model.cache`: the stated one, or one named after model and revision."""
    if model.cache is not None and model.cache.path is not None:
        return model.cache.path
    parts = [model.uri.partition("://")[2], *([model.revision] if model.revision else [])]
    return _UNFIT.sub("--", "--".join(parts))


def claim_volume(claim: str, *, read_only: bool) -> dict[str, Any]:
    """Return the model's volume on a PersistentVolumeClaim."""
    source = {"claimName": claim, **({"readOnly": True} if read_only else {})}
    return {"name": names.VOLUME_MODEL, "persistentVolumeClaim": source}


def token_env(model: Model) -> tuple[dict[str, Any], ...]:
    """Return the variable with the hub's token, none where the model names no Secret."""
    if model.auth_secret_name is None:
        return ()
    key = {"name": model.auth_secret_name, "key": TOKEN_KEY}
    return ({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}},)
