"""A call as data: a request, and the steps of which the program of a call consists.

Most calls are one `Operation`. The others are a *program*, a generator: it checks the arguments of a call, yields one step after the other, gets the result of each, and returns the
caller's result. A call whose ranks do not know the sizes beforehand begins with a `SizeExchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, Final

import msgspec
import numpy as np

from oneaccord.arrays.buffers import Give, Memory
from oneaccord.arrays.dtypes import CODES, Reduction, dtype_code, fields_of
from oneaccord.arrays.libraries import DeviceArray
from oneaccord.arrays.memory import Array
from oneaccord.calls.order.turns import Turns
from oneaccord.contract.header import CallSignature
from oneaccord.schedule.steps import Collective

__all__ = ["ARRAY", "SLOW_PATH", "CallSteps", "Later", "Local", "Message", "Operation", "Request", "SizeExchange"]

ARRAY: CallSignature = CallSignature("send")
"""The contents of the headers of all messages between two ranks that carry a user's array."""

Later = tuple[str, Turns, Callable[[float], Any]]
"""A call to be made later: its words, its turn, and a function that makes it within a number of seconds."""

SLOW_PATH: Final = object()
"""The result of the fast path if the call must take the slow path; nothing was done then."""


class Request(msgspec.Struct, frozen=True):
    """One kind of call: all that its plan depends on, and all that every rank must give alike.

    Attributes
    ----------
    collective
        The collective.
    dtype
        The dtype of the arrays.
    shape
        The shape that all ranks must have in common.
    counts
        Elements in each rank's block, in the order of ranks; for all_to_all those that this rank sends. Empty for collectives
        that do not divide by ranks.
    receive_counts
        For all_to_all, the elements that this rank receives.
    reduction, root
        The reduction and the root, if there are any; -1 for no root.
    uneven
        The caller's division of axis 0, if there is one and all ranks must agree on it.
    reproducible
        Whether the bits of the result must not depend on the algorithm.
    operation, part
        For a request that is only a part of the user's call: the user's operation, and the part.
    whole, cut
        For a piece of a call on a GPU that goes through the host's memory: the user's call, and into pieces of how many elements of each rank's
        part it is cut.
    """

    collective: Collective
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    counts: tuple[int, ...] = ()
    receive_counts: tuple[int, ...] = ()
    reduction: Reduction | None = None
    root: int = -1
    uneven: tuple[int, ...] | None = None
    reproducible: bool = False
    operation: str = ""
    part: str = ""
    whole: Request | None = None
    cut: int = 0

    @property
    def name(self) -> str:
        """The operation that the user called."""
        return self.operation or self.collective.value

    def __str__(self) -> str:
        return self.operation or self.collective.value

    def signature(self, *, algorithm: str = "", device: str = "") -> CallSignature:
        """Return the facts on which all ranks must agree: this request, by an algorithm, on a kind of device if it is not host memory."""
        if self.whole is not None:
            where = f"a GPU, through the host in pieces of {self.cut} elements"
            return self.whole.signature(algorithm=algorithm, device=where)
        reduction = self.reduction
        return CallSignature(
            operation=self.operation or self.collective.value,
            part=self.part,
            dtype=0 if self.collective is Collective.BARRIER else CODES.get(self.dtype) or dtype_code(self.dtype),
            shape=self.shape,
            op=reduction.name if reduction else "",
            op_code=reduction.code if reduction else 0,
            root=self.root,
            counts=self.uneven,
            reproducible=self.reproducible,
            algorithm=algorithm,
            count=math.prod(self.shape),
            device=device,
            fields=fields_of(self.dtype) if self.dtype.names else b"",
        )


class Operation(msgspec.Struct):
    """A collective, with the memory of this rank that it works on.

    Attributes
    ----------
    request
        The request.
    source
        This rank's input, of any layout.
    shape
        The shape of the result; None if this rank gets none.
    out
        The memory for the result; None for new memory.
    give
        Turns the memory of the result into the caller's; None if it is returned as it is.
    is_agreed
        Whether the ranks have just agreed on the call: each may have its own part in it.
    identity
        The result, if it comes from no rank.
    is_repeatable
        Whether a call with arguments of the same kind is this very request.
    """

    request: Request
    source: Memory
    shape: tuple[int, ...] | None
    out: Memory | None = None
    give: Give | None = None
    is_agreed: bool = False
    identity: Array | None = None
    is_repeatable: bool = True


class SizeExchange(msgspec.Struct):
    """Numbers that the ranks exchange before the step that depends on them, for which the others wait from here on.

    Attributes
    ----------
    request
        The collective that carries them, on int64.
    numbers
        The numbers of this rank: on the root of a broadcast for all; otherwise a number for each rank, or the same for all.
    count
        How many numbers come back.
    alike
        In words the facts on which all ranks must agree, for numbers that go through the store.
    by_store
        Whether they do, since the arrays are on devices or the backend moves no host memory.
    arrays
        The arrays on devices that the call was given.
    may_be_on_device
        Whether the next step may be on devices although no array of this rank is.
    """

    request: Request
    numbers: Array
    count: int
    alike: str = ""
    by_store: bool = False
    arrays: list[DeviceArray] = msgspec.field(default_factory=list)
    may_be_on_device: bool = False


class Message(msgspec.Struct):
    """An array to one rank of the group, from one, or both at once.

    Attributes
    ----------
    outgoing, dest
        The data to send, and the rank to send to; None for nothing, and for no rank.
    target, source
        The memory for the received data, None for new memory, and the rank to receive from, None for no rank.
    give
        As for `Operation`.
    signature
        The contents of the headers.
    """

    outgoing: Memory | None
    dest: int | None
    target: Memory | None
    source: int | None
    give: Give | None = None
    signature: CallSignature = ARRAY


class Local(msgspec.Struct):
    """A copy in which no other rank takes part.

    Attributes
    ----------
    source
        The array to copy; None if there is none.
    out, give
        As for `Operation`.
    """

    source: Memory | None
    out: Memory | None = None
    give: Give | None = None


CallSteps = Generator[Operation | SizeExchange | Message | Local, Any, Any]
"""The steps of one call, in their order; it returns the caller's result."""
