"""The description of the gloo backend: light, so that listing backends does not import torch."""

from __future__ import annotations

from importlib.util import find_spec

from oneaccord.api import BackendSpec, CollectiveRequest, NativeCollective, hookimpl

__all__ = ["oneaccord_collective", "oneaccord_register_backends"]


def _missing() -> str | None:
    """Return None when Gloo can run here, else what is missing."""
    return None if find_spec("torch") is not None else "torch, which brings Gloo, is not installed"


@hookimpl
def oneaccord_register_backends() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="gloo",
        summary="Gloo, as it comes with torch",
        factory="oneaccord_gloo.backend:GlooBackend",
        api_version=1,
        config="oneaccord_gloo.config:GlooConfig",
        capabilities=frozenset({"transport", "native"}),
        probe=_missing,
        install="pip install 'oneaccord[gloo]'",
    )


@hookimpl
def oneaccord_collective(request: CollectiveRequest) -> NativeCollective | None:
    """Offer what Gloo performs itself."""
    if request.backend != "gloo":
        return None
    from oneaccord_gloo.natives import offer

    return offer(request)
