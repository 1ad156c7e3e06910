"""oneaccord on Ray: the launcher ``ray``, whose ranks are actors in a placement group, and a backend of Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneaccord_ray.train import OneaccordConfig, OneaccordTrainer, group

__all__ = ["OneaccordConfig", "OneaccordTrainer", "group"]


def __getattr__(name: str) -> Any:
    # Late, so that the launcher can be used where Ray Train is not installed.
    if name in __all__:
        from oneaccord_ray import train

        return getattr(train, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
