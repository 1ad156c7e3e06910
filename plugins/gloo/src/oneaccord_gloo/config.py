"""What can be set of the gloo backend."""

from __future__ import annotations

from pydantic import Field

from oneaccord.api import BackendConfig

__all__ = ["GlooConfig"]


class GlooConfig(BackendConfig):
    """The table ``[backends.gloo]``."""

    native: bool = Field(default=True, description="Whether Gloo performs collectives; otherwise it only carries messages.")
    check: bool = Field(
        default=True,
        description="Whether the ranks compare what they call before Gloo performs a collective: without it a mismatch is not found.",
    )
    interface: str | None = Field(default=None, description='Listen at the address of this network interface, such as "eth0".')
    host: str | None = Field(default=None, description="Listen at this address of the host; it wins over interface.")
    threads: int = Field(default=2, ge=1, le=64, description="In how many threads Gloo performs collectives.")
