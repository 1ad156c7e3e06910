"""Ranks in the workers of a Dask cluster: ``oneaccord.launch(function, 4, on="dask")``, and `launch_over` for the blocks of a Dask array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneaccord_dask.blocks import launch_over

__all__ = ["launch_over"]


def __getattr__(name: str) -> Any:
    # Late, so that the launcher can be listed where Dask is not installed.
    if name in __all__:
        from oneaccord_dask import blocks

        return getattr(blocks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
