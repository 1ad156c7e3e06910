"""What can be set of the ucc backend."""

from __future__ import annotations

from pydantic import Field

from oneaccord.api import BackendConfig

__all__ = ["UccConfig"]


class UccConfig(BackendConfig):
    """The table ``[backends.ucc]``."""

    messages: str = Field(
        default="tcp",
        pattern=r"^\S+$",
        description="The backend that carries messages, and all that UCC does not perform; alike on all ranks.",
    )
    spin_us: int = Field(
        default=200,
        ge=0,
        le=1000,
        description="How many microseconds to give way to others between two looks before a thread sleeps between them.",
    )
