"""The objects by the schemas of Kubernetes, and the text by a parser of YAML."""

from __future__ import annotations

from typing import Any

import pytest

from oneaccord.api import Ask, WholeJob
from oneaccord_kubernetes.config import KubernetesConfig
from oneaccord_kubernetes.manifest import Manifest
from oneaccord_kubernetes.yaml_text import as_yaml

pytestmark = pytest.mark.engines

ALL = {
    "gpus_per_host": 2,
    "cpu": "8",
    "memory": "64Gi",
    "folder": "/app",
    "namespace": "team",
    "service_account": "a",
    "pull_secrets": ("b",),
    "node_selector": ("c=d",),
    "labels": ("e=f",),
    "timeout_s": 60,
}


def objects(kind: str = "job", *, may_go_on: bool = False, **options: Any) -> list[dict[str, Any]]:
    config = KubernetesConfig(image="x", kind=kind, **options)
    words = ("--", "x.py", "yes", "1e3", "0x1", "a: b # c", "ä\u2028\x7f\U0001f600", "~", "- x", " ", "\n", "é" * 200)
    return Manifest(config, Ask(4, per_host=2), WholeJob(words, {"ONEACCORD_LOG": "no"}, may_go_on=may_go_on)).objects()


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(27, 38)])
def test_kubernetes_objects_are_valid(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    elastic = () if version == "1.27" else objects(may_go_on=True)  # which 1.28 brings
    for each in (*objects(), *objects(**ALL), *elastic):
        validate(each, version, strict=True)
    wrong = objects()[-1]
    wrong["spec"]["template"]["spec"]["subDomain"] = "x"
    with pytest.raises(Exception, match="subDomain"):
        validate(wrong, version, strict=True)


def test_kubernetes_jobset_is_valid() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kind = next(getattr(models, name) for name in dir(models) if name.lower().endswith("jobsetspec"))
    spec = objects("jobset", restarts=2)[-1]["spec"]
    found = kind.from_dict(spec)
    assert (found.failure_policy.max_restarts, found.replicated_jobs[0].name) == (2, "ranks")
    assert set(found.to_dict()) == set(spec)
    pytest.importorskip("kubernetes_validate").validate(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x"},
            "spec": spec["replicatedJobs"][0]["template"]["spec"],
        },
        "1.37",
        strict=True,
    )


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_kubernetes_text_means_the_objects(kind: str) -> None:
    yaml = pytest.importorskip("yaml")
    made = objects(kind, **ALL)
    assert list(yaml.safe_load_all(as_yaml(made))) == made
