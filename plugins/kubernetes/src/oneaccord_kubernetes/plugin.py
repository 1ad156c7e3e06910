"""The description of the launcher: light, so that listing it costs nothing."""

from __future__ import annotations

from importlib.util import find_spec

from oneaccord.api import LauncherSpec
from oneaccord_kubernetes.places import kubeconfig, service_account

__all__ = ["register_launchers"]


def _probe() -> str | None:
    if find_spec("kubernetes") is None:
        return "there is no package kubernetes, so it cannot submit jobs; it can write them: --option manifest=FILE"
    if kubeconfig() is None and service_account() is None:
        return (
            "there is no kubeconfig (KUBECONFIG, ~/.kube/config), and this is no pod with a service account, so no cluster is known; "
            "jobs can be written: --option manifest=FILE"
        )
    return None


def register_launchers() -> list[LauncherSpec]:
    """Describe the launcher."""
    return [
        LauncherSpec(
            name="kubernetes",
            summary="pods of Kubernetes; not confirmed on a cluster",
            kind="jobs",
            factory="oneaccord_kubernetes.launcher:KubernetesLauncher",
            config="oneaccord_kubernetes.config:KubernetesConfig",
            probe=_probe,
            install="pip install 'oneaccord[kubernetes]'",
        )
    ]
