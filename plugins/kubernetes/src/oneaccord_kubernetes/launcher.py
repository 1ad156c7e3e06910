"""The launcher: it writes the objects of a job, or submits them and stays with the job to its end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from oneaccord.api import Ask, ConfigError, WholeJob
from oneaccord_kubernetes.config import KubernetesConfig
from oneaccord_kubernetes.manifest import Manifest

__all__ = ["KubernetesLauncher"]


class KubernetesLauncher:
    """Runs jobs in pods.

    Parameters
    ----------
    config
        Its options.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config

    def run(self, ask: Ask, job: WholeJob) -> int:
        """Run a job to its end, and return its exit code; or write its objects, and return 0.

        Raises
        ------
        UsageError
            The job and the options do not fit.
        BackendUnavailableError, ConfigError
            The client is missing; no cluster is known, or it refuses the job; or the file cannot be written.
        RendezvousError
            The cluster cannot be reached.
        DeadlineError
            The pods did not begin in time, or the job took too long.
        """
        manifest, target = Manifest(self._config, ask, job), self._config.manifest
        if target is not None:
            _write(manifest, target)
            return 0
        # Only a job that is submitted needs the client.
        from oneaccord_kubernetes.cluster import Cluster
        from oneaccord_kubernetes.watch import watched

        return watched(Cluster(self._config), manifest, self._config.start_timeout_s, job)


def _write(manifest: Manifest, target: str) -> None:
    from oneaccord_kubernetes.yaml_text import as_yaml

    text = as_yaml(manifest.objects())
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target)
    try:
        # The secret is in it.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"the objects cannot be written to {path}: {error.strerror}", file=str(path)) from error
    sys.stderr.write(f"oneaccord run: wrote {path}, with the secret of the job in it; submit it by: kubectl apply -f {path}\n")
