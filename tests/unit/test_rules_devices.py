"""Rules on devices, shared memory and privileges of engine pods."""

import pytest

from tests.support.specimens import main_container, report, role, violations, warnings

MAIN = "spec.decode.template.spec.containers[0]"


def connector(**fields) -> dict:
    return {"spec": {"kvConnector": fields}}


def rdma(count: int = 1) -> dict:
    return connector(protocol="rdma", rdma={"resourceName": "rdma/ib", "count": count})


def limits(**amounts) -> dict:
    return main_container("decode", resources={"limits": amounts})


def shm(size: str, **template) -> dict:
    return role("decode", sharedMemorySize=size, template={"spec": template})


REFUSED = {
    "devices for TCP": (
        [connector(rdma={"resourceName": "rdma/ib"})],
        (
            "spec.kvConnector.rdma: is stated while spec.kvConnector.protocol is tcp, so the devices would be taken "
            "and "
            "never used; nearest that works: rdma in spec.kvConnector.protocol [rdma-devices]"
        ),
    ),
    "another number of the devices": (
        [rdma(2), main_container("decode", resources={"requests": {"rdma/ib": "1"}})],
        (
            f'{MAIN}.resources.requests[rdma/ib]: "1" differs from spec.kvConnector.rdma.count 2, which the operator '
            "requests; remove it [rdma-devices]"
        ),
    ),
    "a privileged container": (
        [main_container("decode", securityContext={"privileged": True})],
        (
            f"{MAIN}.securityContext.privileged: true gives the container the whole node; remove it, and state "
            "devices as "
            "resources (spec.accelerator, spec.kvConnector.rdma, resource claims) [no-privileges]"
        ),
    ),
    "a privileged init container of the router": (
        [
            {
                "spec": {
                    "router": {
                        "template": {
                            "spec": {"initContainers": [{"name": "a", "securityContext": {"privileged": True}}]}
                        }
                    }
                }
            }
        ],
        (
            "spec.router.template.spec.initContainers[0].securityContext.privileged: true gives the container the "
            "whole "
            "node; remove it, and state devices as resources (spec.accelerator, spec.kvConnector.rdma, resource "
            "claims) "
            "[no-privileges]"
        ),
    ),
    "a volume for what the field sizes": (
        [shm("8Gi", volumes=[{"name": "a"}, {"name": "dshm", "emptyDir": {}}])],
        (
            'spec.decode.template.spec.volumes[1]: is /dev/shm, whose size spec.decode.sharedMemorySize "8Gi" states '
            "already; remove one of the two [shared-memory]"
        ),
    ),
    "a mount for what the field sizes": (
        [shm("8Gi", containers=[{"name": "main", "volumeMounts": [{"name": "a", "mountPath": "/dev/shm"}]}])],
        (
            f'{MAIN}.volumeMounts[0]: is /dev/shm, whose size spec.decode.sharedMemorySize "8Gi" states already; '
            "remove "
            "one of the two [shared-memory]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(changes, message):
    assert violations(*changes) == [message]


WARNED = {
    "rdma without a device": (
        [connector(protocol="rdma"), main_container("prefill", resources={"limits": {"rdma/ib": 1}})],
        (
            "spec.decode.template.spec.containers[main].resources.limits: has no RDMA resource, and "
            "spec.kvConnector.protocol is rdma; state the cluster's RDMA device in spec.kvConnector.rdma, or set "
            "protocol tcp [rdma-resources]"
        ),
    ),
    "no shared memory for eight ranks": (
        [shm("0Gi")],
        (
            "spec.decode.sharedMemorySize: 0 leaves /dev/shm to the container runtime, whose 64 MiB are too little "
            "for the "
            "8 ranks of a pod; leave the field out, or mount a volume at /dev/shm [shared-memory]"
        ),
    ),
    "more shared memory than memory": (
        [shm("8Gi"), limits(memory="4Gi")],
        (
            f'spec.decode.sharedMemorySize: "8Gi" is above the memory limit "4Gi" of {MAIN}, and shared memory counts '
            "towards it; raise the limit or lower the size [shared-memory]"
        ),
    ),
    "the node's processes": (
        [role("decode", template={"spec": {"hostPID": True}})],
        (
            "spec.decode.template.spec.hostPID: true gives the pod the node's processes, which nothing of the engine "
            "needs; remove it [no-privileges]"
        ),
    ),
    "a folder of the node": (
        [role("decode", template={"spec": {"volumes": [{"name": "a", "hostPath": {"path": "/dev/infiniband"}}]}})],
        (
            'spec.decode.template.spec.volumes[0].hostPath: "/dev/infiniband" is a folder of the node, which differs '
            "from "
            "node to node and which Pod Security Standards refuse; a PersistentVolumeClaim or an image volume does "
            "without "
            "[no-privileges]"
        ),
    ),
    "further capabilities": (
        [main_container("decode", securityContext={"capabilities": {"add": ["IPC_LOCK", "SYS_ADMIN"]}})],
        (
            f'{MAIN}.securityContext.capabilities.add: ["SYS_ADMIN"] are capabilities that no engine needs; remove '
            "them "
            "unless your image does [no-privileges]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), WARNED.values(), ids=WARNED.keys())
def test_warns(changes, message):
    assert violations(*changes) == []
    assert warnings(*changes) == [message]


ALLOWED = {
    "RDMA devices by the field": [rdma(2)],
    "the field, and the same again in a template": [rdma(2), limits(**{"rdma/ib": 2})],
    "devices that both roles claim": [
        connector(protocol="rdma"),
        *(main_container(name, resources={"claims": [{"name": "nic"}]}) for name in ("prefill", "decode")),
    ],
    "shared memory within the limit": [shm("8Gi"), limits(memory="64Gi")],
    "no shared memory for one rank": [role("prefill", sharedMemorySize="0", parallelism={"tensor": 1})],
    "memory of one's own at its place": [
        role("prefill", sharedMemorySize="0", parallelism={"tensor": 1}),
        main_container("prefill", volumeMounts=[{"name": "a", "mountPath": "/dev/shm"}]),
    ],
    "the capability of RDMA": [main_container("decode", securityContext={"capabilities": {"add": ["CAP_IPC_LOCK"]}})],
    "not privileged": [main_container("decode", securityContext={"privileged": False})],
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_allows_without_a_word(changes):
    verdict = report(*changes)
    assert (verdict.violations, verdict.warnings) == ((), ())
