"""The objects of a job, as plain data."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any, Final

from oneaccord.api import Ask, UsageError, Variable, WholeJob, of_setting
from oneaccord_kubernetes.config import KubernetesConfig, pair

__all__ = ["CONTAINER", "INDEX", "Manifest", "hosts_of"]

CONTAINER: Final = "ranks"
"""The name of the container of each pod."""
INDEX: Final = "batch.kubernetes.io/job-completion-index"
"""The annotation of a pod with its number."""
_PORT: Final = 29500
"""Each pod has an address of its own, so that no two jobs share the port."""
_MEET_S: Final = 600
"""How long the ranks of the first pod wait for those of the last: nodes pull an image one sooner than another."""
_LONGEST: Final = 63


def hosts_of(ask: Ask, config: KubernetesConfig) -> tuple[int, int]:
    """Return how many pods a job has, and how many ranks each of them.

    Raises
    ------
    UsageError
        The ranks do not share the pods evenly, or a pod has more of them than GPUs.
    """
    gpus = config.gpus_per_host
    each = ask.per_host or min(gpus or 1, ask.ranks)
    if ask.ranks % each:
        raise UsageError(
            f"{ask.ranks} ranks in pods of {each} leave {ask.ranks % each} over, and all pods of a job are alike: choose --per-host so that it divides -n"
        )
    wanted = each * (ask.gpus or 1)
    if (gpus or ask.gpus) and wanted > gpus:
        raise UsageError(
            f"{each} ranks in a pod need {wanted} GPUs, and it has {gpus}: give --option gpus_per_host={wanted}, or a smaller --per-host"
        )
    return ask.ranks // each, each


class Manifest:
    """The objects of a job.

    Parameters
    ----------
    config
        The options.
    ask, job
        The job.

    Attributes
    ----------
    name, hosts, per_host
        The name of all objects, the number of pods, and the ranks of each.

    Raises
    ------
    UsageError
        As for `hosts_of`; or the name is too long for that many pods.
    """

    def __init__(self, config: KubernetesConfig, ask: Ask, job: WholeJob) -> None:
        hosts, per_host = hosts_of(ask, config)
        self.hosts: int = hosts
        self.per_host: int = per_host
        self.name: str = config.name or f"oneaccord-{secrets.token_hex(4)}"
        self._config, self._job = config, job
        longest = len(f"{self._hosts_prefix()}{self.hosts - 1}-xxxxx")  # Kubernetes makes the pod's name of it
        if longest > _LONGEST:
            raise UsageError(
                f"the name {self.name!r} is {longest - _LONGEST} letters too long for the names of {self.hosts} pods: give a shorter one by --option name="
            )
        if job.may_go_on and config.kind == "jobset":
            raise UsageError(
                "a JobSet ends all pods when one fails, so that no rank can continue: leave kind=jobset out, or --max-restarts, --min-ranks and --keep-going"
            )

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all objects; the first two find the pods."""
        own = {"app.kubernetes.io/instance": self.name, "app.kubernetes.io/managed-by": "oneaccord"}
        return {**dict(map(pair, self._config.labels)), **own}

    @property
    def selector(self) -> str:
        """What selects the pods in a list."""
        return f"app.kubernetes.io/instance={self.name},app.kubernetes.io/managed-by=oneaccord"

    def objects(self) -> list[dict[str, Any]]:
        """Return all objects, in an order in which each finds what it needs."""
        return [*self.belongings(), self.workload()]

    def belongings(self, owner: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return what the pods need: the Secret, and the Service by which they find each other.

        Parameters
        ----------
        owner
            The job as the cluster has it, with which they are removed.
        """
        found: list[dict[str, Any]] = []
        if self._config.secret_name is None:
            found.append(
                {**self._head("v1", "Secret", owner), "type": "Opaque", "stringData": {"secret": secrets.token_hex(32)}}
            )
        if self._config.kind == "job":  # a JobSet makes its own
            spec = {
                "clusterIP": "None",
                # The ranks meet before any pod is ready.
                "publishNotReadyAddresses": True,
                "selector": {"app.kubernetes.io/instance": self.name, "app.kubernetes.io/managed-by": "oneaccord"},
                "ports": [{"name": "ranks", "port": _PORT}],
            }
            found.append({**self._head("v1", "Service", owner), "spec": spec})
        return found

    def workload(self) -> dict[str, Any]:
        """Return the Job, or the JobSet."""
        config = self._config
        if config.kind == "job":
            return {**self._head("batch/v1", "Job"), "spec": {"ttlSecondsAfterFinished": config.ttl_s, **self._job_spec()}}
        spec = {
            "ttlSecondsAfterFinished": config.ttl_s,
            "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": config.restarts},
            "replicatedJobs": [
                {"name": "ranks", "replicas": 1, "template": {"metadata": {"labels": self.labels}, "spec": self._job_spec()}}
            ],
        }
        return {**self._head("jobset.x-k8s.io/v1alpha2", "JobSet"), "spec": spec}

    def _head(self, version: str, kind: str, owner: Mapping[str, Any] | None = None) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": self.name, "labels": self.labels}
        if self._config.namespace is not None:
            metadata["namespace"] = self._config.namespace
        if owner is not None:
            about = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
            metadata["ownerReferences"] = [{"apiVersion": owner["apiVersion"], "kind": owner["kind"], **about}]
        return {"apiVersion": version, "kind": kind, "metadata": metadata}

    def _hosts_prefix(self) -> str:
        return f"{self.name}-" if self._config.kind == "job" else f"{self.name}-ranks-0-"

    def _job_spec(self) -> dict[str, Any]:
        job, config = self._job, self._config
        spec: dict[str, Any] = {"completions": self.hosts, "parallelism": self.hosts, "completionMode": "Indexed"}
        if job.may_go_on:
            # A pod whose ranks have all failed is started again, and the other pods continue without it.
            spec["backoffLimitPerIndex"] = job.max_restarts
        else:
            spec["backoffLimit"] = 0  # the first pod that fails, or is lost, ends the job
        if config.timeout_s is not None:
            spec["activeDeadlineSeconds"] = config.timeout_s
        spec["template"] = {"metadata": {"labels": self.labels}, "spec": self._pod_spec()}
        return spec

    def _pod_spec(self) -> dict[str, Any]:
        config = self._config
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            # More than the ranks may take, so that their launcher has the time to say where they were.
            "terminationGracePeriodSeconds": math.ceil(self._job.grace_s) + 10,
            "automountServiceAccountToken": config.service_account is not None,
            "enableServiceLinks": False,  # variables named after the services of the namespace are no help to a program
        }
        if config.kind == "job":
            spec["subdomain"] = self.name
        if config.service_account is not None:
            spec["serviceAccountName"] = config.service_account
        if config.node_selector:
            spec["nodeSelector"] = dict(map(pair, config.node_selector))
        if config.pull_secrets:
            spec["imagePullSecrets"] = [{"name": each} for each in config.pull_secrets]
        # The /dev/shm of a container holds 64 MiB, which ranks of one pod soon fill.
        spec["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        spec["containers"] = [self._container()]
        return spec

    def _container(self) -> dict[str, Any]:
        config = self._config
        amounts = {"cpu": config.cpu, "memory": config.memory, config.gpu_resource: str(config.gpus_per_host or "") or None}
        resources = {name: amount for name, amount in amounts.items() if amount is not None}
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": config.image,
            "command": self._command(),
            "env": self._environ(),
        }
        if config.folder is not None:
            container["workingDir"] = config.folder
        container["ports"] = [{"containerPort": _PORT, "name": "ranks"}]
        if resources:
            container["resources"] = {"requests": resources, "limits": resources}
        container["securityContext"] = {"allowPrivilegeEscalation": False}
        container["terminationMessagePolicy"] = "FallbackToLogsOnError"
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - where shared memory lies
        return container

    def _command(self) -> list[str]:
        run = [self._config.python, "-P", "-m", "oneaccord", "run"]
        layout = ["-n", str(self.per_host), "--nnodes", str(self.hosts), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
        meeting = ["--rendezvous", f"{self._hosts_prefix()}0.{self.name}:{_PORT}"]
        return [*map(_literal, run), *layout, *meeting, *map(_literal, self._job.words)]

    def _environ(self) -> list[dict[str, Any]]:
        given = {of_setting("rendezvous", "timeout_s"): str(_MEET_S), **self._job.environ}
        found: list[dict[str, Any]] = [
            {"name": name, "value": _literal(value)} for name, value in given.items() if name != Variable.SECRET
        ]
        if Variable.RUN_ID not in given:
            # One for each attempt: ranks that an earlier one has left behind cannot join.
            field = {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
            found.append({"name": str(Variable.RUN_ID), "valueFrom": {"fieldRef": field}})
        reference = {"name": self._config.secret_name or self.name, "key": "secret"}
        return [*found, {"name": str(Variable.SECRET), "valueFrom": {"secretKeyRef": reference}}]


def _literal(word: str) -> str:
    """Return a word as Kubernetes passes it on unchanged: it would replace ``$(NAME)``, and ``$$`` by one of them."""
    return word.replace("$", "$$")
