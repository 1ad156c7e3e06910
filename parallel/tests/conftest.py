"""What the tests of the layers share."""

from __future__ import annotations

from support.gpu_arrays import library

__all__ = ["library"]
