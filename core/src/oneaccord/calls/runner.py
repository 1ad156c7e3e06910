"""One way for every call: its arguments become a program, each of its steps an action, and the action runs when its turn comes.

A repeated call goes from its key straight to the objects of its first time: see `oneaccord.calls.host.fast`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import numpy as np

from oneaccord.arrays.memory import NOTHING
from oneaccord.calls.devices.actions import Aside, DeviceAction
from oneaccord.calls.devices.watch import DeviceWatch
from oneaccord.calls.devices.work import DeviceWork
from oneaccord.calls.failures import awaited, broken_off
from oneaccord.calls.host.actions import HostAction
from oneaccord.calls.host.plans import VECTOR
from oneaccord.calls.inputs import Inputs
from oneaccord.calls.messages.actions import MessageAction, Words
from oneaccord.calls.order.turns import Turns
from oneaccord.calls.paths import Action, HostFast, Paths
from oneaccord.calls.programs import CallBuilder
from oneaccord.calls.request import SLOW_PATH, CallSteps, Message, Operation, SizeExchange
from oneaccord.calls.work import Work
from oneaccord.config import Settings
from oneaccord.contract.deadline import Deadline
from oneaccord.errors import CommError, DeadlineError, UsageError
from oneaccord.job.group_ranks import Members
from oneaccord.job.job import Job
from oneaccord.runtime.computer import COMPUTER

__all__ = ["Call", "Calls"]

_ndarray = np.ndarray
_now = time.monotonic
_MAX_FAST = 512
_NEGLIGIBLE = 1e-3
"""The part of its time that the first step of a call may take without taking it from the second one's."""

_CALLED: Final = {"scatter_shape": "scatter", "scatter_part": "scatter"}
Key = tuple[Any, ...]
"""The name of a call, and its arguments but for the arrays, in the order of `CallBuilder`; made by the methods of a group alone."""
_Place = tuple[Key, np.dtype[Any], tuple[int, ...]]
"""A key, and the dtype and shape of the array."""


_TURN_HOLDERS = ("oneaccord.calls.runner", "oneaccord.group.collectives", "oneaccord.group.messages")


def _has_interrupted_a_call() -> bool:
    """Return whether this call was made in the middle of another one, below it on the stack: signal handlers run in the main thread, at any time."""
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe(1)
    has_left = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if has_left and name in _TURN_HOLDERS:
            return True
        has_left = has_left or not name.startswith("oneaccord.")
        frame = frame.f_back
    return False


class Call:
    """One call on its way: a program, and the action of its present step.

    Parameters
    ----------
    job, members, paths
        The job, the members of the group, and the paths of its calls.
    name
        The user's name of the call.
    make
        Returns its only step, or the program of all of them; the first is made ready at once. It raises the errors of the arguments.
    """

    __slots__ = ("_job", "_members", "_paths", "_program", "action", "name", "step")

    def __init__(self, job: Job, members: Members, paths: Paths, name: str, make: Callable[[], CallSteps | Operation]) -> None:
        self._job = job
        self._members = members
        self._paths = paths
        program = make()
        self._program = None if isinstance(program, Operation) else program
        self.step = program if isinstance(program, Operation) else next(program)
        self.name: str = name
        self.action: Action = paths.prepare(self.step)
        if isinstance(self.step, Message):
            ranks, step = members.ranks, self.step
            to, whence = (None if rank is None else ranks[rank] for rank in (step.dest, step.source))
            self.name = str(Words(to, whence, step.signature))

    @property
    def is_on_device(self) -> bool:
        """Whether it is a call on a device, or may become one."""
        if isinstance(self.step, SizeExchange):
            return bool(self.step.arrays) or self.step.may_be_on_device
        return isinstance(self.action, DeviceAction)

    def apart(self, targets: Sequence[Any]) -> Callable[[Any], Any] | None:
        """As `HostAction.apart`; None also if ranks first exchange numbers."""
        return self.action.apart(targets) if isinstance(self.action, HostAction | MessageAction) else None

    def tell(self, deadline: Deadline) -> None:
        """Do the step in which the ranks exchange numbers, and make the next one ready: the others wait for it from here on."""
        result = self.action.run(deadline)
        with awaited(self._job, self._members, self.name):
            self._go_on(result)

    def run(self, deadline: Deadline) -> Any:
        """Carry out the remaining steps, and return the caller's result."""
        result = self.action.run(deadline)
        while isinstance(self.step, SizeExchange):
            with awaited(self._job, self._members, self.name):
                self._go_on(result)
                result = self.action.run(deadline)
        if self._program is None:
            return result
        try:
            self._go_on(result)
        except StopIteration as end:
            return end.value
        return self.run(deadline)

    def run_awaited(self, deadline: Deadline) -> Any:
        """Carry out the step after `tell`, and those after that."""
        with awaited(self._job, self._members, self.name):
            return self.run(deadline)

    def _go_on(self, result: Any) -> None:
        assert self._program is not None
        self.step = self._program.send(result)
        self.action = self._paths.prepare(self.step)


