"""Debian packages that the node needs, installed when their programs are missing."""

from devcluster.errors import DevClusterError
from devcluster.progress import Log, heartbeat
from devcluster.shell import find_program, run, succeeds

# Program that shows whether a package is there -> package.
PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "mount": "mount",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "busybox": "busybox-static",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}


def missing_packages() -> list[str]:
    """Packages whose programs are not on the machine."""
    return sorted({package for program, package in PACKAGES.items() if not find_program(program)})


def ensure_packages(log: Log) -> None:
    """Install what is missing.

    Raises:
        DevClusterError: the machine has no apt-get, or Debian's packages can't be had.
    """
    missing = missing_packages()
    if not missing:
        return
    names = " ".join(missing)
    if not find_program("apt-get"):
        raise DevClusterError(f"these packages are missing and the machine has no apt-get to install them: {names}")
    log(f"installing Debian packages: {names}")
    with heartbeat(log, "installing Debian packages"):
        # A source of somebody else's that can't be reached must not stop us: the installation below tells.
        succeeds(["apt-get", "-qq", "update"], timeout_s=300)
        run(
            [
                "apt-get",
                "-qq",
                "install",
                "--yes",
                "--no-install-recommends",
                "-o",
                "DPkg::Lock::Timeout=120",
                *missing,
            ],
            what=f"apt-get, installing the Debian packages {names},",
            env={"DEBIAN_FRONTEND": "noninteractive"},
        )
    if still := missing_packages():
        raise DevClusterError(
            f"apt-get installed {names}, but programs of these packages are not on PATH: {' '.join(still)}"
        )
