"""What torch calls when it is imported: it makes a program that `manyhands run` has started know the backend, and costs all others nothing."""

from __future__ import annotations

import os

__all__ = ["autoload"]


def autoload() -> None:
    """Register the backend if `manyhands run` has started this process, for which torch itself could not find out how the ranks meet."""
    if "MANYHANDS_LAUNCHED" in os.environ:
        import manyhands_torch

        manyhands_torch.register()