class Calls:
    """A group without its methods.

    Parameters
    ----------
    job, members
        The job and the members of the group.
    paths
        Carries its calls out.
    settings
        The config.
    """

    def __init__(self, job: Job, members: Members, paths: Paths, settings: Settings) -> None:
        self._job = job
        self._members = members
        self._paths = paths
        self._call_sequence = paths.call_sequence
        self._builder = CallBuilder(job, members, paths, settings)
        self._timeout_s = settings.timeout_s
        self._callbacks = Turns(job.runtime)
        self._fast = paths.fast
        self._compiled: dict[Hashable, Any] = {}
        self._table: dict[Key, list[Any]] = {}
        if paths.native is not None:
            whose = job, job.control, job.closed_groups, members.number, paths.plugins, float(settings.timeout_s)
            # C answers for calls that it knows, and hands all others to the method.
            self._caller = paths.native.Caller(self._table, self._call, self._go_on, *whose)
            self._call = self._caller.call  # type: ignore[method-assign]
        # If the first step says whether the arrays are on devices, or time is simulated, a scatter is one program.
        self._steps_stay_together = job.runtime.is_simulated or paths.devices.channel is not None or not paths.host.moves
        watches = settings.check_inputs or job.runtime.is_simulated
        self._inputs: Inputs | None = Inputs(job, members) if watches else None

    # From a key to the object that carries the call out

    def _call(self, key: Key, array: Any, out: Any, timeout_s: float | None) -> Any:
        """Make a call and wait for its result: on the fast path if a similar one was made before. C comes here with everything that it does not know."""
        place: Any
        try:
            place = (key, array.dtype, array.shape) if type(array) is _ndarray else (key, type(array), array.dtype, array.shape)
            fast = self._fast.get(place)
        except (TypeError, AttributeError):  # an argument that cannot be a key; no array
            place = fast = None
        if fast is not None:
            if timeout_s is None:
                seconds = self._timeout_s
            elif type(timeout_s) is float and 0.0 < timeout_s < math.inf:
                seconds = timeout_s
            else:
                seconds = Deadline(timeout_s).timeout_s  # raises if it is not a number of seconds
            try:
                result = fast.run(array, out, seconds)
            except CommError:
                self._saw()
                raise
            if result is not SLOW_PATH:
                return result
        call = self._start(key, place, array, out)
        if fast is None and place is not None and type(array) is _ndarray and isinstance(call.action, HostAction):
            result = self._first(call.action, place, timeout_s)
            if result is not SLOW_PATH:
                return result
        result = self._now(call, timeout_s)
        self._remember(call, place, array)
        return result

    def _go_on(self, fast: HostFast, array: Any, target: Any, at: tuple[int, int], timeout_s: float) -> Any:
        """Continue after C has stopped in the middle of a call."""
        try:
            return fast.go_on(array, target, at, timeout_s)
        except CommError:
            self._saw()
            raise

    def _first(self, action: HostAction, place: _Place, timeout_s: float | None) -> Any:
        """Make the first call of its kind, as those after it will be made; `SLOW_PATH` if they have no fast path."""
        fast, out = self._paths.host.fast(action), action.step.out
        if fast is None or (out is not None and out is not action.target):
            return SLOW_PATH
        target = None if action.step.shape is None else action.target
        seconds = self._timeout_s if timeout_s is None else Deadline(timeout_s).timeout_s
        try:
            result = fast.run(action.source, target, seconds)
        except CommError:
            self._saw()
            raise
        if result is not SLOW_PATH:
            self._keep(place, fast)
        return result

    def _scatter(self, array: Any, out: Any, root: int, counts: Any, timeout_s: float | None) -> Any:
        """Make a scatter: its two steps one after the other, each of which has a fast path if the arrays are on the host."""
        told: Any = NOTHING
        if self._members.rank == root:
            may = type(array) is _ndarray and counts is None and array.flags.c_contiguous
            told = self._builder.described(array) if may else None
        else:
            array = NOTHING
        if told is None or counts is not None or self._steps_stay_together or (out is not None and type(out) is not _ndarray):
            return self._call(("scatter", root, counts), array, out, timeout_s)
        started = _now()
        told = self._call(("scatter_shape", root), told, None, timeout_s)
        try:
            seconds, passed = self._timeout_s if timeout_s is None else timeout_s, _now() - started
            if passed > _NEGLIGIBLE * seconds:
                timeout_s = max(seconds - passed, _NEGLIGIBLE * seconds)
            return self._call(("scatter_part", root, told.tobytes()), array, out, timeout_s)
        except BaseException as error:
            broken_off(self._job, self._members, "scatter", error)
            raise

    def _call_async(
        self, key: Key, array: Any, out: Any, timeout_s: float | None, *, reads: Any = None, writes: Sequence[Any] = ()
    ) -> Work[Any]:
        """Make a call that continues in the background, likewise; ``reads`` and ``writes`` are the caller's arrays that it uses."""
        place: Hashable = None
        if type(array) is _ndarray and self._inputs is None and array.flags.c_contiguous and not self._paths.observed:
            place = (key, array.dtype, array.shape)
            try:
                fast = self._fast.get(place)
            except TypeError:  # an argument that cannot be a key
                place = fast = None
            later = None if fast is None else fast.later(array, out)
            if later is not None:
                name, turns, action = later
                seconds = self._timeout_s if timeout_s is None else Deadline(timeout_s).timeout_s
                if not self._call_sequence.is_usable:
                    self._check_open(name)
                work: Work[Any] = Work(name, self._callbacks, self._saw)
                turns.submit(partial(work.run, partial(action, seconds)))
                return work
        call = self._start(key, None, array, out)
        remember = None if place is None else partial(self._remember, call, place, array)
        return self._later(call, timeout_s, reads=reads, writes=writes, then=remember)

    def _start(self, key: Key, place: Hashable, array: Any, out: Any) -> Call:
        """Check the arguments of a call, and make its first step ready."""
        name: str = key[0]
        make = partial(self._builder.makers[name], array, out, *key[1:])
        call = Call(self._job, self._members, self._paths, _CALLED.get(name, name), make)
        if place is not None and isinstance(call.action, DeviceAction) and isinstance(call.step, Operation):
            remember = partial(self._paths.devices.remember, place, call.step, call.action.library)
            call.action.then = partial(remember, in_place=call.step.request.collective in VECTOR)
        return call

    def _remember(self, call: Call, place: Any, array: Any) -> None:
        """Let the next call of this kind take the fast path, if it has one."""
        if place is None or type(array) is not _ndarray:
            return
        known = self._fast.get(place)
        if known is not None and not known.is_stale:
            return  # it was only this call that was unusual
        fast: HostFast | None = None
        if isinstance(call.action, HostAction):
            fast = self._paths.host.fast(call.action)
        elif isinstance(call.action, MessageAction):
            fast = self._paths.messages.fast(call.action, array)
        if fast is not None:
            self._keep(place, fast)

    def _keep(self, place: _Place, fast: HostFast) -> None:
        while len(self._fast) >= _MAX_FAST:
            self._forget(next(iter(list(self._fast))))
        self._forget(place)
        self._fast[place] = fast
        key, dtype, shape = place
        compiled = None if self._paths.native is None else fast.compiled(self._paths.native, dtype, shape)
        if compiled is not None:
            self._compiled[place] = compiled
            self._table.setdefault(key, []).append(compiled)

    def _forget(self, place: Hashable) -> None:
        self._fast.pop(place, None)
        compiled = self._compiled.pop(place, None)
        if compiled is not None:
            key = cast("_Place", place)[0]
            left = [each for each in self._table.get(key, ()) if each is not compiled]
            if left:
                self._table[key] = left
            else:
                self._table.pop(key, None)

    def _run_program(self, name: str, make: Callable[[], CallSteps], timeout_s: float | None) -> Any:
        """Make a call that has a program of its own, and wait for its result."""
        return self._now(Call(self._job, self._members, self._paths, name, make), timeout_s)

    def _run_program_async(self, name: str, make: Callable[[], CallSteps], timeout_s: float | None) -> Work[Any]:
        """Make a call that has a program of its own, and that continues in the background."""
        return self._later(Call(self._job, self._members, self._paths, name, make), timeout_s)

    def _rank_of(self, root: int) -> int:
        """Return the rank that is given as ``root=``, as Python's own integer; raises as `Arguments.rank`."""
        return self._builder.arguments.rank(root, "root")

    # Now, or in the background

    def _begin(self, timeout_s: float | None) -> Deadline:
        """Begin a call; return until when it may last."""
        runtime, seconds = self._job.runtime, self._timeout_s if timeout_s is None else timeout_s
        if runtime is COMPUTER:
            return Deadline(seconds)
        runtime.enter(self._job.rank)
        return Deadline(seconds, runtime.now)

    def _check_open(self, what: object = None, sequence: int | None = None) -> None:
        try:
            self._call_sequence.check(what, sequence)
        except CommError:
            self._saw()
            raise

    def _now(self, call: Call, timeout_s: float | None) -> Any:
        """Run a call in this thread when its turns come, and return its result."""
        number = self._call_sequence.messages + 1 if isinstance(call.step, Message) else self._call_sequence.next
        return self._in_this_thread(call.name, call.action.turns, call.run, timeout_s, number)

    def _in_this_thread(
        self,
        what: str,
        turns: Sequence[Turns],
        run: Callable[[Deadline], Any],
        timeout_s: float | None,
        number: int | None = None,
    ) -> Any:
        """Run a call, ``what`` in words, and #``number``, in this thread when its turns have come, one after the other."""
        deadline = self._begin(timeout_s)
        self._check_open(what, number)  # before it waits for the turn of a group that has closed
        taken: list[Turns] = []
        try:
            for each in turns:
                self._take(each, what, deadline)
                taken.append(each)
            return run(deadline)
        except CommError:
            self._saw()
            raise
        finally:
            for each in taken:
                each.give()

    def _take(self, turns: Turns, what: str, deadline: Deadline) -> None:
        """Take a turn for this thread."""
        if turns.take_if_free():
            return
        if _has_interrupted_a_call():
            raise UsageError(
                f"a signal handler called {what} while this thread was in the middle of another call, for which it would wait forever: set a flag in "
                "the handler, and make the call later, between two calls of the program; nothing was sent",
                rank=self._job.rank,
                operation=what,
            )
        try:
            turns.take(deadline)
        except TimeoutError:
            raise DeadlineError(
                f"{what} did not begin within {deadline.timeout_s:g} s: {turns.holder}; nothing was sent",
                rank=self._job.rank,
                peer=turns.peer,
                operation=what,
            ) from None

    def _later(
        self,
        call: Call,
        timeout_s: float | None,
        *,
        reads: Any = None,
        writes: Sequence[Any] = (),
        then: Callable[[], None] | None = None,
    ) -> Work[Any]:
        """Run a call in the background when its turn comes; its time begins then, since those before it have their own.

        ``then`` is called once the call has gone well.
        """
        seconds = self._begin(timeout_s).timeout_s
        self._check_open(call.name)
        if call.is_on_device:
            return self._beside(call, seconds)
        work: Work[Any] = Work(call.name, self._callbacks, self._saw)
        runtime = self._job.runtime
        turns = next(iter(call.action.turns), None) or self._call_sequence.direction(None, is_send=True)
        action: Callable[[Deadline], Any] = call.run
        if self._inputs is not None:
            action = self._inputs.guard(call.name, action, turns, reads, writes, call.apart)

        def run() -> Any:
            result = action(Deadline(seconds, runtime.now))
            if then is not None:
                then()
            return result

        turns.submit(runtime.on_behalf(lambda: work.run(run)))
        return work

    def _beside(self, call: Call, timeout_s: float) -> Work[Any]:
        """Enqueue a call beside the caller's stream, in this thread if its turn is now and it need not wait for the other ranks."""
        first, devices = call.action, self._paths.devices
        if devices.channel is None or (isinstance(first, DeviceAction) and first.is_copy):  # the caller's stream copies
            copied: Work[Any] = Work(call.name, self._callbacks, self._saw)
            copied.run(lambda: call.run(Deadline(timeout_s)))
            return copied
        work = self._device_work(call.name)
        if isinstance(first, DeviceAction):
            first.begin()
            self._in_turn(lambda: work.launch(lambda: first.launch(Deadline(timeout_s))), waits=not first.is_known)
            return work
        assert isinstance(call.step, SizeExchange)
        aside = Aside(devices, call.step.arrays)

        def run() -> None:
            deadline = Deadline(timeout_s)
            try:
                with aside.streams():
                    call.tell(deadline)
                    action = call.action
                    if isinstance(action, DeviceAction):
                        with awaited(self._job, self._members, call.name):
                            aside.place(action)
            except BaseException as error:  # noqa: BLE001 - the wait for the result raises it
                work.fail(error)
                return
            if isinstance(action, DeviceAction) and not action.is_copy:
                work.launch(lambda: action.launch(deadline))
            else:
                work.run(lambda: call.run_awaited(deadline))

        self._in_turn(run, waits=True)
        return work

    def _device_work(self, what: str) -> DeviceWork[Any]:
        return DeviceWork(what, self._callbacks, self._saw, self._job, DeviceWatch.of(self._job))

    def _in_turn(self, run: Callable[[], None], *, waits: bool) -> None:
        """Run a call in this thread if its turn is now and it does not wait, otherwise in the background when its turn comes."""
        if waits or not self._call_sequence.take_if_free():
            self._call_sequence.submit(run)
            return
        try:
            run()
        finally:
            self._call_sequence.give()

    def _saw(self) -> None:
        """Take note that the program has seen how the job failed; a failure in a handle that was dropped has not been seen."""
        self._job.failure_seen = True

    # The end

    def _all_turns(self) -> list[Turns]:
        return [*self._call_sequence.turns(), self._callbacks]

    def _drain(self, deadline: Deadline, *, for_good: bool = True) -> bool:
        """Wait until the calls in flight, and their callbacks, have ended, as long as the deadline allows.

        Return whether there was nothing to close. A callback that closes the group does not wait for itself.
        """
        idle = True
        for turns in self._all_turns():
            if turns.runs_here:
                continue
            try:
                idle = turns.take(deadline, for_good=for_good) and idle
            except TimeoutError:
                idle = False
            else:
                turns.give()
        idle = self._paths.post.drain(deadline) and idle
        return self._paths.devices.finish(deadline) and idle

    def _when_idle(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the last call that is in flight has ended: usually now. The caller must know that no other one will come."""
        busy = [turns for turns in self._all_turns() if turns.runs_here or not turns.is_free]
        left = len(busy)
        counting = threading.Lock()

        def ended() -> None:
            nonlocal left
            with counting:
                left -= 1
                last = left == 0
            if last:
                then()

        if not busy:
            then()
        for turns in busy:
            turns.submit(ended)
