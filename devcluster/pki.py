"""Keys and certificates of the cluster, made by openssl: one authority, and a key pair for everyone who speaks TLS."""

import base64
from dataclasses import dataclass
from pathlib import Path

import yaml

from devcluster.files import write_text
from devcluster.paths import ClusterPaths
from devcluster.settings import APISERVER, GATEWAY, KUBERNETES_SERVICE_ADDRESS, LOOPBACK, NODE_NAME
from devcluster.shell import run

_DAYS = "3650"
_NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -sha256"


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody with a certificate: to Kubernetes, the common name is the user and the organization the group."""

    name: str
    common_name: str
    organization: str = ""
    addresses: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def is_server(self) -> bool:
        """Whether others connect to it."""
        return bool(self.addresses)


SERVER = Identity(
    "kube-apiserver",
    "kube-apiserver",
    addresses=(GATEWAY, KUBERNETES_SERVICE_ADDRESS, LOOPBACK),
    names=(
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
    ),
)
KUBELET_SERVER = Identity("kubelet-server", f"system:node:{NODE_NAME}", addresses=(GATEWAY,), names=(NODE_NAME,))
KUBELET_CLIENT = Identity("apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
ADMIN = Identity("admin", "devcluster-admin", "system:masters")
CONTROLLER_MANAGER = Identity("kube-controller-manager", "system:kube-controller-manager")
SCHEDULER = Identity("kube-scheduler", "system:kube-scheduler")
KUBELET = Identity("kubelet", f"system:node:{NODE_NAME}", "system:nodes")
PROXY = Identity("kube-proxy", "system:kube-proxy")
IDENTITIES = (SERVER, KUBELET_SERVER, KUBELET_CLIENT, ADMIN, CONTROLLER_MANAGER, SCHEDULER, KUBELET, PROXY)
_KUBECONFIGS = (ADMIN, CONTROLLER_MANAGER, SCHEDULER, KUBELET, PROXY)


def subject(identity: Identity) -> str:
    """The subject in openssl's notation. A colon needs no escape there; a slash would."""
    organization = f"/O={identity.organization}" if identity.organization else ""
    return f"{organization}/CN={identity.common_name}"


def extensions(identity: Identity) -> str:
    """The X.509 extensions of a leaf certificate, as an openssl extension file."""
    lines = ["basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature"]
    lines.append(f"extendedKeyUsage={'serverAuth' if identity.is_server else 'clientAuth'}")
    alternatives = [f"IP:{address}" for address in identity.addresses] + [f"DNS:{name}" for name in identity.names]
    if alternatives:
        lines.append(f"subjectAltName={','.join(alternatives)}")
    return "\n".join(lines) + "\n"


def kubeconfig(user: str, authority_pem: bytes, certificate_pem: bytes, key_pem: bytes) -> str:
    """A self-contained kubeconfig that verifies the API server by our authority."""

    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    cluster = {
        "server": f"https://{APISERVER.address}:{APISERVER.number}",
        "certificate-authority-data": encoded(authority_pem),
    }
    credentials = {"client-certificate-data": encoded(certificate_pem), "client-key-data": encoded(key_pem)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "devcluster", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": user}}],
        "current-context": "devcluster",
    }
    return yaml.safe_dump(document, sort_keys=False)


def kubeconfig_path(paths: ClusterPaths, identity: Identity) -> Path:
    """Where the kubeconfig of an identity is."""
    return paths.kubeconfig if identity == ADMIN else paths.config / f"{identity.name}.kubeconfig"


def ensure_pki(paths: ClusterPaths) -> None:
    """Make what is missing. A cluster keeps its keys for its life: pods hold copies of the authority."""
    pki = paths.pki
    if not (pki / "complete").exists():
        pki.mkdir(parents=True, exist_ok=True)
        pki.chmod(0o700)
        _make_authority(pki)
        for identity in IDENTITIES:
            _make_leaf(pki, identity)
        write_text(pki / "complete", "")
    for identity in _KUBECONFIGS:
        text = kubeconfig(
            identity.common_name,
            (pki / "ca.crt").read_bytes(),
            (pki / f"{identity.name}.crt").read_bytes(),
            (pki / f"{identity.name}.key").read_bytes(),
        )
        write_text(kubeconfig_path(paths, identity), text, mode=0o600)


def ensure_leaf(paths: ClusterPaths, identity: Identity) -> None:
    """Make the key pair of somebody who came later, unless it is there."""
    if not (paths.pki / f"{identity.name}.crt").exists():
        _make_leaf(paths.pki, identity)


def _openssl(pki: Path, what: str, command: str) -> None:
    """Run openssl in the folder of keys; no argument of ours holds a blank."""
    run(["openssl", *command.split()], what=what, cwd=pki)


def _make_authority(pki: Path) -> None:
    _openssl(
        pki,
        "making the cluster's certificate authority",
        f"req -x509 {_NEW_KEY} -days {_DAYS} -subj /CN=devcluster-ca -keyout ca.key -out ca.crt"
        " -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,digitalSignature",
    )
    tokens = "making the key for service-account tokens"
    _openssl(pki, tokens, "ecparam -name prime256v1 -genkey -noout -out sa.key")
    _openssl(pki, tokens, "ec -in sa.key -pubout -out sa.pub")


def _make_leaf(pki: Path, identity: Identity) -> None:
    name, what = identity.name, f"making the certificate of {identity.name}"
    write_text(pki / f"{name}.ext", extensions(identity))
    _openssl(pki, what, f"req -new {_NEW_KEY} -subj {subject(identity)} -keyout {name}.key -out {name}.csr")
    _openssl(
        pki,
        what,
        f"x509 -req -sha256 -days {_DAYS} -in {name}.csr -extfile {name}.ext"
        f" -CA ca.crt -CAkey ca.key -CAcreateserial -out {name}.crt",
    )
