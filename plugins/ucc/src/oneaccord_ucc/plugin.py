"""The description of the ucc backend: light, so that listing backends loads no UCC."""

from __future__ import annotations

from oneaccord.api import BackendSpec, CollectiveRequest, NativeCollective, hookimpl
from oneaccord_ucc.finding import missing

__all__ = ["oneaccord_collective", "oneaccord_register_backends"]


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="ucc",
        summary="UCC performs collectives; another backend carries the rest",
        factory="oneaccord_ucc.backend:UccBackend",
        config="oneaccord_ucc.config:UccConfig",
        capabilities=frozenset({"transport", "native"}),
        probe=missing,
        install="",
        diagnose="oneaccord_ucc.library:diagnose",
        parts=lambda config: {"messages": config.messages},
    )


@hookimpl
def oneaccord_collective(request: CollectiveRequest) -> NativeCollective | None:
    """Offer what UCC performs."""
    if request.backend != "ucc":
        return None
    from oneaccord_ucc.natives import offer

    return offer(request)
