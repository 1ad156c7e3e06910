"""Where the way to a cluster is written down."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["kubeconfig", "service_account"]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def kubeconfig() -> Path | None:
    """Return the first file of ``KUBECONFIG``, or ``~/.kube/config``, that exists; None if none does."""
    given = os.environ.get("KUBECONFIG")
    files = [Path(each) for each in given.split(os.pathsep) if each] if given else [Path.home() / ".kube" / "config"]
    return next((each for each in files if each.is_file()), None)


def service_account() -> Path | None:
    """Return the folder with the credentials of the pod around this process; None if there is none."""
    return _ACCOUNT if os.environ.get("KUBERNETES_SERVICE_HOST") and (_ACCOUNT / "token").is_file() else None
