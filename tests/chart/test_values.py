"""values.yaml and its schema: wrong values are refused with the value's path, every value is documented."""

import json
from typing import Any

import pytest
import yaml

from tests.support.helm import CHART, refusal

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt key": ({"watchNamespace": ["a"]}, "watchNamespace"),
    "a misspelt nested key": ({"image": {"repo": "x"}}, "repo"),
    "namespaces as one string": ({"watchNamespaces": "a,b"}, "/watchNamespaces"),
    "a namespace that can't exist": ({"watchNamespaces": ["Models"]}, "/watchNamespaces/0"),
    "an unknown pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    "a digest in place of a tag": ({"image": {"tag": "sha256:abc"}}, "/image/tag"),
    "an empty repository": ({"image": {"repository": ""}}, "/image/repository"),
    "no webhook pod": ({"webhook": {"replicas": 0}}, "/webhook/replicas"),
    "a fraction of a webhook pod": ({"webhook": {"replicas": 1.5}}, "/webhook/replicas"),
    "a timeout beyond what Kubernetes takes": ({"webhook": {"timeoutSeconds": 31}}, "/webhook/timeoutSeconds"),
    "a label that isn't a string": ({"podLabels": {"a": 1}}, "/podLabels/a"),
    "a node selector that isn't a map": ({"nodeSelector": ["a"]}, "/nodeSelector"),
    "an authority that isn't PEM": ({"webhook": {"certificate": {"caBundle": "abc"}}}, "/webhook/certificate/caBundle"),
    "a toleration with an unknown effect": ({"tolerations": [{"effect": "Never"}]}, "/tolerations/0/effect"),
    "a pull secret without a name": ({"imagePullSecrets": [{}]}, "/imagePullSecrets/0"),
    "a model without heads": (
        {"catalogue": {"models": [{"names": ["a/b"], "attention": "mla", "layers": 1}]}},
        "/catalogue/models/0",
    ),
    "a misspelt fact of a model": (
        {
            "catalogue": {
                "models": [
                    {"names": ["a"], "attention": "gqa", "attentionHeads": 8, "kvHeads": 1, "layer": 1, "layers": 1}
                ]
            }
        },
        "layer",
    ),
    "two sources of models": (
        {
            "catalogue": {
                "existingConfigMap": "m",
                "models": [{"names": ["a"], "attention": "gqa", "attentionHeads": 8, "kvHeads": 1, "layers": 1}],
            }
        },
        "catalogue: models and existingConfigMap are both given; use one of them",
    ),
    "a renewal before the certificate begins": (
        {"webhook": {"certificate": {"validityDays": 30, "renewBeforeDays": 30}}},
        "webhook.certificate.renewBeforeDays: 30 is not less than webhook.certificate.validityDays 30",
    ),
}


@pytest.mark.parametrize(("values", "said"), REFUSED.values(), ids=REFUSED)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    message = refusal(values)
    assert said in message or said.replace("/", ".").lstrip(".") in message, message


def test_schema_and_values_know_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(described: dict[str, Any], given: dict[str, Any], path: str) -> None:
        # `global` is what Helm adds by itself.
        assert set(described["properties"]) - {"global"} == set(given), path
        for key, value in given.items():
            inner = described["properties"][key]
            if isinstance(value, dict) and "properties" in inner:
                compare(inner, value, f"{path}.{key}")

    compare(schema, values, "values")
