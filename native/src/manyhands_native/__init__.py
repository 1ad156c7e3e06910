"""The compiled executor of manyhands. Core finds it by itself where it is installed; a program need not import it."""

from manyhands_native._core import Program, Ring, Stream

__all__ = ["Program", "Ring", "Stream"]
