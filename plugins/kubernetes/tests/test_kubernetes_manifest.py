"""The objects that the launcher writes, and what it refuses: without the client, and without a cluster."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from oneaccord.api import Ask, LauncherSpec, UsageError, WholeJob, launch
from oneaccord_kubernetes.config import KubernetesConfig
from oneaccord_kubernetes.manifest import Manifest
from oneaccord_kubernetes.plugin import register_launchers
from oneaccord_kubernetes.yaml_text import as_yaml

JOB = WholeJob(("--backend=tcp", "--", "train.py", "$(HOME)", "a$$b"), {"ONEACCORD_LOG": "$x"})


PAIRS = Ask(4, per_host=2)


def manifest(ask: Ask = PAIRS, job: WholeJob = JOB, **options: Any) -> Manifest:
    return Manifest(KubernetesConfig(**{"image": "registry.example/train:1", "name": "digits", **options}), ask, job)


def pod(made: Manifest) -> dict[str, Any]:
    spec: dict[str, Any] = made.workload()["spec"]
    return spec["template"]["spec"]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ONEACCORD_")}
    command = [sys.executable, "-m", "oneaccord", "run", "--on", "kubernetes", *words]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=60)


def test_kubernetes_command_starts_one_launcher_in_each_pod() -> None:
    (container,) = pod(manifest())["containers"]
    layout = (
        "python3 -P -m oneaccord run -n 2 --nnodes 2 --node-rank $(JOB_COMPLETION_INDEX) --rendezvous digits-0.digits:29500"
    )
    # Kubernetes would replace what a user means as it is written.
    assert container["command"] == [*layout.split(), "--backend=tcp", "--", "train.py", "$$(HOME)", "a$$$$b"]
    assert {"name": "ONEACCORD_LOG", "value": "$$x"} in container["env"]


def test_kubernetes_secret_is_only_in_its_object() -> None:
    made = manifest()
    objects = made.objects()
    assert [each["kind"] for each in objects] == ["Secret", "Service", "Job"]
    secret = objects[0]["stringData"]["secret"]
    assert len(secret) == 64
    assert secret not in str(objects[1:])
    (variable,) = [each for each in pod(made)["containers"][0]["env"] if each["name"] == "ONEACCORD_SECRET"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "digits", "key": "secret"}}
    assert manifest().objects()[0]["stringData"]["secret"] != secret
    theirs = manifest(secret_name="mine", job=WholeJob(("--", "x.py"), {"ONEACCORD_SECRET": "leaks"}))
    assert [each["kind"] for each in theirs.objects()] == ["Service", "Job"]
    assert "leaks" not in str(theirs.objects())


def test_kubernetes_one_dead_pod_ends_the_job_unless_it_is_elastic() -> None:
    spec = manifest(timeout_s=60).workload()["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (0, 60, 600)
    elastic = manifest(job=WholeJob(("--", "x.py"), {}, 45.5, may_go_on=True, max_restarts=3))
    spec = elastic.workload()["spec"]
    assert (spec["backoffLimitPerIndex"], "backoffLimit" in spec, "activeDeadlineSeconds" in spec) == (3, False, False)
    assert pod(elastic)["terminationGracePeriodSeconds"] == 56
    with pytest.raises(UsageError, match="a JobSet ends all pods when one fails"):
        manifest(job=elastic._job, kind="jobset")


def test_kubernetes_options_reach_the_pods() -> None:
    made = manifest(
        gpus_per_host=2,
        cpu="500m",
        memory="1.5Gi",
        namespace="team",
        folder="/app",
        python="/opt/bin/python",
        service_account="trainer",
        pull_secrets=("pull",),
        node_selector=("gpu.example/kind=a",),
        labels=("kueue.x-k8s.io/queue-name=q", "empty="),
    )
    spec = pod(made)
    (container,) = spec["containers"]
    amounts = {"cpu": "500m", "memory": "1.5Gi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert (container["workingDir"], container["command"][0], container["image"]) == (
        "/app",
        "/opt/bin/python",
        "registry.example/train:1",
    )
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("trainer", True)
    assert (spec["imagePullSecrets"], spec["nodeSelector"]) == ([{"name": "pull"}], {"gpu.example/kind": "a"})
    assert not pod(manifest())["automountServiceAccountToken"]
    for each in made.objects():
        assert each["metadata"]["namespace"] == "team"
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert made.objects()[1]["spec"]["selector"].items() <= made.workload()["spec"]["template"]["metadata"]["labels"].items()


def test_kubernetes_jobset_has_one_replicated_job() -> None:
    made = manifest(kind="jobset", restarts=2)
    assert [each["kind"] for each in made.objects()] == ["Secret", "JobSet"]
    spec = made.workload()["spec"]
    assert (spec["failurePolicy"], spec["network"]["subdomain"]) == ({"maxRestarts": 2}, "digits")
    (job,) = spec["replicatedJobs"]
    command = job["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--rendezvous") + 1] == "digits-ranks-0-0.digits:29500"


@pytest.mark.parametrize(
    ("ask", "gpus", "layout"),
    [
        (Ask(8, per_host=4), 0, (2, 4)),
        (Ask(8), 4, (2, 4)),
        (Ask(2), 4, (1, 2)),
        (Ask(3), 0, (3, 1)),
    ],
)
def test_kubernetes_pods_take_as_many_ranks_as_gpus(ask: Ask, gpus: int, layout: tuple[int, int]) -> None:
    made = manifest(ask, gpus_per_host=gpus)
    assert (made.hosts, made.per_host) == layout


@pytest.mark.parametrize(
    ("ask", "options", "words"),
    [
        (Ask(7, per_host=4), {}, "7 ranks in pods of 4 leave 3 over"),
        (Ask(8, per_host=4), {"gpus_per_host": 2}, "4 ranks in a pod need 4 GPUs, and it has 2: give --option gpus_per_host=4"),
        (Ask(4, per_host=2, gpus=2), {"gpus_per_host": 3}, "2 ranks in a pod need 4 GPUs, and it has 3"),
        (Ask(4, per_host=1), {"name": "a" * 56}, "1 letters too long for the names of 4 pods"),
    ],
)
def test_kubernetes_what_does_not_fit_is_refused(ask: Ask, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        manifest(ask, **options)
    assert manifest(Ask(4, per_host=1), name="a" * 55).hosts == 4


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"image": ""}, "name the image that holds oneaccord"),
        ({"image": "a b"}, "name the image that holds oneaccord"),
        ({"name": "A"}, "'A' is no name of Kubernetes: write at most 63"),
        ({"name": "1a"}, "'1a' is no name of a Service: begin with a letter"),
        ({"name": "a\n"}, "is no name of Kubernetes"),
        ({"namespace": "team.a"}, "'team.a' is no name of Kubernetes"),
        ({"secret_name": "a..b"}, "'a..b' is no name of Kubernetes"),
        ({"memory": "16 GB"}, "'16 GB' is no amount of Kubernetes"),
        ({"cpu": "0"}, "'0' is no amount of Kubernetes"),
        ({"labels": ("a",)}, "'a' is no label of Kubernetes"),
        ({"labels": ("-a=b",)}, "'-a=b' is no label of Kubernetes"),
        ({"labels": ("/a=b",)}, "'/a=b' is no label of Kubernetes"),
        ({"kind": "pod"}, "Input should be 'job' or 'jobset'"),
        ({"restarts": "1"}, "a Job cannot begin all its pods anew: give kind=jobset too"),
        ({"gpus_per_host": "-1"}, "greater than or equal to 0"),
        ({"nope": "1"}, "Extra inputs are not permitted"),
    ],
)
def test_kubernetes_wrong_option_is_told(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        manifest(**option)


def test_kubernetes_wrong_words_of_run_are_told(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "--option", "image=x", "--option", "name=A", "x.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: options of on='kubernetes': name: Value error, 'A' is no name of Kubernetes")


def test_kubernetes_manifest_is_written_without_a_cluster(tmp_path: Path) -> None:
    words = ["-n", "4", "--per-host", "2", "--option", "image=x", "--option", "name=digits"]
    run_words = ["--grace", "5", "--no-prefix", "--max-restarts", "2", "--config", "here.toml", "-m", "train", "--epochs", "3"]
    done = run(tmp_path, *words, "--option", "manifest=-", *run_words)
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("--config=here.toml", "--grace=5.0", "--max-restarts=2", "--no-prefix", "--module", "--"):
        assert f'- "{line}"\n' in done.stdout
    assert '- "--"\n            - train\n            - "--epochs"\n            - "3"\n' in done.stdout
    assert "backoffLimitPerIndex: 2\n" in done.stdout
    done = run(tmp_path, *words, "--option", "manifest=job.yaml", "train.py")
    assert (done.returncode, done.stdout) == (0, "")
    assert "submit it by: kubectl apply -f job.yaml" in done.stderr
    assert stat.S_IMODE((tmp_path / "job.yaml").stat().st_mode) == 0o600
    done = run(tmp_path, *words, "--option", "manifest=none/job.yaml", "train.py")
    assert (done.returncode, "the objects cannot be written to none/job.yaml" in done.stderr) == (2, True)


def test_kubernetes_yaml_quotes_what_yaml_would_change() -> None:
    value = {"a": ["yes", "1", "x: y", "", "ä\u2028", {"b": {}, "c": [1, True]}, []], "n": None}
    assert as_yaml([value]) == (
        '---\na:\n  - "yes"\n  - "1"\n  - "x: y"\n  - ""\n  - "ä\\u2028"\n  - b: {}\n    c:\n      - 1\n      - true\n  - []\n"n": null\n'
    )


def test_kubernetes_functions_are_refused() -> None:
    with pytest.raises(UsageError, match="has no way to send a function to them: put the function in a script"):
        launch(print, 2, on="kubernetes", options={"image": "x"})


def probe() -> str | None:
    (spec,) = register_launchers()
    assert isinstance(spec, LauncherSpec)
    return spec.probe()


def test_kubernetes_probe_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneaccord_kubernetes.plugin.find_spec", lambda name: None)
    assert "there is no package kubernetes" in (probe() or "")
    monkeypatch.setattr("oneaccord_kubernetes.plugin.find_spec", lambda name: name)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none{os.pathsep}{tmp_path}/config")
    assert "there is no kubeconfig" in (probe() or "")
    (tmp_path / "config").touch()
    assert probe() is None
