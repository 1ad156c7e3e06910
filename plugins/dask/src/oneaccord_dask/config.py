"""The options of the launcher."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from oneaccord.api import BackendConfig

__all__ = ["DaskConfig"]


class DaskConfig(BackendConfig):
    """The options of the launcher ``dask``."""

    client: Any = Field(
        default=None,
        description="A distributed.Client; by default the one that this process made last, or a new one for `address`.",
    )
    address: str | None = Field(
        default=None, description='The scheduler, such as "tcp://10.0.0.1:8786". The client for it is closed at the end.'
    )
    workers: tuple[str, ...] = Field(
        default=(),
        description="The addresses of the workers, by rank; by default the launcher takes any, those of one host in a row.",
    )
