"""The fast path of a call that was made before: no look-ups, no objects, all checks.

Most programs make the same small call again and again. Its cost is then Python's time, not the network's. So everything that can be
known beforehand is found before the first such call, which takes this path as well. The rest is checked here each time: the group
is usable, no other call has the turn, ``out=`` fits. If anything is unusual, the call takes the slow path, before anything
was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from oneaccord.arrays.memory import Array, divide
from oneaccord.calls.engine import Executable, Patience
from oneaccord.calls.engine.waiting import Waiter
from oneaccord.calls.failures import again, guarded
from oneaccord.calls.host.plans import Plan
from oneaccord.calls.order.call_sequence import CallSequence
from oneaccord.calls.request import SLOW_PATH, Later
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.header import CallSignature
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job

__all__ = ["CachedCall", "example"]

_ndarray, _empty, _share, _now = np.ndarray, np.empty, np.may_share_memory, time.monotonic
_Run = Callable[[Array, Array, int, Patience], None]


def example(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return an array of a dtype and shape that has only these, and takes no memory."""
    return np.broadcast_to(_empty((), dtype), shape)


class CachedCall:
    """One kind of call of one group, with arrays of one dtype and shape.

    Parameters
    ----------
    job, members, call_sequence
        The job, the members of the group, and its call sequence.
    plan
        The plan of the request.
    dtype, shape
        Those of the result.
    in_place
        Whether the result may go to the memory of the input.
    gives, takes
        Whether this rank's input counts, and whether it gets the result.
    identity
        The result, if it comes from no rank.

    Attributes
    ----------
    is_stale
        As for `Fast`.
    """

    is_stale: ClassVar[bool] = False

    __slots__ = (
        "_any_layout",
        "_call_sequence",
        "_divisor",
        "_dtype",
        "_gives",
        "_identity",
        "_in_place",
        "_job",
        "_members",
        "_nothing",
        "_patience",
        "_plan",
        "_run",
        "_shape",
        "_signature",
        "_takes",
        "_timeout_s",
    )

    def __init__(
        self,
        job: Job,
        members: Members,
        call_sequence: CallSequence,
        plan: Plan,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        in_place: bool,
        gives: bool,
        takes: bool,
        identity: Array | None,
    ) -> None:
        self._job = job
        self._members = members
        self._call_sequence = call_sequence
        self._signature = plan.signature
        self._plan = plan
        self._run: _Run = self._run_first
        self._any_layout = False
        self._divisor = plan.divisor if takes else 1
        self._dtype = dtype
        self._shape = shape
        self._in_place = in_place
        self._gives = gives
        self._takes = takes
        self._identity = identity
        self._nothing: Array = _empty(0, dtype)
        self._patience = self._be_patient
        self._timeout_s = 0.0  # of the call that has its turn

    def run(self, array: Array, out: object, timeout_s: float) -> Any:
        """Make the call, and return its result; `SLOW_PATH` if it must take that path.

        Parameters
        ----------
        array
            The input, of the dtype and shape that it had the first time.
        out
            The user's ``out=``.
        timeout_s
            Seconds that the call may last.

        Raises
        ------
        CommError
            As `HostPath.run`.
        """
        target = self.target(array, out)
        if target is None:
            return SLOW_PATH
        return self._carry_out(array, target, timeout_s, self._call_sequence.enter, self._run, gives_turn=True)

    def later(self, array: Array, out: object) -> Later | None:
        """Return the call to be made later: its words, its turn, and a function that makes it within a number of seconds; None for the slow path."""
        target = self.target(array, out)
        return (
            None if target is None else (self._signature.operation, self._call_sequence, partial(self._in_turn, array, target))
        )

    def compiled(self, module: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """As for `HostFast`."""
        way, call_sequence = self._plan.way, self._call_sequence
        if not isinstance(way, Executable) or way.compiled is None:
            return None
        mean: dict[str, Any] = {}
        if self._divisor > 1:
            mean = {"quotient": np.true_divide, "divisor": np.array(self._divisor, self._dtype)}
            if self._dtype.itemsize <= 2 or mean["divisor"].dtype is not self._dtype:
                return None
        if self._identity is not None and self._identity.dtype is not self._dtype:
            return None
        given, result = example(dtype, shape), example(self._dtype, self._shape)
        what = self._signature, given, result, self._nothing, way.compiled
        kinds = self._gives, self._takes, self._in_place
        return module.Call(self, call_sequence, call_sequence.counters, *what, *kinds, identity=self._identity, **mean)

    def go_on(self, array: Array, target: Array | None, at: tuple[int, int], timeout_s: float) -> Any:
        """As for `HostFast`."""
        (number, step), way = at, self._plan.way
        assert isinstance(way, Executable)

        def run(source: Array, target: Array, number: int, patience: Patience) -> None:
            way.go_on(source, target, number, patience, step)

        return self._carry_out(
            array, self._nothing if target is None else target, timeout_s, lambda _: number, run, gives_turn=True
        )

    def _in_turn(self, array: Array, target: Array, timeout_s: float) -> Any:
        call_sequence = self._call_sequence
        call_sequence.check(self._signature.operation, call_sequence.next)
        return self._carry_out(array, target, timeout_s, call_sequence.counters.begin, self._run, gives_turn=False)

    def target(self, array: Array, out: object) -> Array | None:
        """Return the memory for the result; None if the call must take the slow path."""
        if not self._any_layout and not array.flags.c_contiguous:
            return None
        if not self._takes:
            return self._nothing
        if out is None:
            try:
                return _empty(self._shape, self._dtype)
            except MemoryError:  # the long way says so in our words
                return None
        if type(out) is _ndarray and out.dtype is self._dtype and out.shape == self._shape and out.flags.carray:
            if not self._any_layout and not (self._in_place and out is array) and _share(array, out):
                return None
            return out
        return None

    def _carry_out(
        self,
        array: Array,
        target: Array,
        timeout_s: float,
        enter: Callable[[CallSignature], int],
        run: _Run,
        *,
        gives_turn: bool,
    ) -> Any:
        signature, number = self._signature, -1
        try:
            try:
                number = enter(signature)
                if number < 0:
                    return SLOW_PATH
                self._timeout_s = timeout_s
                run(array if self._gives else self._nothing, target, number, self._patience)
            except BaseException as error:
                if number < 0:
                    raise
                guarded(self._job, self._members, number, signature, self._deadline(), partial(again, error))
            if self._divisor > 1:
                divide(target, self._divisor)
            if self._identity is not None:
                target[...] = self._identity
        finally:
            if number >= 0:
                self._call_sequence.leave(gives_turn)
        return target if self._takes else None

    def _run_first(self, source: Array, target: Array, number: int, patience: Patience) -> None:
        """Connect to the peers, and carry the plan out; from then on it is carried out at once."""
        way = self._plan.ready(self._deadline)
        self._any_layout = way.takes_any_layout
        self._run = way.run
        way.run(source, target, number, patience)

    def _deadline(self) -> Deadline:
        deadline = Deadline(self._timeout_s)
        deadline.at += self._call_sequence.started - _now()
        return deadline

    def _be_patient(self) -> Waiter:
        """Return a function that waits for the messages that did not come at once, as on the slow path."""
        return Waiter(self._deadline(), self._call_sequence.record_slow(self._signature))
