"""Before anything is proved: schedules are plain data of the types that they declare, and not too large to look at.

The verifier explains in words what is wrong with any input. So nothing is compared, counted or put into words here before its
type is known to be the right one: not a subclass, which could answer differently each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oneaccord.schedule.errors import MalformedScheduleError
from oneaccord.schedule.steps import Buffer, Collective, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

__all__ = ["MAX_CHUNKS", "MAX_STEPS", "check_plain"]

MAX_CHUNKS: int = 1 << 22
"""The most chunks that all ranks together may have and name in steps, for a proof that fits in memory."""
MAX_STEPS: int = 1 << 16
"""The most steps of one rank, for the same reason."""

_LARGEST = 1 << 62


def check_plain(schedules: object) -> None:
    """Check that every field of every schedule has the declared type.

    Parameters
    ----------
    schedules
        Anything at all; right is a list or tuple of `Schedule`, not empty.

    Raises
    ------
    MalformedScheduleError
        Something has another type, or there is too much of it to be proved.
    """
    if type(schedules) not in (list, tuple) or not isinstance(schedules, list | tuple):
        raise MalformedScheduleError(f"the schedules are {_shown(schedules)}; expected a list of schedules, one for each rank")
    if not schedules:
        raise MalformedScheduleError("no schedule was given; expected one for each rank")
    room = MAX_CHUNKS
    for position, schedule in enumerate(schedules):
        if type(schedule) is not Schedule:
            raise MalformedScheduleError(f"at position {position} is {_shown(schedule)}; expected a Schedule", rank=position)
        index, problem = next(_problems(schedule), (None, ""))
        if problem:
            where = f"rank {position}" if index is None else f"rank {position}, step {index}"
            raise MalformedScheduleError(f"{where}: {problem}", rank=position, step=index)
        room -= _chunks(schedule)
        if room < 0:
            raise MalformedScheduleError(
                f"rank {position}: with this schedule, there are more than {MAX_CHUNKS} chunks, of all ranks and of the references "
                "of their steps; that is too much to be proved",
                rank=position,
            )


def _problems(schedule: Schedule) -> Iterator[tuple[int | None, str]]:
    """Yield what has a wrong type, with its step if it is in one."""
    for name, is_right, expected in _SCHEDULE:
        if not is_right(getattr(schedule, name, None)):
            yield None, f"its {name} is {_shown(getattr(schedule, name, None))}; expected {expected}"
            return  # what follows relies on these
    for number, run in enumerate(schedule.scratch):
        if not _is_ref(run):
            yield None, f"its scratch run {number} is {_shown(run)}; expected {_REF}"
    if len(schedule.steps) > MAX_STEPS:
        yield None, f"it has {len(schedule.steps)} steps, and more than {MAX_STEPS} are too many to be proved"
    for index, step in enumerate(schedule.steps):
        fields = _STEPS.get(type(step))
        if fields is None:
            yield index, f"it is {_shown(step)}; expected a Send, Recv, RecvReduce, Reduce or Copy"
            return
        for name, is_right, expected in fields:
            if not is_right(getattr(step, name, None)):
                yield index, f"its {name} is {_shown(getattr(step, name, None))}; expected {expected}"


def _chunks(schedule: Schedule) -> int:
    """Return how many chunks a schedule has and names."""
    there = abs(schedule.input_chunks) + abs(schedule.output_chunks) + sum(abs(run.count) for run in schedule.scratch)
    return there + sum(abs(ref.count) for step in schedule.steps for ref in _references(step))


def _references(step: Step) -> list[Ref]:
    match step:
        case Send(_, source):
            return [] if source is None else [source]
        case Recv(_, target):
            return [] if target is None else [target]
        case RecvReduce(_, target, operand):
            return [target, operand]
        case Reduce(target, left, right):
            return [target, left, right]
        case Copy(target, source):
            return [target, source]


def _is_int(value: object) -> bool:
    # A bool is an int to Python, and no rank. Larger numbers could not even be put into words.
    return type(value) is int and -_LARGEST < value < _LARGEST


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_tuple(value: object) -> bool:
    return type(value) is tuple


def _is_ref(value: object) -> bool:
    return (
        type(value) is Ref
        and type(getattr(value, "buffer", None)) is Buffer
        and _is_int(getattr(value, "chunk", None))
        and _is_int(getattr(value, "count", None))
    )


def _is_message(value: object) -> bool:
    return value is None or _is_ref(value)


def _is_after(value: object) -> bool:
    return type(value) is tuple and all(map(_is_int, value))


_Field = tuple[str, Callable[[object], bool], str]
_INT, _BOOL, _REF = "an int", "a bool", "a Ref of a Buffer and two ints"
_PEER: _Field = ("peer", _is_int, _INT)
_AFTER: _Field = ("after", _is_after, "a tuple of ints")

_SCHEDULE: tuple[_Field, ...] = (
    ("collective", lambda value: type(value) is Collective, "a Collective"),
    ("algorithm", lambda value: type(value) is str, "a str"),
    *((name, _is_int, _INT) for name in ("rank", "size", "root", "input_chunks", "output_chunks")),
    *((name, _is_tuple, "a tuple") for name in ("scratch", "steps")),
    ("even", _is_bool, _BOOL),
)

_STEPS: dict[type, tuple[_Field, ...]] = {
    Send: (_PEER, ("source", _is_message, f"{_REF}, or None"), _AFTER),
    Recv: (_PEER, ("target", _is_message, f"{_REF}, or None"), _AFTER),
    RecvReduce: (
        _PEER,
        *((name, _is_ref, _REF) for name in ("target", "operand")),
        ("incoming_first", _is_bool, _BOOL),
        _AFTER,
    ),
    Reduce: (*((name, _is_ref, _REF) for name in ("target", "left", "right")), _AFTER),
    Copy: (*((name, _is_ref, _REF) for name in ("target", "source")), _AFTER),
}


def _shown(value: object) -> str:
    """Return something of any type in words that are not too many."""
    try:
        words = repr(value)
    except Exception:  # noqa: BLE001 - a foreign object may fail to show itself in any way
        return f"some {type(value).__name__}"
    return words if len(words) <= 80 else f"{words[:77]}..."
