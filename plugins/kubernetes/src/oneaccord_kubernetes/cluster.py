"""The cluster, by the official client: objects in, pods and their output out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from oneaccord.api import BackendUnavailableError, ConfigError, RendezvousError
from oneaccord_kubernetes.config import KubernetesConfig
from oneaccord_kubernetes.manifest import CONTAINER, INDEX, Manifest
from oneaccord_kubernetes.places import kubeconfig, service_account

__all__ = ["Cluster", "Gone", "Pod", "State"]

_CALL_S: Final = (5.0, 30.0)
_SILENCE_S: Final = 300.0
"""After how long a connection without output is opened anew: a proxy between may have forgotten it."""
_NO_SUCH: Final = 404
_REFUSED: Final = frozenset({400, 401, 403, 404, 405, 409, 422})


class Gone(Exception):
    """What was asked for is not, or no more, there."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the job, as the cluster last showed it.

    Attributes
    ----------
    name, uid, index, born
        Its name, which another one may have later; its own mark; its number in the job; and when it was made, as text that sorts.
    began
        Whether its container runs, or has run.
    code
        The exit code of its container; None before its end.
    ended
        When it ended, as text that sorts; empty if it did not, or if nothing is known.
    why
        The words of Kubernetes about its state; empty if it has none.
    is_hopeless
        Whether it waits for what does not come by itself, such as an image that does not exist.
    """

    name: str
    uid: str
    index: int
    born: str
    began: bool = False
    code: int | None = None
    ended: str = ""
    why: str = ""
    is_hopeless: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """How a job has ended: well or not, with the reason and the words of Kubernetes."""

    is_good: bool
    reason: str = ""
    message: str = ""


class Cluster:
    """A namespace of a cluster.

    Parameters
    ----------
    config
        The options of the launcher.

    Raises
    ------
    BackendUnavailableError
        The client is not installed.
    ConfigError
        Nothing says where the cluster is.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        try:
            from kubernetes import client
            from kubernetes.client.exceptions import ApiException
        except ImportError as error:
            raise BackendUnavailableError(
                f"the launcher 'kubernetes' cannot submit a job here, as the package kubernetes cannot be imported ({error}): pip install "
                "'oneaccord[kubernetes]', or write the objects for kubectl by --option manifest=FILE"
            ) from error
        self._errors: Any = ApiException
        settings, namespace = _settings(config.context)
        self.namespace: str = config.namespace or namespace
        api = client.ApiClient(settings)
        self._core, self._batch, self._custom = client.CoreV1Api(api), client.BatchV1Api(api), client.CustomObjectsApi(api)
        self._is_set = config.kind == "jobset"

    def submit(self, manifest: Manifest) -> None:
        """Create the objects of a job: the workload first, so that the others belong to it from the start and are removed with it.

        Raises
        ------
        ConfigError
            The cluster refuses one of them, in its words; what was created is deleted.
        RendezvousError
            The cluster cannot be reached.
        """
        body = manifest.workload()
        if self._is_set:
            made = self._call(self._custom.create_namespaced_custom_object, *self._sets(), body=body)
            uid = made["metadata"]["uid"]
        else:
            uid = self._call(self._batch.create_namespaced_job, self.namespace, body=body).metadata.uid
        try:
            owner = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": {"name": manifest.name, "uid": uid}}
            for each in manifest.belongings(owner):
                create = (
                    self._core.create_namespaced_secret if each["kind"] == "Secret" else self._core.create_namespaced_service
                )
                self._call(create, self.namespace, body=each)
        except BaseException:
            with contextlib.suppress(Gone, ConfigError, RendezvousError):
                self.delete(manifest.name)
            raise

    def pods(self, manifest: Manifest) -> list[Pod]:
        """Return the pods of a job."""
        answer = self._call(self._core.list_namespaced_pod, self.namespace, label_selector=manifest.selector)
        return [_as_pod(each) for each in answer.items]

    def state(self, name: str) -> State | None:
        """Return how the job has ended; None while it lasts.

        Raises
        ------
        Gone
            There is no such job any more.
        """
        if self._is_set:
            found = self._call(self._custom.get_namespaced_custom_object, *self._sets(), name)
            conditions = found.get("status", {}).get("conditions") or []
        else:
            status = self._call(self._batch.read_namespaced_job, name, self.namespace).status
            conditions = [each.to_dict() for each in (status and status.conditions) or []]
        for each in conditions:
            # A Job says Complete, and a JobSet Completed.
            if each["status"] == "True" and each["type"] in ("Complete", "Completed", "Failed"):
                return State(each["type"] != "Failed", each.get("reason") or "", each.get("message") or "")
        return None

    def output(self, name: str, since_s: int | None) -> Iterator[bytes]:
        """Yield the output of a pod in pieces, each line behind its time, until it ends.

        Parameters
        ----------
        name
            The pod.
        since_s
            From how many seconds ago on; None from the beginning.

        Raises
        ------
        Gone
            There is no such pod any more.
        RendezvousError
            The connection broke.
        """
        from urllib3.exceptions import HTTPError

        more = {} if since_s is None else {"since_seconds": since_s}
        asked = {"container": CONTAINER, "follow": True, "timestamps": True, "_preload_content": False}
        answer = self._call(
            self._core.read_namespaced_pod_log, name, self.namespace, **asked, **more, _request_timeout=(_CALL_S[0], _SILENCE_S)
        )
        try:
            yield from answer.stream(1 << 16)
        except (HTTPError, OSError) as error:
            raise RendezvousError(f"the output of the pod {name} broke off: {error}") from error
        finally:
            answer.close()

    def delete(self, name: str) -> None:
        """Delete a job with all that belongs to it; its pods get SIGTERM.

        Raises
        ------
        Gone
            It is deleted already.
        """
        if self._is_set:
            self._call(self._custom.delete_namespaced_custom_object, *self._sets(), name, propagation_policy="Background")
        else:
            self._call(self._batch.delete_namespaced_job, name, self.namespace, propagation_policy="Background")

    def kill(self, manifest: Manifest) -> None:
        """End the pods of a job at once."""
        self._call(
            self._core.delete_collection_namespaced_pod,
            self.namespace,
            label_selector=manifest.selector,
            grace_period_seconds=0,
        )

    def _sets(self) -> tuple[str, str, str, str]:
        return "jobset.x-k8s.io", "v1alpha2", self.namespace, "jobsets"

    def _call(self, method: Any, *args: Any, **options: Any) -> Any:
        """Call the cluster. A refusal is a `ConfigError`, a silence a `RendezvousError`."""
        from urllib3.exceptions import HTTPError

        try:
            return method(*args, **{"_request_timeout": _CALL_S, **options})
        except self._errors as error:
            words = _words(error)
            if error.status == _NO_SUCH and not method.__name__.startswith("create"):
                raise Gone(words) from error
            if error.status in _REFUSED:
                hint = ": is JobSet installed in the cluster?" if error.status == _NO_SUCH and self._is_set else ""
                raise ConfigError(
                    f"the cluster refuses {_shown(method)} in the namespace {self.namespace}: {words}{hint}"
                ) from error
            raise RendezvousError(f"the cluster cannot do {_shown(method)}: {words}") from error
        except (HTTPError, OSError) as error:
            raise RendezvousError(f"the cluster cannot be reached for {_shown(method)}: {error}") from error


