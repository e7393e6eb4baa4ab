"""LeaderWorkerSet in the local cluster: what its webhooks and its controller are told."""

import base64
from pathlib import Path

import yaml

from devcluster import gobuild, groups

WEBHOOKS = """
kind: MutatingWebhookConfiguration
metadata: {name: mutating-webhook-configuration}
webhooks:
- name: sets
  clientConfig: {service: {name: webhook-service, namespace: system, path: /mutate-sets}}
  rules: [{resources: [leaderworkersets]}]
- name: pods
  clientConfig: {service: {name: webhook-service, namespace: system, path: /mutate-pods}}
  rules: [{resources: [pods]}]
"""


def test_the_webhooks_are_asked_at_the_bridge_and_about_no_pods_but_those_of_groups(tmp_path: Path) -> None:
    (tmp_path / "webhooks.yaml").write_text(WEBHOOKS)
    (found,) = groups.webhooks(tmp_path, 12345, b"authority")
    of_sets, of_pods = found["webhooks"]
    assert found["metadata"]["name"] == "lws-mutating-webhook-configuration"
    assert of_sets["clientConfig"] == {
        "url": "https://10.244.0.1:12345/mutate-sets",
        "caBundle": base64.b64encode(b"authority").decode(),
    }
    assert "objectSelector" not in of_sets
    (selected,) = of_pods["objectSelector"]["matchExpressions"]
    assert selected == {"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}


def test_the_controller_listens_on_this_machine_only_and_makes_no_certificates(tmp_path: Path) -> None:
    said = yaml.safe_load(groups.configuration(tmp_path, 1, 2))
    assert said["webhook"] == {"host": "10.244.0.1", "port": 1, "certDir": str(tmp_path)}
    assert said["health"] == {"healthProbeBindAddress": "127.0.0.1:2"}
    assert said["internalCertManagement"] == {"enable": False}


def test_files_that_are_kept_beside_a_program_are_part_of_what_its_folder_is_called_by() -> None:
    key = gobuild.module_key(b"mod", b"sum", "go1.26", "-s")
    assert gobuild.module_key(b"mod", b"sum", "go1.26", "-s", ("a.yaml",)) != key
    assert gobuild.module_key(b"mod", b"sum", "go1.26", "-s", ()) == key
