"""The description of the gloo backend: light, so that listing backends does not import torch."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import Field

from manyhands.api import BackendConfig, BackendSpec, CollectiveRequest, NativeCollective, hookimpl

__all__ = ["GlooConfig", "manyhands_collective", "manyhands_register_backends"]


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


def _missing() -> str | None:
    """Return None when Gloo can run here, else what is missing."""
    return None if find_spec("torch") is not None else "torch, which brings Gloo, is not installed"


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="gloo",
        summary="Gloo, as it comes with torch",
        factory="manyhands_gloo.backend:GlooBackend",
        config=GlooConfig,
        capabilities=frozenset({"transport", "native"}),
        probe=_missing,
        install="pip install 'manyhands[gloo]'",
    )


@hookimpl
def manyhands_collective(request: CollectiveRequest) -> NativeCollective | None:
    """Offer what Gloo performs itself."""
    if request.backend != "gloo":
        return None
    from manyhands_gloo.natives import offer

    return offer(request)
