"""The secret of a job, from the environment or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping

from oneaccord.common.private import warn_of_readers
from oneaccord.common.variables import Variable
from oneaccord.config.settings import RendezvousSettings
from oneaccord.errors import ConfigError

__all__ = ["job_secret"]


def job_secret(rendezvous: RendezvousSettings, environ: Mapping[str, str]) -> bytes:
    """Return the secret that the user set for a job; empty if there is none.

    The variable ``ONEACCORD_SECRET`` wins over the file that ``rendezvous.secret_file`` names, of which spaces and newlines at both ends do not
    count.

    Raises
    ------
    ConfigError
        The file cannot be read, is empty, or holds a zero byte, which no variable can pass on to the ranks.
    """
    if text := environ.get(Variable.SECRET):
        return os.fsencode(text)
    path = rendezvous.secret_file
    if path is None:
        return b""
    warn_of_readers(path, "the secret")
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    else:
        if secret and b"\0" not in secret:
            return secret
        problem = "holds a zero byte: write it as text, such as `openssl rand -hex 32` prints" if secret else "is empty"
    raise ConfigError(
        f"rendezvous.secret_file is {str(path)!r}, which {problem}", key="rendezvous.secret_file", value=str(path)
    ) from None
