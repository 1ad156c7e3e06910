"""The fewest bytes in the fewest rounds, in any world: of two algorithms the one that fits the number of ranks.

Recursive halving and doubling need less memory and fewer messages, and fold worlds that are no power of two, with more
bytes. So those worlds get the algorithms whose distances are counted around the end. Algorithms that are made of others use
these.
"""

from __future__ import annotations

from oneaccord.schedule.algorithms import bruck, circulant, doubling, halving
from oneaccord.schedule.algorithms.cost import Cost
from oneaccord.schedule.steps import Schedule

__all__ = ["all_gather", "all_gather_cost", "all_reduce", "all_reduce_cost", "reduce_scatter", "reduce_scatter_cost"]


def all_gather(rank: int, size: int) -> Schedule:
    """Return recursive doubling, or Bruck's algorithm."""
    return doubling.all_gather(rank, size) if _is_power_of_two(size) else bruck.all_gather(rank, size)


def all_gather_cost(size: int, nbytes: float) -> Cost:
    """Return the cost of `all_gather`."""
    return bruck.all_gather_cost(size, nbytes)


def all_reduce(rank: int, size: int) -> Schedule:
    """Return Rabenseifner's algorithm, or the circulant one."""
    return halving.all_reduce(rank, size) if _is_power_of_two(size) else circulant.all_reduce(rank, size)


def all_reduce_cost(size: int, nbytes: float) -> Cost:
    """Return the cost of `all_reduce`."""
    return halving.all_reduce_cost(size, nbytes) if _is_power_of_two(size) else circulant.all_reduce_cost(size, nbytes)


def reduce_scatter(rank: int, size: int) -> Schedule:
    """Return recursive halving, or the circulant algorithm."""
    return halving.reduce_scatter(rank, size) if _is_power_of_two(size) else circulant.reduce_scatter(rank, size)


def reduce_scatter_cost(size: int, nbytes: float) -> Cost:
    """Return the cost of `reduce_scatter`."""
    return halving.reduce_scatter_cost(size, nbytes) if _is_power_of_two(size) else circulant.reduce_scatter_cost(size, nbytes)


def _is_power_of_two(number: int) -> bool:
    return not number & (number - 1)