def _settings(context: str | None) -> tuple[Any, str]:
    """Return the settings of the client, and the namespace that goes with them."""
    from kubernetes import client, config

    settings, account = client.Configuration(), service_account()
    try:
        if kubeconfig() is not None:
            config.load_kube_config(context=context, client_configuration=settings)
            contexts, current = config.list_kube_config_contexts()
            chosen = next((each for each in contexts if each["name"] == context), current)
            return settings, chosen["context"].get("namespace") or "default"
        if account is None:
            raise ConfigError(
                "no cluster is known: there is no kubeconfig (KUBECONFIG, ~/.kube/config), and this is no pod with a service account. "
                "Get one from your cluster, or write the objects for others to submit by --option manifest=FILE",
                file="KUBECONFIG",
            )
        config.load_incluster_config(client_configuration=settings)
        return settings, (account / "namespace").read_text(encoding="utf-8").strip()
    except (config.ConfigException, OSError) as error:
        raise ConfigError(f"the way to the cluster cannot be read: {error}", file="KUBECONFIG") from error


def _as_pod(pod: Any) -> Pod:
    meta, status = pod.metadata, pod.status
    index = int((meta.annotations or {}).get(INDEX, 0))
    own = Pod(meta.name, meta.uid, index, meta.creation_timestamp.isoformat() if meta.creation_timestamp else "")
    state = next((each.state for each in status.container_statuses or [] if each.name == CONTAINER), None)
    if state is not None and state.terminated is not None:
        end = state.terminated
        why = "" if end.reason in ("Completed", "Error") else end.reason or ""
        return _with(own, began=True, code=end.exit_code, ended=end.finished_at.isoformat() if end.finished_at else "", why=why)
    if status.phase in ("Failed", "Succeeded"):  # evicted, or lost with its node
        why = ": ".join(each for each in (status.reason, status.message) if each)
        return _with(own, began=True, code=0 if status.phase == "Succeeded" else 1, why=why or "it failed without a word")
    if state is not None and state.running is not None:
        return _with(own, began=True)
    if (
        state is not None
        and state.waiting is not None
        and state.waiting.reason not in (None, "ContainerCreating", "PodInitializing")
    ):
        waiting = state.waiting
        hopeless = waiting.reason in ("InvalidImageName", "ImagePullBackOff", "ErrImageNeverPull")
        return _with(own, why=f"{waiting.reason}: {waiting.message or ''}".strip(": "), is_hopeless=hopeless)
    conditions = status.conditions or []
    unplaced = next((each for each in conditions if each.type == "PodScheduled" and each.status == "False"), None)
    return own if unplaced is None else _with(own, why=f"{unplaced.reason}: {unplaced.message}")


def _with(pod: Pod, **more: Any) -> Pod:
    return Pod(pod.name, pod.uid, pod.index, pod.born, **more)


def _words(error: Any) -> str:
    """Return the words of a refusal."""
    with contextlib.suppress(ValueError, TypeError):
        answer = json.loads(error.body)
        if isinstance(answer, Mapping) and answer.get("message"):
            return str(answer["message"])
    return f"{error.status} {error.reason}"


def _shown(method: Any) -> str:
    return str(method.__name__).replace("_namespaced", "").replace("_", " ")
