"""Numbers with units, as people write and read them: bytes such as ``64KiB``, ``1.5GB`` or ``1e6``, and times such as ``31.4 us``."""

from __future__ import annotations

import re
from typing import Final

from oneaccord.errors import UsageError

__all__ = ["bytes_text", "parse_bytes", "time_text"]

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
        raise UsageError(f"{text!r} is not a number of bytes; expected one such as 4096, 64KiB, 1GiB, 1.5MB or 1e6")
    from fractions import Fraction

    nbytes = Fraction(found[1]) * Fraction(10) ** int(found[2] or 0) * unit
    if nbytes.denominator != 1:
        raise UsageError(f"{text!r} is not a whole number of bytes; expected one such as 4096, 64KiB, 1GiB, 1.5MB or 1e6")
    return int(nbytes)


_LARGE: Final = ("GiB", 30), ("MiB", 20), ("KiB", 10)
_TIMES: Final = (1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes in the largest unit in which three decimals say all of it, such as ``"1.5 MiB"``; else all digits.

    A part of a byte, as a mean may have, is rounded away.
    """
    whole = round(nbytes)
    for unit, power in _LARGE:
        if whole >> power and whole * 1000 % (1 << power) == 0:
            return f"{whole / (1 << power):,.3f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{whole:,} B"


def time_text(seconds: float) -> str:
    """Return a time with three digits and a unit, such as ``"31.4 us"``; all digits above 999 seconds."""
    # A number that would be rounded to a thousand of a unit is shown as one of the next.
    scale, unit = next((each for each in _TIMES if seconds >= 0.9995 * each[0]), _TIMES[-1])
    return f"{seconds / scale:.3g} {unit}" if seconds < 999.5 else f"{seconds:,.0f} s"
