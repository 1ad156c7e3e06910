"""What is known of a message with a tag, without its data."""

from __future__ import annotations

from typing import Any

import numpy as np

from oneaccord.calls.post.messages import ANY_TAG, AnyTag, Letter

__all__ = ["Status"]


class Status:
    """What is known of a message without its data.

    ``Status()`` is empty. `Group.recv` and others fill the one that they are given as ``status=``.

    Attributes
    ----------
    source
        The rank of the group that sent it; None if no rank did.
    tag
        Its tag.
    count
        The number of elements; 1 for an object.
    nbytes
        The size in bytes.
    dtype, shape
        Those of the array; None for an object.
    """

    __slots__ = ("count", "dtype", "nbytes", "shape", "source", "tag")

    def __init__(self) -> None:
        self.source: int | None = None
        self.tag: int | AnyTag | None = ANY_TAG
        self.count: int = 0
        self.nbytes: int = 0
        self.dtype: np.dtype[Any] | None = None
        self.shape: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        what = "an object" if self.dtype is None else f"{self.dtype}{list(self.shape or ())}"
        if self.source is None:
            return "<oneaccord.Status of no message>"
        return f"<oneaccord.Status of {what} from rank {self.source} with tag {self.tag}, {self.nbytes} bytes>"

    def fill(self, letter: Letter, source: int) -> None:
        """Say what is known of a message; for core."""
        self.source, self.tag, self.count = source, letter.tag, letter.count
        self.nbytes, self.dtype = letter.nbytes, letter.dtype
        self.shape = None if letter.is_object else letter.shape

    def clear(self) -> None:
        """Say that there is no message; for core."""
        self.source, self.tag, self.count, self.nbytes, self.dtype, self.shape = None, ANY_TAG, 0, 0, None, None
