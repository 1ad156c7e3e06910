"""What torch calls when it is imported: it makes a program that `oneaccord run` has started know the backend, and costs all others nothing."""

from __future__ import annotations

import os

__all__ = ["autoload"]


def autoload() -> None:
    """Register the backend if `oneaccord run` has started this process, for which torch itself could not find out how the ranks meet."""
    if "ONEACCORD_LAUNCHED" in os.environ:
        import oneaccord_torch

        oneaccord_torch.register()
