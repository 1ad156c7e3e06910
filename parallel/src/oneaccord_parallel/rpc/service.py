"""Services: functions of each rank that the other ranks call by name."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import msgspec
import numpy as np

from oneaccord import Group
from oneaccord.errors import (
    ClosedError,
    CommError,
    DeadlineError,
    InvalidRankError,
    OneAccordError,
    SizeMismatchError,
    UsageError,
)
from oneaccord_parallel.rpc.exchange import FOREVER_S, Exchange, frame_of
from oneaccord_parallel.rpc.functions import Function
from oneaccord_parallel.rpc.messages import (
    CALL,
    COUNT,
    ERROR,
    KEEP,
    REF,
    RELEASE,
    RESULT,
    Fault,
    Faulty,
    Request,
    error_of,
    faults,
    pairs,
    requests,
    sound,
)
from oneaccord_parallel.rpc.packing import Bytes, Parcel, decoder, pack, unpack
from oneaccord_parallel.rpc.references import Objects, Ref, Sweeper
from oneaccord_parallel.rpc.replies import Reply, seconds_of

__all__ = ["Service"]

T = TypeVar("T")

_GET, _METHOD = ".get", ".call"
"""The method that `Ref` calls; a function of the program may not have this name."""
_TOLD = 20
"""How many functions an error names."""


class Service:
    """Functions of each rank that the other ranks call by name. Every rank makes it; best in a ``with`` block.

    >>> with mp.Service(group, {"eval": evaluate}) as svc:
    ...     if group.rank == 0:
    ...         works = [svc.call(rank, "eval", weights, type=float) for rank in range(group.world_size)]
    ...         losses = [work.wait() for work in works]

    Arguments and results travel as msgpack, never as pickles: None, bool, int, float, str, bytes, lists, dicts, dataclasses, times, NumPy
    arrays, as in docs/guides/objects.md. An argument gets the type of the annotation of the function's parameter, and a result that of ``type=``
    says; without these, plain Python objects. If the first parameter of a function is annotated as `Service`, the function gets the
    service there, and may call other ranks itself.

    Large arrays travel as they are, without copies. An array that a function returns is read until it has left: return a copy of one that may
    change meanwhile.

    Functions run in threads, so several run at once. The service has a group of its own, and does not disturb the calls of the program.

    Parameters
    ----------
    group
        The ranks.
    functions
        This rank's functions by name; other ranks may have others. Names do not begin with a dot.
    max_bytes
        The largest request or reply, packed; the same on all ranks.
    threads
        The number of functions that may run at once on this rank; further calls wait. If functions call functions on other ranks, the deepest chain
        must fit.
    timeout_s
        Seconds that a call may last if it does not say otherwise.

    Raises
    ------
    UsageError
        A name or a number is wrong, or the ranks gave different ``max_bytes``. All ranks raise it, and the group stays usable.

    Attributes
    ----------
    rank
        This rank.
    functions
        For each rank the names of its functions.
    """

    def __init__(
        self,
        group: Group,
        functions: Mapping[str, Callable[..., Any]],
        *,
        max_bytes: int = 1 << 30,
        threads: int = 16,
        timeout_s: float = 60.0,
    ) -> None:
        if not isinstance(group, Group):
            raise UsageError(f"expected a Group, such as oa.init() returns, not a {type(group).__name__}: {group!r:.80}")
        problem = _problem(functions, max_bytes, threads, timeout_s)
        part = group.split(0)
        assert part is not None
        offers = part.all_gather_object([problem, max_bytes if problem is None else 0, [] if problem else sorted(functions)])
        sizes = [offer[1] for offer in offers]
        text = next((f"rank {rank}: {offer[0]}" for rank, offer in enumerate(offers) if offer[0] is not None), None)
        if text is None and len(set(sizes)) > 1:
            text = f"all ranks must give the same max_bytes, but they gave {sizes}"
        if text is not None:
            part.close()
            raise UsageError(text, rank=part.rank)
        self.rank: int = part.rank
        self.functions: tuple[frozenset[str], ...] = tuple(frozenset(offer[2]) for offer in offers)
        self._group = part
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._functions = {name: Function(name, function, Service) for name, function in functions.items()}
        self._methods: dict[tuple[type, str], Function] = {}
        self._pending: dict[int, Reply[Any]] = {}
        self._unanswered = [0] * part.world_size
        self._issued = 0
        self._objects = Objects()
        self._sweeper = Sweeper(self._release)
        self._is_closed = False
        self._closing = threading.Lock()
        self._exchange = Exchange(part, threads, self._take, self._fail)
        self._exchange.open()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ", failed" if self._exchange.failure is not None else ""
        return f"<oneaccord_parallel.Service rank {self.rank} of {len(self.functions)}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        self._group.__exit__(kind, error, trace)  # it ends the job, as everywhere
        self._end()

    @property
    def objects(self) -> int:
        """How many objects this rank keeps for references, its own and those of other ranks."""
        return len(self._objects)

    @overload
    def call(
        self, rank: int, function: str, /, *args: Any, type: type[T], timeout_s: float | None = None, **kwargs: Any
    ) -> Reply[T]: ...
    @overload
    def call(
        self, rank: int, function: str, /, *args: Any, type: Any = None, timeout_s: float | None = None, **kwargs: Any
    ) -> Reply[Any]: ...
    def call(
        self,
        rank: int,
        function: str,
        /,
        *args: Any,
        type: Any = None,  # noqa: A002 - as in core
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Reply[Any]:
        """Call a function of a rank, which may be this one. The arguments may be changed at once.

        If nothing else is on its way to that rank, this waits until large arguments have left, so that they need not be copied. If the rank
        takes nothing for as long as the call may last, they may still leave later: then do not change them.

        Parameters
        ----------
        rank
            The rank on which the function runs.
        function
            Its name there.
        args, kwargs
            Its arguments; a `Ref` among them is the object itself on its owner.
        type
            The type of the result: a dataclass, ``dict[str, float]``, ``numpy.ndarray``. By default plain Python objects.
        timeout_s
            Seconds until the reply must be there. Afterwards the caller alone gets a `DeadlineError`.

        Returns
        -------
        Reply
            Its `Reply.wait` returns the result. Calls on one rank begin in the order in which they were made, and may end in another.

        Raises
        ------
        InvalidRankError
            There is no such rank.
        UsageError
            It has no such function, an argument cannot travel, or msgspec does not know ``type``.
        SizeMismatchError
            The request is larger than ``max_bytes``. Nothing was sent.
        ClosedError
            The service was closed.
        CommError
            The group has failed.
        """
        self._check_function(rank, function)
        return self._request(CALL, rank, function, args, kwargs, type, timeout_s)

    def remote(self, rank: int, function: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Ref:
        """Call a function of a rank, leave its result there, and return a reference to it. The result may be any object.

        Parameters
        ----------
        rank, function, args, kwargs, timeout_s
            As for `call`.

        Returns
        -------
        Ref
            The object lives until the last reference to it is gone, or the service is closed or has failed.

        Raises
        ------
        OneAccordError
            As for `call` and for `Reply.wait`.
        """
        return self.remote_async(rank, function, *args, timeout_s=timeout_s, **kwargs).wait()

    def remote_async(
        self, rank: int, function: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Reply[Ref]:
        """Begin a `remote`; ``wait()`` of the reply returns the reference."""
        self._check_function(rank, function)
        return self._request(KEEP, rank, function, args, kwargs, None, timeout_s)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait until all calls of all ranks are answered, and end the service. Every rank calls it. Calling it twice is fine.

        Meanwhile this rank serves the others, so that a rank without calls of its own comes here at once. Objects that are still referred
        to are let go.

        Parameters
        ----------
        timeout_s
            The most seconds to wait for calls of this rank, and then for the others. By default there is no limit but that of 23 days.

        Raises
        ------
        DeadlineError
            A call of this rank was not answered in time. The service stays open. If another rank does not come, the job ends by it.
        UsageError
            A function of the service called this: it would wait for itself. Or ``timeout_s`` is no number of seconds.
        CommError
            The group failed before.
        """
        seconds = FOREVER_S if timeout_s is None else seconds_of(timeout_s)
        if self._exchange.is_worker():
            raise UsageError(
                "a function of a service, or a callback, cannot close it: it would wait for itself; close it in the program"
            )
        with self._closing:
            if self._is_closed:
                return
            try:
                # No call was in flight anywhere between two rounds if none was made from one to the other.
                before = -1
                while True:
                    issued = self._settle(seconds)
                    total = int(self._group.all_reduce(np.int64(issued), timeout_s=seconds))
                    if total == before:
                        break
                    before = total
                self._is_closed = True
                self._sweeper.stop()
                self._exchange.close()
            except DeadlineError:
                if self._exchange.failure is not None:
                    self._end()
                raise
            except CommError:
                self._end()
                raise
            self._end()

    def _end(self) -> None:
        self._sweeper.stop()
        with self._exchange.lock:
            self._is_closed = True
            left = self._fail(ClosedError("the service was closed; make another one", rank=self.rank))
        left.clear()
        self._group.close()

    def _settle(self, timeout_s: float) -> int:
        """Wait until no call of this rank is in flight; return how many it has made."""
        until = time.monotonic() + timeout_s
        while True:
            with self._exchange.lock:
                if self._exchange.failure is not None:
                    raise self._exchange.failure
                reply = next(iter(self._pending.values()), None)
                if reply is None:
                    return self._issued
            if not reply._wait_for_answer(until):
                raise DeadlineError(f"{reply._what} was not answered within {timeout_s:g} s of close()", peer=reply._peer)

    # The calls of this rank

    def _check_function(self, rank: int, function: object) -> None:
        self._check_rank(rank)
        known = self.functions[rank]
        if not isinstance(function, str) or function not in known:
            names = sorted(known)
            more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
            raise UsageError(
                f"rank {rank} has no function {function!r}; it has {', '.join(map(repr, names[:_TOLD])) or 'none'}{more}",
                peer=rank,
            )

    def _check_rank(self, rank: int) -> None:
        if not _is_integer(rank) or not 0 <= rank < len(self.functions):
            raise InvalidRankError(f"expected a rank from 0 to {len(self.functions) - 1}, not {rank!r}")

    def _get(self, ref: Ref, kind: Any, timeout_s: float | None) -> Any:
        self._check_own(ref)
        if ref.owner == self.rank:
            with self._exchange.lock:
                self._check_open()
                return self._objects.get(ref._number)
        return self._request(CALL, ref.owner, _GET, (ref,), {}, kind, timeout_s).wait()

    def _call_method(
        self, ref: Ref, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any, timeout_s: float | None
    ) -> Reply[Any]:
        self._check_own(ref)
        if not isinstance(method, str) or not method.isidentifier() or method.startswith("_"):
            raise UsageError(f"expected a method's name that does not begin with an underscore, not {method!r}")
        return self._request(CALL, ref.owner, _METHOD, (ref, method, *args), kwargs, kind, timeout_s)

    def _check_own(self, ref: Ref) -> None:
        if ref._service is not self:
            raise UsageError(f"{ref!r} belongs to another service")
        if self._is_closed:
            raise ClosedError("the service was closed, and its references with it", rank=self.rank)

    def _request(
        self,
        kind: int,
        rank: int,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        expected: Any,
        timeout_s: float | None,
    ) -> Reply[Any]:
        rank = int(rank)
        seconds = self._timeout_s if timeout_s is None else seconds_of(timeout_s)
        what = f"the call of {function!r} on rank {rank}"
        decode = decoder(expected)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        refs = [(place, value) for place, value in given if isinstance(value, Ref)]
        for _, ref in refs:
            self._check_own(ref)
        request = Request(
            function,
            [None if isinstance(value, Ref) else value for value in args],
            {name: None if isinstance(value, Ref) else value for name, value in kwargs.items()},
            [(place, ref.owner, ref._number) for place, ref in refs],
        )
        body = pack(request, f"an argument of {what}")
        self._check_size(body, what)
        for _, ref in refs:
            if ref.owner != rank:
                self._count(ref.owner, ref._number, seconds)
        return self._ask(kind, rank, body, what, seconds, partial(self._read, decode, what))

    def _check_size(self, body: Parcel, what: str) -> None:
        if body.nbytes > self._max_bytes:
            raise SizeMismatchError(
                f"{what} has {body.nbytes} bytes, and at most {self._max_bytes} may travel: give a larger max_bytes to the service, or less data"
            )

    def _ask(self, kind: int, rank: int, body: Parcel, what: str, seconds: float, read: Callable[[Any], Any]) -> Reply[Any]:
        """Send a frame that will be answered."""
        reply: Reply[Any] = Reply(self._exchange, rank, what, seconds, read)
        with self._exchange.lock:
            self._check_open()
            self._issued = number = self._issued + 1
            self._pending[number] = reply
            # A rank that is stopped takes nothing, and its callers must not wait for it longer than they want to.
            is_alone = not self._unanswered[rank]
            self._unanswered[rank] += 1
        try:
            self._exchange.send(rank, frame_of(kind, number, body), wait_s=seconds if is_alone else 0)
        except BaseException:  # the group has failed, there is no memory, or a signal came
            with self._exchange.lock:
                if self._pending.pop(number, None) is not None:
                    self._unanswered[rank] -= 1
            raise
        return reply

    def _check_open(self) -> None:
        """Raise an error for calls after the end; called under the lock of the exchange."""
        if self._exchange.failure is not None:
            raise self._exchange.failure.with_traceback(None)
        if self._is_closed:
            raise ClosedError("the service was closed; make another one", rank=self.rank)

    def _count(self, owner: int, number: int, seconds: float) -> None:
        """Let an owner count one reference more, for one that is about to travel."""
        if owner == self.rank:
            with self._exchange.lock:
                self._check_open()
                self._objects.add(number)
        else:
            body = pack((number, 1), "a reference")
            self._ask(COUNT, owner, body, f"a reference to an object of rank {owner}", seconds, _ignore).wait()

    def _read(self, decode: msgspec.msgpack.Decoder[Any], what: str, answer: Any) -> Any:
        if isinstance(answer, Ref):
            return answer
        body, arrays = answer
        return unpack(decode, body, arrays, f"the result of {what.removeprefix('the call of ')}")

    # The calls of others

    def _take(self, peer: int, kind: int, number: int, body: memoryview, arrays: list[Bytes]) -> object:
        """Take a frame; called under the lock of the exchange."""
        if kind in (CALL, KEEP):
            request = requests.decode(body)
            args: list[Any] = list(request.args)
            kwargs: dict[str, Any] = dict(request.kwargs)
            for place, owner, count in request.refs:
                # Now, since the caller's own reference may be gone by the time when the function runs.
                value = self._objects.get(count) if owner == self.rank else self._ref(owner, count)
                if isinstance(place, int):
                    args[place] = value
                else:
                    kwargs[place] = value
            self._exchange.submit(partial(self._serve, peer, kind, number, request.function, args, kwargs, arrays))
        elif kind == COUNT:
            self._objects.add(pairs.decode(body)[0])
            self._exchange.send(peer, frame_of(RESULT, number, pack(None, "an answer")), wait_s=0)
        elif kind == RELEASE:
            return self._objects.release(*pairs.decode(body))
        else:
            reply = self._pending.pop(number, None)
            if reply is None:
                return None  # a signal came to the caller
            self._unanswered[peer] -= 1
            if kind == RESULT:
                reply._answered_by((body, arrays), None)
            elif kind == REF:
                reply._answered_by(self._ref(*pairs.decode(body)), None)
            else:
                reply._answered_by(None, error_of(faults.decode(body), peer))
        return None

    def _ref(self, owner: int, number: int) -> Ref:
        self._sweeper.start()
        return Ref(self, self._sweeper, owner, number)

    def _serve(
        self, peer: int, kind: int, number: int, function: str, args: list[Any], kwargs: dict[str, Any], arrays: list[Bytes]
    ) -> None:
        """Run a function for a rank, and send its result."""
        what = f"{function!r} on rank {self.rank}"
        try:
            answer, body = self._result(kind, what, self._called(function, args, kwargs, arrays))
        except Faulty as faulty:
            answer, body = ERROR, pack(faulty.fault, "an error")
        except BaseException as error:  # noqa: BLE001 - such as a lack of memory, and exceptions of the arguments' classes
            answer, body = ERROR, pack(Faulty.raised(error, function, self.rank).fault, "an error")
        # The group may have failed, as the caller learns itself.
        with contextlib.suppress(CommError):
            self._exchange.send(peer, frame_of(answer, number, body), wait_s=FOREVER_S, still=True)

    def _called(self, function: str, args: list[Any], kwargs: dict[str, Any], arrays: list[Bytes]) -> Any:
        try:
            if function == _GET:
                return args[0]
            known, first = self._find(function, args)
            run = known.prepare(first, args, kwargs, arrays)
        except UsageError as error:
            raise Faulty(Fault("usage", str(error))) from None
        try:
            return run()
        except BaseException as error:  # noqa: BLE001 - also SystemExit and CancelledError: it belongs to the caller
            raise Faulty.raised(error, known.name, self.rank) from None

    def _find(self, function: str, args: list[Any]) -> tuple[Function, list[Any]]:
        """Return a function, and its arguments that have not travelled, which are taken out of ``args``."""
        if function != _METHOD:
            known = self._functions[function]
            return known, [self] if known.takes_service else []
        subject, name = args.pop(0), decoder(None).decode(args.pop(0))
        method = getattr(subject, name, None)
        if not callable(method):
            raise UsageError(f"the {type(subject).__qualname__} on rank {self.rank} has no method {name!r}")
        key = type(subject), name
        if getattr(method, "__func__", None) is not getattr(key[0], name, method):
            return Function(name, method, Service), []  # not one of its class: it may be another one next time
        if key not in self._methods:
            self._methods[key] = Function(name, getattr(*key), Service)
        return self._methods[key], [subject]

    def _result(self, kind: int, what: str, value: Any) -> tuple[int, Parcel]:
        """Return the kind and the content of the frame that brings a result."""
        try:
            if isinstance(value, Ref):
                self._check_own(value)
                self._count(value.owner, value._number, self._timeout_s)
                return REF, pack((value.owner, value._number), "a reference")
            if kind == KEEP:
                with self._exchange.lock:
                    return REF, pack((self.rank, self._objects.keep(value)), "a reference")
            body = pack(value, f"the result of {what}")
            self._check_size(body, f"the result of {what}")
        except SizeMismatchError as error:
            raise Faulty(Fault("size", str(error))) from None
        except OneAccordError as error:
            raise Faulty(Fault("usage", str(error))) from None
        return RESULT, body

    def _release(self, owner: int, number: int, count: int) -> None:
        """Inform the owner that references are gone."""
        if owner == self.rank:
            with self._exchange.lock:
                left = self._objects.release(number, count)
            del left
            return
        with contextlib.suppress(CommError):  # all objects are let go then
            self._exchange.send(owner, frame_of(RELEASE, 0, pack((number, count), "references")), wait_s=0)

    def _fail(self, error: BaseException) -> list[Any]:
        """End all calls, and return all objects, to be released without a lock; called under the lock of the exchange."""
        pending, self._pending = self._pending, {}
        for reply in pending.values():
            reply._answered_by(None, error)
        return self._objects.clear()


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _problem(functions: Any, max_bytes: Any, threads: Any, timeout_s: Any) -> str | None:
    """Return the fault of a service's arguments."""
    if not isinstance(functions, Mapping):
        return f"functions must be a dict of names and functions, not {functions!r}"
    for name, function in functions.items():
        if not isinstance(name, str) or not name or name.startswith(".") or name != sound(name):
            return f"a function's name must be a text that does not begin with a dot, not {name!r}"
        if not callable(function):
            return f"{name!r} cannot be called: {function!r}"
    for what, value in (("max_bytes", max_bytes), ("threads", threads)):
        if not _is_integer(value) or value < 1:
            return f"{what} must be a positive integer, not {value!r}"
    try:
        seconds_of(timeout_s)
    except UsageError as error:
        return str(error)
    return None


def _ignore(_: object) -> None:
    pass
