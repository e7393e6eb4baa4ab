"""The fields of a pod template that Kubernetes 1.37 has, and what each holds: enough to catch typing errors.

A test compares the names with the API server's own schema. An unknown field is a warning only, because a newer
cluster may know it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", value))


def _is_text_map(value: Any) -> bool:
    return _is_map(value) and all(isinstance(item, str) for item in value.values())


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[Any]", value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field holds: how to say it, how to tell it, and for lists that are merged by a key, that key."""

    words: str
    accepts: Callable[[Any], bool]
    element_key: str | None = None


TEXT = Kind("a string", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number of 0 or more", _is_count)
INTEGER = Kind("a whole number", _is_integer)
MAP = Kind("a map", _is_map)
TEXT_MAP = Kind("a map of strings", _is_text_map)
LIST = Kind("a list", _is_list)
TEXT_LIST = Kind("a list of strings", _is_text_list)
ANY = Kind("anything", lambda _: True)


def _list_by(key: str) -> Kind:
    return Kind("a list of maps", _is_list, key)


TEMPLATE = {"metadata": MAP, "spec": MAP}

METADATA = {
    "labels": TEXT_MAP,
    "annotations": TEXT_MAP,
    "name": ANY,
    "namespace": ANY,
    "creationTimestamp": ANY,
    "finalizers": TEXT_LIST,
}

POD = {
    "activeDeadlineSeconds": COUNT,
    "affinity": MAP,
    "automountServiceAccountToken": FLAG,
    "containers": _list_by("name"),
    "dnsConfig": MAP,
    "dnsPolicy": TEXT,
    "enableServiceLinks": FLAG,
    "evictionResponders": LIST,
    "ephemeralContainers": _list_by("name"),
    "hostAliases": _list_by("ip"),
    "hostIPC": FLAG,
    "hostNetwork": FLAG,
    "hostPID": FLAG,
    "hostUsers": FLAG,
    "hostname": TEXT,
    "hostnameOverride": TEXT,
    "imagePullSecrets": _list_by("name"),
    "initContainers": _list_by("name"),
    "nodeName": TEXT,
    "nodeSelector": TEXT_MAP,
    "os": MAP,
    "overhead": MAP,
    "preemptionPolicy": TEXT,
    "priority": INTEGER,
    "priorityClassName": TEXT,
    "readinessGates": LIST,
    "resourceClaims": _list_by("name"),
    "resources": MAP,
    "restartPolicy": TEXT,
    "runtimeClassName": TEXT,
    "schedulerName": TEXT,
    "schedulingGates": LIST,
    "securityContext": MAP,
    "schedulingGroup": MAP,
    "serviceAccount": TEXT,
    "serviceAccountName": TEXT,
    "setHostnameAsFQDN": FLAG,
    "shareProcessNamespace": FLAG,
    "subdomain": TEXT,
    "terminationGracePeriodSeconds": COUNT,
    "tolerations": LIST,
    "topologySpreadConstraints": LIST,
    "volumes": _list_by("name"),
}

CONTAINER = {
    "args": TEXT_LIST,
    "command": TEXT_LIST,
    "env": _list_by("name"),
    "envFrom": LIST,
    "image": TEXT,
    "imagePullPolicy": TEXT,
    "lifecycle": MAP,
    "livenessProbe": MAP,
    "name": TEXT,
    "ports": _list_by("containerPort"),
    "readinessProbe": MAP,
    "resizePolicy": LIST,
    "resources": MAP,
    "restartPolicy": TEXT,
    "restartPolicyRules": LIST,
    "securityContext": MAP,
    "startupProbe": MAP,
    "stdin": FLAG,
    "stdinOnce": FLAG,
    "terminationMessagePath": TEXT,
    "terminationMessagePolicy": TEXT,
    "tty": FLAG,
    "volumeDevices": _list_by("devicePath"),
    "volumeMounts": _list_by("mountPath"),
    "workingDir": TEXT,
}

PROBE = {"exec": MAP, "grpc": MAP, "httpGet": MAP, "tcpSocket": MAP}

RESOURCES = {"limits": MAP, "requests": MAP, "claims": _list_by("name")}

#: Maps within a container that are merged field by field, and the maps within those.
MERGED_MAPS = {
    "securityContext": {"capabilities": MAP},
    "resources": RESOURCES,
    "startupProbe": PROBE,
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
}

#: Every field that is a list merged by a key, wherever it belongs: nothing else may stand under these names.
KEYED_LISTS = frozenset(
    name for fields in (POD, CONTAINER, RESOURCES) for name, kind in fields.items() if kind.element_key is not None
)
