"""Rules on pod templates: complete messages, and no shape that makes them stumble."""

import pytest

from tests.support.specimens import MLA, main_container, report, role, sizes, violations

CONTAINER = "spec.decode.template.spec.containers[0]"


def pod(**fields):
    return role("decode", template={"spec": fields})


def router(**template):
    return {"spec": {"router": {"template": template}}}


def mounts(*paths: str):
    return main_container("decode", volumeMounts=[{"name": f"v{n}", "mountPath": path} for n, path in enumerate(paths)])


REFUSED = {
    "another number of accelerators": (
        [main_container("decode", resources={"limits": {"nvidia.com/gpu": 4}})],
        (
            f"{CONTAINER}.resources.limits[nvidia.com/gpu]: 4 differs from the 8 that spec.decode.parallelism.tensor 8 "
            "needs; nearest that works: 8, or leave it out [gpu-count]"
        ),
    ),
    "a fraction of an accelerator": (
        [main_container("decode", resources={"limits": {"nvidia.com/gpu": "500m"}})],
        (
            f'{CONTAINER}.resources.limits[nvidia.com/gpu]: "500m" differs from the 8 that '
            "spec.decode.parallelism.tensor 8 needs; nearest that works: 8, or leave it out [gpu-count]"
        ),
    ),
    "accelerators of the product of all sizes": (
        [
            MLA,
            sizes("decode", tensor=4, prefillContext=2, pipeline=3, decodeContext=1),
            main_container("decode", resources={"requests": {"nvidia.com/gpu": "8"}}),
        ],
        (
            f'{CONTAINER}.resources.requests[nvidia.com/gpu]: "8" differs from the 24 that '
            "spec.decode.parallelism.tensor 4 "
            "x spec.decode.parallelism.prefillContext 2 x spec.decode.parallelism.pipeline 3 needs; nearest that "
            "works: 24, "
            "or leave it out [gpu-count]"
        ),
    ),
    "accelerators of another vendor": (
        [main_container("decode", resources={"limits": {"amd.com/gpu": 8}})],
        (
            f"{CONTAINER}.resources.limits[amd.com/gpu]: 8 is requested, but spec.accelerator.resourceName is "
            "nvidia.com/gpu; keep one [gpu-count]"
        ),
    ),
    "accelerators while the engines run on CPU": (
        [
            {"spec": {"accelerator": {"resourceName": "cpu"}}},
            main_container("decode", resources={"limits": {"nvidia.com/gpu": 8}}),
        ],
        (
            f"{CONTAINER}.resources.limits[nvidia.com/gpu]: 8 is requested, but spec.accelerator.resourceName is cpu; "
            "keep "
            "one [gpu-count]"
        ),
    ),
    "accelerators in a container of another name": (
        [pod(containers=[{"name": "vllm", "resources": {"limits": {"nvidia.com/gpu": 8}}}])],
        (
            f"{CONTAINER}.resources.limits[nvidia.com/gpu]: 8 is requested by vllm, but the engine runs in the "
            "container "
            "main; rename it, or remove the request [gpu-count]"
        ),
    ),
    "another image": (
        [main_container("decode", image="vllm/vllm-openai:v0.32.0")],
        (
            f'{CONTAINER}.image: "vllm/vllm-openai:v0.32.0" differs from spec.image "vllm/vllm-openai:v0.33.0", '
            "which the operator sets; remove it and set spec.image [template-owned]"
        ),
    ),
    "arguments": (
        [main_container("decode", args=["--seed=1"])],
        f"{CONTAINER}.args: replaces the engine's arguments; add yours to spec.decode.extraArgs [template-owned]",
    ),
    "a variable of the operator": (
        [main_container("decode", env=[{"name": "A", "value": "1"}, {"name": "VLLM_HOST_IP", "value": "::1"}])],
        f"{CONTAINER}.env[1]: VLLM_HOST_IP belongs to the operator; remove it [template-owned]",
    ),
    "a Python path from elsewhere": (
        [main_container("decode", env=[{"name": "PYTHONPATH", "valueFrom": {}}])],
        (
            f"{CONTAINER}.env[0]: PYTHONPATH needs a plain value, because the connector's folder is put in front of it "
            "[template-owned]"
        ),
    ),
    "a mount of the operator": (
        [main_container("decode", volumeMounts=[{"name": "x", "mountPath": "/models"}])],
        f"{CONTAINER}.volumeMounts[0]: /models belongs to the operator; mount elsewhere [template-owned]",
    ),
    "a mount of the operator, written in another way": (
        [mounts("/data", "/etc//dcp-kv/")],
        f"{CONTAINER}.volumeMounts[1]: /etc/dcp-kv belongs to the operator; mount elsewhere [template-owned]",
    ),
    "a mount of the operator, with two slashes at its beginning": (
        [mounts("//dcp-connector")],
        f"{CONTAINER}.volumeMounts[0]: /dcp-connector belongs to the operator; mount elsewhere [template-owned]",
    ),
    "a mount below one of the operator": (
        [mounts("/x/../dcp-connector/dcp_connector")],
        f"{CONTAINER}.volumeMounts[0]: /dcp-connector belongs to the operator; mount elsewhere [template-owned]",
    ),
    "a volume of the operator": (
        [pod(volumes=[{"name": "dcp-kv-key", "emptyDir": {}}])],
        (
            "spec.decode.template.spec.volumes[0]: dcp-kv-key is the operator's own volume; choose another name "
            "[template-owned]"
        ),
    ),
    "a container of the operator": (
        [pod(initContainers=[{"name": "connector", "image": "x"}])],
        (
            "spec.decode.template.spec.initContainers[0].name: connector is the operator's own container; choose "
            "another "
            "name [template-owned]"
        ),
    ),
    "a label of the operator": (
        [role("decode", template={"metadata": {"labels": {"dcpdisagg.io/role": "prefill"}}})],
        (
            "spec.decode.template.metadata.labels[dcpdisagg.io/role]: belongs to the operator, as everything under "
            "dcpdisagg.io/; remove it [template-owned]"
        ),
    ),
    "a label that the operator sets for other tools": (
        [role("decode", template={"metadata": {"labels": {"llm-d.ai/role": "both"}}})],
        (
            "spec.decode.template.metadata.labels[llm-d.ai/role]: is set by the operator; remove it, or choose another "
            "label [template-owned]"
        ),
    ),
    "a label that the operator sets on the router's pods": (
        [router(metadata={"labels": {"app.kubernetes.io/name": "gateway"}})],
        (
            "spec.router.template.metadata.labels[app.kubernetes.io/name]: is set by the operator; remove it, or "
            "choose another label [template-owned]"
        ),
    ),
    "another account for the router": (
        [router(spec={"serviceAccountName": "mine"})],
        (
            "spec.router.template.spec.serviceAccountName: is set by the operator for the router; remove it "
            "[template-owned]"
        ),
    ),
    "a router without its account's token": (
        [router(spec={"automountServiceAccountToken": False})],
        (
            "spec.router.template.spec.automountServiceAccountToken: false would keep the router from seeing the "
            "engines' pods; remove it [template-owned]"
        ),
    ),
    "a router that is not restarted": (
        [router(spec={"restartPolicy": "OnFailure"})],
        'spec.router.template.spec.restartPolicy: "OnFailure" ends the router for good; remove it [template-owned]',
    ),
    "an engine that is not restarted": (
        [pod(restartPolicy="Never")],
        'spec.decode.template.spec.restartPolicy: "Never" ends the engine for good; remove it [template-owned]',
    ),
    "arguments of the router": (
        [{"spec": {"router": {"template": {"spec": {"containers": [{"name": "main", "args": ["--x"]}]}}}}}],
        (
            "spec.router.template.spec.containers[0].args: is set by the operator for the router; remove it "
            "[template-owned]"
        ),
    ),
    "a request above its limit": (
        [main_container("decode", resources={"limits": {"memory": "1Gi"}, "requests": {"memory": "1.5Gi"}})],
        (
            f'{CONTAINER}.resources.requests[memory]: "1.5Gi" is above the limit "1Gi"; nearest that works: "1Gi" '
            "[requests-within-limits]"
        ),
    ),
    "a grace period below drain and lease": (
        [pod(terminationGracePeriodSeconds=30)],
        (
            "spec.decode.template.spec.terminationGracePeriodSeconds: 30 is below the 180 that draining (60) and the "
            "transfer lease (120) take together; nearest that works: 180, or leave it out [grace-covers-drain]"
        ),
    ),
    "a grace period below a lease that was set": (
        [pod(terminationGracePeriodSeconds=180), {"spec": {"kvConnector": {"extraConfig": {"lease_s": 200}}}}],
        (
            "spec.decode.template.spec.terminationGracePeriodSeconds: 180 is below the 260 that draining (60) and the "
            "transfer lease (200) take together; nearest that works: 260, or leave it out [grace-covers-drain]"
        ),
    ),
    "an odd unit": (
        [main_container("decode", resources={"limits": {"memory": "16GB"}})],
        (
            f'{CONTAINER}.resources.limits[memory]: found "16GB", which has the unknown unit GB; known ones are Ki, '
            "Mi, Gi, "
            "Ti, Pi, Ei, k, M, G, T, P, E, m, u, n [template-shape]"
        ),
    ),
    "no number at all": (
        [main_container("decode", resources={"limits": {"memory": "lots"}})],
        (
            f'{CONTAINER}.resources.limits[memory]: found "lots", which must be a quantity such as 500m, 4 or 16Gi, a '
            "number "
            "and one of Ki, Mi, Gi, Ti, Pi, Ei, k, M, G, T, P, E, m, u, n [template-shape]"
        ),
    ),
    "a negative amount": (
        [main_container("decode", resources={"limits": {"cpu": "-1"}})],
        f'{CONTAINER}.resources.limits[cpu]: found "-1", must not be negative [template-shape]',
    ),
    "containers as a map": (
        [pod(containers={"main": {}})],
        'spec.decode.template.spec.containers: found a map ({"main": {}}), must be a list of maps [template-shape]',
    ),
    "a container without a name": (
        [pod(containers=[{"image": "x"}])],
        f"{CONTAINER}: has no name, by which it is told apart from the others [template-shape]",
    ),
    "two containers of one name": (
        [pod(containers=[{"name": "a"}, {"name": "a"}])],
        "spec.decode.template.spec.containers[1]: has the name a, which another one has too [template-shape]",
    ),
    "a variable that is no map": (
        [main_container("decode", env=["A=1"])],
        f'{CONTAINER}.env[0]: found a string ("A=1"), must be a map [template-shape]',
    ),
    "a port that is no number": (
        [main_container("decode", ports=[{"containerPort": "http"}])],
        f'{CONTAINER}.ports[0].containerPort: found "http", must be a whole number [template-shape]',
    ),
    "a spec that is no map": (
        [role("decode", template={"spec": []})],
        "spec.decode.template.spec: found a list ([]), must be a map [template-shape]",
    ),
    "a label that is no string": (
        [role("decode", template={"metadata": {"labels": {"a": 1}}})],
        'spec.decode.template.metadata.labels: found a map ({"a": 1}), must be a map of strings [template-shape]',
    ),
    "a grace period that is no number": (
        [pod(terminationGracePeriodSeconds="5m")],
        (
            'spec.decode.template.spec.terminationGracePeriodSeconds: found a string ("5m"), must be a whole number '
            "of 0 or "
            "more [template-shape]"
        ),
    ),
    "a router template of the wrong shape": (
        [{"spec": {"router": {"template": {"spec": {"containers": [1]}}}}}],
        "spec.router.template.spec.containers[0]: found a whole number (1), must be a map [template-shape]",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(changes, message):
    assert message in violations(*changes)


WARNED = {
    "a misspelt field": (
        [pod(toleration=[])],
        (
            "spec.decode.template.spec.toleration: is no field that Kubernetes has here; did you mean tolerations? "
            "[template-shape]"
        ),
    ),
}


@pytest.mark.parametrize(("changes", "message"), WARNED.values(), ids=WARNED.keys())
def test_warns(changes, message):
    verdict = report(*changes)
    assert verdict.allowed
    assert message in map(str, verdict.warnings)


ALLOWED = {
    "a command of one's own": [main_container("decode", command=["/opt/engine/bin/python3", "-m", "server"])],
    "the right number of accelerators": [main_container("decode", resources={"limits": {"nvidia.com/gpu": "8"}})],
    "the image repeated": [main_container("decode", image="vllm/vllm-openai:v0.33.0")],
    "a Python path of one's own": [main_container("decode", env=[{"name": "PYTHONPATH", "value": "/plugins"}])],
    "a sidecar": [pod(containers=[{"name": "logs", "image": "x", "args": ["--all"]}])],
    "an engine class, selectors and volumes": [
        pod(
            runtimeClassName="nvidia",
            nodeSelector={"gpu": "h200"},
            tolerations=[{"operator": "Exists"}],
            volumes=[{"name": "cache", "emptyDir": {}}],
            containers=[{"name": "main", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}],
        )
    ],
    "mounts beside those of the operator": [mounts("/models-cache", "/etc/dcp-kv-other", "/data/models")],
    "labels and an annotation of one's own": [
        role(
            "decode",
            template={
                "metadata": {
                    "labels": {"team": "chat", "app.kubernetes.io/part-of": "shop"},
                    "annotations": {"app.kubernetes.io/name": "shop"},
                }
            },
        )
    ],
    "an engine's own account": [pod(serviceAccountName="mine", automountServiceAccountToken=False)],
    "volumes and a container of the router that engines could not have": [
        router(spec={"volumes": [{"name": "model"}], "containers": [{"name": "connector", "image": "x"}]})
    ],
    "requests within limits": [
        main_container("decode", resources={"limits": {"memory": "1Gi", "cpu": 4}, "requests": {"memory": "1024Mi"}})
    ],
    "a long grace period": [pod(terminationGracePeriodSeconds=600)],
    "nulls": [pod(containers=None, volumes=None)],
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_allows_without_a_word(changes):
    verdict = report(*changes)
    assert (verdict.violations, verdict.warnings) == ((), ())
