"""From a call to what the ranks compare, and to what a backend prepares."""

from __future__ import annotations

import math

from manyhands.collectives import Call
from manyhands.device import DeviceCall
from manyhands.dtypes import dtype_code
from manyhands.schedule.steps import Collective
from manyhands.wire import CallSignature

__all__ = ["DEVICE", "device_call", "said_call", "signature_of"]

DEVICE = "cuda"


def said_call(signature: CallSignature, sequence: int) -> str:
    """Return a call in words; messages have no number."""
    return "a message" if sequence < 0 else f"{signature.operation} #{sequence}"


def _elements(call: Call, rank: int) -> int:
    if call.collective in (Collective.ALL_GATHER, Collective.GATHER):
        return call.counts[rank]
    return sum(call.counts) if call.counts else math.prod(call.shape)


def device_call(call: Call, rank: int) -> DeviceCall:
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
    )


def signature_of(call: Call) -> CallSignature:
    """Return what all ranks must call alike."""
    reduction = call.reduction
    return CallSignature(
        operation=call.operation or call.collective.value,
        part=call.part,
        dtype=dtype_code(call.dtype),
        shape=call.shape,
        op=reduction.name if reduction else "",
        op_code=reduction.code if reduction else 0,
        root=call.root,
        counts=call.uneven,
        reproducible=call.reproducible,
        count=math.prod(call.shape),
        device=DEVICE,
    )
