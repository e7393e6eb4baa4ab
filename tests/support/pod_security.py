"""The restricted Pod Security Standard, as far as the project's pods come near its limits."""

from typing import Any

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def restricted_violations(pod: dict[str, Any]) -> list[str]:
    """Return what a namespace that enforces `restricted` would refuse in a pod's spec."""
    found = [f"{field} is set" for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field)]
    context = pod.get("securityContext", {})
    for volume in pod.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= _VOLUMES:
            found.append(f"volume {volume['name']} is of kind {kinds}")
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = {**context, **container.get("securityContext", {})}
        name = container["name"]
        if own.get("runAsNonRoot") is not True or own.get("runAsUser") == 0:
            found.append(f"{name} may run as root")
        if own.get("allowPrivilegeEscalation") is not False:
            found.append(f"{name} may gain privileges")
        if own.get("privileged"):
            found.append(f"{name} is privileged")
        if own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append(f"{name} has no seccomp profile")
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            found.append(f"{name} keeps capabilities")
        found += [f"{name} uses host port {p['hostPort']}" for p in container.get("ports", []) if p.get("hostPort")]
    return found
