"""The components of the node: which program, with which arguments and configuration. Pure: nothing is started here."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from devcluster import pki, settings
from devcluster.containerd import render_config, render_network
from devcluster.paths import ClusterPaths

ETCD = "etcd"
CONTAINERD = "containerd"
APISERVER = "kube-apiserver"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
KUBELET = "kubelet"
PROXY = "kube-proxy"
# In the order in which they start.
NAMES = (ETCD, CONTAINERD, APISERVER, CONTROLLER_MANAGER, SCHEDULER, KUBELET, PROXY)

# The defaults of 20 to 50 requests a second make 200 Deployments take 35 s, these 6 s.
_CLIENT_LIMITS = ("--kube-api-qps=1000", "--kube-api-burst=2000")


@dataclass(frozen=True, slots=True)
class Component:
    """A program of the node, with the files that it reads at its start."""

    name: str
    argv: tuple[str, ...]
    files: Mapping[Path, str] = field(default_factory=dict)  # content by path
    health: str = ""  # URL or socket that answers when the component works; "" when its effect is watched instead

    @property
    def digest(self) -> str:
        """Hash of everything that the component is started with. Another one means: restart it."""
        parts = [list(self.argv), sorted((str(path), text) for path, text in self.files.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Installed:
    """Where the programs are, and what the machine can do."""

    kubernetes: Path  # folder of kube-apiserver and its siblings
    node: Path  # folder of etcd and the CNI plugins
    containerd: Path  # the program
    cgroup_v2: bool
    bridged_packets_filtered: bool  # whether iptables sees packets between two ports of the bridge


def _url(port: settings.Port, scheme: str = "http") -> str:
    return f"{scheme}://{port.address}:{port.number}"


def _etcd(paths: ClusterPaths, installed: Installed) -> Component:
    client, peer = _url(settings.ETCD_CLIENT), _url(settings.ETCD_PEER)
    return Component(
        ETCD,
        (
            str(installed.node / "etcd"),
            "--name=devcluster",
            f"--data-dir={paths.etcd}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=devcluster={peer}",
            # What a crash of the machine could lose, `up` clears anyhow.
            "--unsafe-no-fsync",
        ),
        health=f"{client}/health",
    )


def _containerd(paths: ClusterPaths, installed: Installed, base_spec: str) -> Component:
    base_spec_path = paths.config / "cpu-engine-spec.json"
    config_path = paths.config / "containerd.toml"
    return Component(
        CONTAINERD,
        (str(installed.containerd), f"--config={config_path}"),
        {
            config_path: render_config(paths, installed.node, base_spec_path),
            base_spec_path: base_spec,
            paths.cni / "conf" / "10-pods.conflist": render_network(paths),
        },
        health=str(paths.containerd_socket),
    )


def _apiserver(paths: ClusterPaths, installed: Installed) -> Component:
    certificates, port = paths.pki, settings.APISERVER
    return Component(
        APISERVER,
        (
            str(installed.kubernetes / APISERVER),
            f"--etcd-servers={_url(settings.ETCD_CLIENT)}",
            # The bridge's own address: pods and the host reach it, the machine's neighbours do not.
            f"--bind-address={port.address}",
            f"--advertise-address={port.address}",
            f"--secure-port={port.number}",
            f"--service-cluster-ip-range={settings.SERVICE_SUBNET}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            f"--client-ca-file={certificates / 'ca.crt'}",
            f"--tls-cert-file={certificates / 'kube-apiserver.crt'}",
            f"--tls-private-key-file={certificates / 'kube-apiserver.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificates / 'sa.pub'}",
            f"--service-account-signing-key-file={certificates / 'sa.key'}",
            f"--kubelet-certificate-authority={certificates / 'ca.crt'}",
            f"--kubelet-client-certificate={certificates / 'apiserver-kubelet-client.crt'}",
            f"--kubelet-client-key={certificates / 'apiserver-kubelet-client.key'}",
            # The node's name resolves nowhere.
            "--kubelet-preferred-address-types=InternalIP",
            "--profiling=false",
        ),
        health=f"{_url(port, 'https')}/readyz",
    )


def _controller_manager(paths: ClusterPaths, installed: Installed) -> Component:
    return _controller(
        paths,
        installed,
        CONTROLLER_MANAGER,
        pki.CONTROLLER_MANAGER,
        settings.CONTROLLER_MANAGER,
        (
            f"--root-ca-file={paths.pki / 'ca.crt'}",
            f"--service-account-private-key-file={paths.pki / 'sa.key'}",
            f"--cluster-signing-cert-file={paths.pki / 'ca.crt'}",
            f"--cluster-signing-key-file={paths.pki / 'ca.key'}",
            # The kubelet's configuration names the same folder; the default lies in /usr/libexec.
            f"--flex-volume-plugin-dir={paths.kubelet / 'volume-plugins'}",
            "--use-service-account-credentials",
        ),
    )


def _scheduler(paths: ClusterPaths, installed: Installed) -> Component:
    return _controller(paths, installed, SCHEDULER, pki.SCHEDULER, settings.SCHEDULER, ())


def _controller(
    paths: ClusterPaths,
    installed: Installed,
    program: str,
    identity: pki.Identity,
    port: settings.Port,
    own_flags: tuple[str, ...],
) -> Component:
    """A client of the API server that is alone in its cluster and serves its health over TLS."""
    kubeconfig = pki.kubeconfig_path(paths, identity)
    return Component(
        program,
        (
            str(installed.kubernetes / program),
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--bind-address={port.address}",
            f"--secure-port={port.number}",
            f"--cert-dir={paths.serving}",
            *own_flags,
            "--leader-elect=false",
            "--profiling=false",
            *_CLIENT_LIMITS,
        ),
        health=f"{_url(port, 'https')}/healthz",
    )


def kubelet_config(paths: ClusterPaths, installed: Installed) -> dict[str, object]:
    """The KubeletConfiguration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": settings.KUBELET.address,
        "port": settings.KUBELET.number,
        "healthzBindAddress": settings.KUBELET_HEALTH.address,
        "healthzPort": settings.KUBELET_HEALTH.number,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(paths.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(paths.pki / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(paths.pki / "kubelet-server.key"),
        "containerRuntimeEndpoint": f"unix://{paths.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{settings.CGROUP}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failCgroupV1": installed.cgroup_v2,
        "failSwapOn": False,
        "podLogsDir": str(paths.pod_logs),
        "volumePluginDir": str(paths.kubelet / "volume-plugins"),
        # A developer's disk is often nearly full, and evicting pods or images over it would only surprise.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "serializeImagePulls": False,
        "maxPods": 200,
        "clusterDomain": "cluster.local",
    }


def _kubelet(paths: ClusterPaths, installed: Installed) -> Component:
    config_path = paths.config / "kubelet.yaml"
    return Component(
        KUBELET,
        (
            str(installed.kubernetes / KUBELET),
            f"--config={config_path}",
            f"--kubeconfig={pki.kubeconfig_path(paths, pki.KUBELET)}",
            f"--root-dir={paths.kubelet}",
            f"--cert-dir={paths.serving}",
            f"--hostname-override={settings.NODE_NAME}",
            f"--node-ip={settings.GATEWAY}",
        ),
        {config_path: yaml.safe_dump(kubelet_config(paths, installed), sort_keys=False)},
        health=f"{_url(settings.KUBELET_HEALTH)}/healthz",
    )


def proxy_config(paths: ClusterPaths, installed: Installed) -> dict[str, object]:
    """The KubeProxyConfiguration."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(pki.kubeconfig_path(paths, pki.PROXY))},
        "mode": "iptables",
        "hostnameOverride": settings.NODE_NAME,
        "clusterCIDR": settings.POD_SUBNET,
        "healthzBindAddress": f"{settings.PROXY_HEALTH.address}:{settings.PROXY_HEALTH.number}",
        "metricsBindAddress": f"{settings.PROXY_METRICS.address}:{settings.PROXY_METRICS.number}",
        "nodePortAddresses": [f"{settings.GATEWAY}/32"],
        # Zero leaves the machine's connection-tracking limits as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {
            "localhostNodePorts": False,
            # Two pods on one bridge: where iptables does not see the answer, only a masqueraded one finds its way back.
            "masqueradeAll": not installed.bridged_packets_filtered,
            "minSyncPeriod": "0s",
        },
    }


def _proxy(paths: ClusterPaths, installed: Installed) -> Component:
    config_path = paths.config / "kube-proxy.yaml"
    return Component(
        PROXY,
        (str(installed.kubernetes / PROXY), f"--config={config_path}"),
        {config_path: yaml.safe_dump(proxy_config(paths, installed), sort_keys=False)},
        health=f"{_url(settings.PROXY_HEALTH)}/livez",
    )


def plan(paths: ClusterPaths, installed: Installed, base_spec: str) -> tuple[Component, ...]:
    """All components in the order in which they start."""
    return (
        _etcd(paths, installed),
        _containerd(paths, installed, base_spec),
        _apiserver(paths, installed),
        _controller_manager(paths, installed),
        _scheduler(paths, installed),
        _kubelet(paths, installed),
        _proxy(paths, installed),
    )
