"""The description of the backend. `oneaccord doctor` imports this module: it loads no driver, and not the backend."""

from pydantic import Field

from oneaccord.api import BackendConfig, BackendSpec, hookimpl

__all__ = ["Config", "oneaccord_register_backends"]


class Config(BackendConfig):
    """The table ``[backends.pigeon]``; unknown keys are errors."""

    piece_bytes: int = Field(default=1 << 18, ge=1 << 12)
    """How much of a message moves in one system call."""


def why_not() -> str | None:
    """Return None when the backend can run here, else the reason; quick, and without heavy imports."""
    return None


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="pigeon",
        summary="one socket for each pair of ranks",
        factory="oneaccord_pigeon.backend:create",  # imported when the backend is used, and not before
        config=Config,
        probe=why_not,
        install="pip install oneaccord-pigeon",
        api_version=1,  # the version of the contract that this is written for
    )
