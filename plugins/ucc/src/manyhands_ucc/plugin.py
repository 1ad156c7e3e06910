"""The description of the ucc backend: light, so that listing backends loads no UCC."""

from __future__ import annotations

from manyhands.api import BackendSpec, CollectiveRequest, NativeCollective, hookimpl
from manyhands_ucc.finding import missing

__all__ = ["manyhands_collective", "manyhands_register_backends"]


@hookimpl
def manyhands_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="ucc",
        summary="UCC performs collectives; another backend carries the rest",
        factory="manyhands_ucc.backend:UccBackend",
        config="manyhands_ucc.config:UccConfig",
        capabilities=frozenset({"transport", "native"}),
        probe=missing,
        install="",
        diagnose="manyhands_ucc.library:diagnose",
        parts=lambda config: {"messages": config.messages},
    )


@hookimpl
def manyhands_collective(request: CollectiveRequest) -> NativeCollective | None:
    """Offer what UCC performs."""
    if request.backend != "ucc":
        return None
    from manyhands_ucc.natives import offer

    return offer(request)
