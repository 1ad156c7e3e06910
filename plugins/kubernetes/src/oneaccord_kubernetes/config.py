"""The options of the launcher."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from oneaccord.api import BackendConfig

__all__ = ["KubernetesConfig", "pair"]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z", re.ASCII)
_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z", re.ASCII)
_KEY = re.compile(r"(?:(?P<prefix>[^/]*)/)?(?P<name>[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)\Z", re.ASCII)
_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?\Z", re.ASCII)
_QUANTITY = re.compile(r"(\d+(\.\d*)?|\.\d+)(m|[kMGTPE]|[KMGTPE]i)?\Z", re.ASCII)


def _label(text: str) -> str:
    if not _LABEL.match(text):
        raise ValueError(f"{text!r} is no name of Kubernetes: write at most 63 of a-z, 0-9 and -, without - at the ends")
    return text


def _job_name(text: str) -> str:
    if not text[:1].isalpha():  # the Service has this name too
        raise ValueError(f"{text!r} is no name of a Service: begin with a letter, a-z")
    return _label(text)


def _subdomain(text: str) -> str:
    if not _SUBDOMAIN.match(text):
        raise ValueError(
            f"{text!r} is no name of Kubernetes: write a-z, 0-9, - and ., beginning and ending with a letter or digit"
        )
    return text


def _pair(text: str) -> str:
    key, equals, value = text.partition("=")
    found = _KEY.match(key)
    if (
        not equals
        or not found
        or not _VALUE.match(value)
        or (found["prefix"] is not None and not _SUBDOMAIN.match(found["prefix"]))
    ):
        raise ValueError(
            f"{text!r} is no label of Kubernetes: write KEY=VALUE, each of at most 63 letters, digits, dots, - and _"
        )
    return text


def _quantity(text: str) -> str:
    found = _QUANTITY.match(text)
    if not found or not text.strip("0.mkMGTPEi"):
        raise ValueError(f"{text!r} is no amount of Kubernetes: write a number above 0 with its unit, such as 500m, 2 or 16Gi")
    return text


_Label = Annotated[str, AfterValidator(_label)]
_JobName = Annotated[str, AfterValidator(_job_name)]
_Subdomain = Annotated[str, AfterValidator(_subdomain)]
_Pair = Annotated[str, AfterValidator(_pair)]
_Quantity = Annotated[str, AfterValidator(_quantity)]


def pair(text: str) -> tuple[str, str]:
    """Return the key and the value of a label."""
    key, _, value = text.partition("=")
    return key, value


class KubernetesConfig(BackendConfig):
    """The options of the launcher ``kubernetes``."""

    image: str = Field(
        default="", validate_default=True, description="The container image, which holds Python, oneaccord and the program."
    )
    name: _JobName | None = Field(
        default=None, description="The name of the objects; by default oneaccord- and eight digits by chance."
    )
    namespace: _Label | None = Field(
        default=None, description="Their namespace; by default that of the kubeconfig or of this pod."
    )
    context: str | None = Field(
        default=None, min_length=1, description="The context of the kubeconfig; by default its current one."
    )
    kind: Literal["job", "jobset"] = Field(
        default="job", description="An indexed Job, or a JobSet, which the cluster must have."
    )
    manifest: str | None = Field(
        default=None, min_length=1, description="Write the objects to this file, or - for standard output, and submit nothing."
    )
    gpus_per_host: int = Field(default=0, ge=0, description="The GPUs of each pod.")
    gpu_resource: str = Field(
        default="nvidia.com/gpu", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", description="What the cluster calls a GPU."
    )
    cpu: _Quantity | None = Field(default=None, description="The processors of each pod, such as 8 or 500m.")
    memory: _Quantity | None = Field(default=None, description="The memory of each pod, such as 64Gi.")
    labels: tuple[_Pair, ...] = Field(default=(), description="Labels of all objects and pods, each as KEY=VALUE.")
    node_selector: tuple[_Pair, ...] = Field(default=(), description="Labels that the nodes must have, each as KEY=VALUE.")
    service_account: _Subdomain | None = Field(
        default=None, description="The service account of the pods; by default they get no token."
    )
    pull_secrets: tuple[_Subdomain, ...] = Field(default=(), description="The Secrets with which the image is pulled.")
    secret_name: _Subdomain | None = Field(
        default=None, description="A Secret that exists, with the secret of the job as its key secret; by default one is made."
    )
    python: str = Field(default="python3", min_length=1, description="The Python of the image.")
    folder: str | None = Field(default=None, min_length=1, description="The working directory; by default that of the image.")
    timeout_s: int | None = Field(
        default=None, ge=1, description="The most seconds that the job may last; Kubernetes ends it then."
    )
    start_timeout_s: int = Field(default=86400, ge=1, description="The most seconds until all pods have begun.")
    ttl_s: int = Field(
        default=600, ge=0, description="How many seconds after its end Kubernetes removes the job and what belongs to it."
    )
    restarts: int = Field(default=0, ge=0, description="With kind=jobset: how often all pods begin anew after a failure.")

    @field_validator("image")
    @classmethod
    def _is_image(cls, text: str) -> str:
        if not text or text.startswith("-") or any(each.isspace() for each in text):
            raise ValueError(
                "name the image that holds oneaccord and the program, as in --option image=registry.example/train:1"
            )
        return text

    @field_validator("restarts")
    @classmethod
    def _has_restarts(cls, number: int, info: object) -> int:
        if number and getattr(info, "data", {}).get("kind") != "jobset":
            raise ValueError("a Job cannot begin all its pods anew: give kind=jobset too, or leave restarts out")
        return number
