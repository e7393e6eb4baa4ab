"""Manifests that the demo, the tests and the benches need around a DCPDisaggDeployment. Pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devcluster.settings import ENGINE_IMAGE, ENGINE_MOUNT, ENGINE_RUNTIME, MODELS_MOUNT

MODELS_CLAIM = "dcp-models"
PLAIN_ENGINE = "plain-engine"
ENGINE_PORT = 8000

Manifest = dict[str, Any]


def models_claim(namespace: str, models: Path) -> list[Manifest]:
    """Return a claim of the namespace, and the volume it binds to: the tiny models of the local cache, read-only."""
    volume = f"{MODELS_CLAIM}-{namespace}"
    size = {"storage": "1Gi"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume, "labels": {"app.kubernetes.io/part-of": "dcp-disagg-devcluster"}},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {"namespace": namespace, "name": MODELS_CLAIM},
                "hostPath": {"path": str(models), "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": MODELS_CLAIM, "namespace": namespace},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
    ]


def plain_engine(namespace: str, model: str, *, args: list[str], env: Mapping[str, str]) -> Manifest:
    """Return a pod with one engine without P/D disaggregation: what the disaggregated tokens are compared with.

    `model` is the folder's name below the cached models; `args` and `env` are those of every CPU engine.
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": PLAIN_ENGINE, "namespace": namespace, "labels": {"app": PLAIN_ENGINE}},
        "spec": {
            "runtimeClassName": ENGINE_RUNTIME,
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
            "containers": [
                {
                    "name": "main",
                    "image": ENGINE_IMAGE,
                    "imagePullPolicy": "IfNotPresent",
                    "command": [f"{ENGINE_MOUNT}/bin/python3", "-m", "vllm.entrypoints.openai.api_server"],
                    "args": [
                        f"--model={MODELS_MOUNT}/{model}",
                        f"--served-model-name={PLAIN_ENGINE}",
                        f"--port={ENGINE_PORT}",
                        *args,
                    ],
                    "env": [{"name": name, "value": value} for name, value in env.items()],
                    "ports": [{"name": "http", "containerPort": ENGINE_PORT}],
                    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - shared memory, not a temporary file
                    "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 2},
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
        },
    }
