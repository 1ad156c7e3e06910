"""From a call to what the ranks compare, and to what a backend prepares and launches."""

from __future__ import annotations

import math
from collections.abc import Hashable

import msgspec

from oneaccord.calls.request import Request
from oneaccord.contract.device import DeviceCall, Launch
from oneaccord.contract.header import CallSignature
from oneaccord.schedule.steps import Collective

__all__ = ["DEVICE", "Prepared", "device_call", "said_call"]

DEVICE = "cuda"


class Prepared(msgspec.Struct):
    """A kind of call that all ranks have agreed on: what launches it, and its number in the digest."""

    signature: CallSignature
    launch: Launch
    number: int
    nbytes: int
    places: list[Hashable] = []


def said_call(signature: CallSignature, sequence: int) -> str:
    """Return a call in words; messages have no number."""
    return "a message" if sequence < 0 else f"{signature.operation} #{sequence}"


def _elements(call: Request, rank: int) -> int:
    if call.collective in (Collective.ALL_GATHER, Collective.GATHER):
        return call.counts[rank]
    return sum(call.counts) if call.counts else math.prod(call.shape)


def device_call(call: Request, rank: int) -> DeviceCall:
    """Return what a backend must know of a call, for a rank of the group."""
    return DeviceCall(
        call.collective,
        call.dtype,
        _elements(call, rank),
        call.counts,
        call.receive_counts,
        None if call.reduction is None else call.reduction.name,
        call.root,
        call.reproducible,
        call.collective is Collective.ALL_TO_ALL and call.uneven is None,
    )
