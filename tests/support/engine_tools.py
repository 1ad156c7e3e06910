"""Schedules made ready for a transport, as a group does it with those of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from oneaccord.arrays.dtypes import Reduction
from oneaccord.calls.engine import CompiledSchedule, Executable, Links, compile_program, peers_of
from oneaccord.contract.backend import Transport
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature
from oneaccord.schedule.steps import Schedule

__all__ = ["compiled", "ready"]

_FLOAT = np.dtype(np.float64)


def compiled(
    schedule: Schedule,
    offsets: Sequence[int],
    output_offsets: Sequence[int] | None = None,
    dtype: np.dtype[Any] = _FLOAT,
    reduction: Reduction | None = None,
    signature: CallSignature | None = None,
    *,
    channel: int = 0,
    ranks: Sequence[int] | None = None,
    shape: tuple[int, ...] | None = None,
    streams: bool = False,
    slot_bytes: int = 0,
) -> CompiledSchedule:
    """Return the program of a schedule whose input, and output by default, has chunks that begin at ``offsets``."""
    about = signature or CallSignature(schedule.collective.value)
    outputs = offsets if output_offsets is None else output_offsets
    return compile_program(schedule, about, channel, offsets, outputs, dtype, reduction, ranks, shape, streams, slot_bytes)


def ready(
    transport: Transport,
    schedule: Schedule,
    offsets: Sequence[int],
    dtype: np.dtype[Any] = _FLOAT,
    reduction: Reduction | None = None,
    signature: CallSignature | None = None,
    *,
    channel: int = 0,
    ranks: Sequence[int] | None = None,
    shape: tuple[int, ...] | None = None,
) -> Executable:
    """Connect, and return a schedule ready to be carried out."""
    links, peers = Links(transport), peers_of(schedule, ranks)
    links.connect(peers, lambda: Deadline(5))
    boxes, *_ = links.mailboxes(peers)
    slot_bytes = min((len(box.outgoing[0]) for box in boxes.values()), default=0)
    program = compiled(
        schedule,
        offsets,
        None,
        dtype,
        reduction,
        signature,
        channel=channel,
        ranks=ranks,
        shape=shape,
        streams=transport.streams,
        slot_bytes=slot_bytes,
    )
    return Executable(program, transport, boxes)
