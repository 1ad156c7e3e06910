"""Numbers of bytes as people write them: ``4096``, ``64KiB``, ``1.5GB``, ``1e6``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from manyhands.errors import UsageError

__all__ = ["parse_bytes"]

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d{1,3}))?\s*([a-z]*)\s*", re.IGNORECASE)

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}


def parse_bytes(text: str) -> int:
    """Return a number of bytes.

    Parameters
    ----------
    text
        A number, also as ``1e6``, and one of B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024), or no unit.
        Upper and lower case are the same.

    Raises
    ------
    UsageError
        It is no such thing, or no whole number of bytes.
    """
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get(found[3].lower()) if found else None
    if found is None or unit is None:
        raise UsageError(f"{text!r} is no number of bytes; expected is one such as 4096, 64KiB, 1GiB, 1.5MB or 1e6")
    nbytes = Fraction(found[1]) * Fraction(10) ** int(found[2] or 0) * unit
    if nbytes.denominator != 1:
        raise UsageError(f"{text!r} is no whole number of bytes; expected is one such as 4096, 64KiB, 1GiB, 1.5MB or 1e6")
    return int(nbytes)
