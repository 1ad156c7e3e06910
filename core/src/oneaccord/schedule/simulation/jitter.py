"""Jitter: by how many seconds each message is late, drawn by chance and yet the same on every machine.

Python promises that the numbers of ``random.Random(seed).random()`` stay what they are. From there on only sums, products and
comparisons are used, which IEEE 754 fixes to the last bit; a logarithm is not the same in every C library.
"""

from __future__ import annotations

import random
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from oneaccord.errors import UsageError

__all__ = ["Jitter", "JitterSource", "Travelled"]


class Travelled(Protocol):
    """The facts about the way of a message; a `Path` has them."""

    @property
    def between_hosts(self) -> bool:
        """Whether it leaves its host."""


class Jitter(BaseModel):
    """By how much messages are late.

    Attributes
    ----------
    distribution
        ``"uniform"``: anything between 0 and twice the mean. ``"exponential"``: usually less than the mean, and now and then several
        times as much.
    mean_s
        Seconds that are added to the latency of a message, on average.
    links
        ``"all"``: every message is late. ``"between hosts"``: only those that leave their host.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    distribution: Literal["uniform", "exponential"] = Field(description="How the seconds spread around their mean.")
    mean_s: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = Field(
        description="Seconds added to the latency of a message, on average."
    )
    links: Literal["all", "between hosts"] = Field(default="all", description="Which messages are late.")

    def covers(self, path: Travelled) -> bool:
        """Return whether the messages of a path are late.

        Parameters
        ----------
        path
            The path.
        """
        return self.links == "all" or path.between_hosts

    def draws(self, seed: int) -> JitterSource:
        """Return the seconds of one message after the other; a seed gives the same ones on every machine.

        Parameters
        ----------
        seed
            0 or more.

        Returns
        -------
        JitterSource
            At its first number; each call makes a source of its own.

        Raises
        ------
        UsageError
            The seed is negative: Python would draw the numbers of the positive one.
        """
        if seed < 0:
            raise UsageError(f"the seed is {seed}; expected 0 or more")
        return JitterSource(self, seed)


class JitterSource:
    """Draws the seconds by which messages are late; `Jitter.draws` makes one. It is for one thread at a time."""

    def __init__(self, jitter: Jitter, seed: int) -> None:
        self._uniform = random.Random(seed).random  # noqa: S311 - to be repeated is what these numbers are for
        self._mean_s = jitter.mean_s
        self._is_exponential = jitter.distribution == "exponential"

    def next(self) -> float:
        """Return by how many seconds the next message is late."""
        return self._mean_s * (self._exponential() if self._is_exponential else 2 * self._uniform())

    def _exponential(self) -> float:
        """Return an exponential number of mean 1, by comparing uniform ones.

        The first of a row of uniform numbers, x, begins a falling run of n or more with the probability x^(n-1) / (n-1)!, so that the
        run is odd with 1 - x + x^2/2! - ... = e^-x. It is that part of the number that comes after the point; each even run before
        it, of the probability 1/e, adds a whole one.

        J. von Neumann, "Various techniques used in connection with random digits", Monte Carlo Method, National Bureau of Standards
        Applied Mathematics Series 12, 1951, pp. 36-38.
        """
        whole = 0
        while True:
            first = last = self._uniform()
            is_odd = True
            while (following := self._uniform()) < last:
                last = following
                is_odd = not is_odd
            if is_odd:
                return whole + first
            whole += 1
