"""What the tests of gradients compare with: one process that does it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def canonical(operands: Sequence[Any]) -> Any:
    """Add up in the order that docs/guides/reductions.md gives."""
    left = list(operands)
    extra = len(left) - (1 << (len(left).bit_length() - 1))
    left = [left[2 * pair] + left[2 * pair + 1] for pair in range(extra)] + left[2 * extra :]
    while len(left) > 1:
        left = [left[place] + left[place + 1] for place in range(0, len(left), 2)]
    return left[0]


def mean(gradients: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return the weighted mean of the gradients of all ranks; one with weight 0 does not count."""
    kind = gradients[0].dtype.type
    products = [
        gradient * kind(weight) if weight else np.zeros_like(gradient)
        for gradient, weight in zip(gradients, weights, strict=True)
    ]
    return canonical(products) / kind(canonical(np.array(weights, "f8")))


def same_bits(one: Any, other: Any) -> bool:
    """Tell whether two arrays have one dtype, one shape and the same bits."""
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
