"""Ranks in the workers of a Dask cluster: ``oneaccord.launch(function, 4, on="dask")``, and `launch_over` for the blocks of a Dask array."""

from oneaccord_dask.blocks import launch_over

__all__ = ["launch_over"]
