"""A function that is called again, with a new group, when ranks are lost."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from oneaccord.errors import (
    AbortedError,
    ClosedError,
    CollectiveMismatchError,
    CommError,
    InputChangedError,
    PeerLostError,
    UsageError,
)
from oneaccord.group.group import Group
from oneaccord.group.init import init
from oneaccord.group.keeping import check, packed, unpacked
from oneaccord.job.error_file import mark_elastic

__all__ = ["ElasticState", "elastic"]

_log = logging.getLogger("oneaccord.job")

P = ParamSpec("P")
T = TypeVar("T")

_OF_THE_PROGRAM = (CollectiveMismatchError, InputChangedError, ClosedError)
"""Failures that would come again, since the program has made them."""
_IN_VAIN = 3
"""How often in a row a generation may fail for another reason than a death, without a commit."""


class ElasticState(dict[str, Any]):
    """The state from which a function of `elastic` continues after a failure: a dict, the same on all ranks.

    It may hold None, bool, int, float, complex, str, bytes, lists, tuples, sets, dicts, and arrays of NumPy, torch, JAX and CuPy. A rank that
    comes later gets it from another one over the group, as it is; no disk takes part. Arrays on a GPU come to the current one of each rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Any] = {}
        self._commits = -1

    def commit(self) -> None:
        """Keep a copy of the present content: after a failure all ranks continue from the copy of the rank that has committed last.

        Call it on all ranks at a point at which the content is the same on all of them, as after a step of training. It communicates
        with no other rank. Work since the last commit is repeated after a failure.

        Raises
        ------
        UsageError
            The content has a value that could not travel to a rank that comes later; the last commit is still kept.
        """
        check(self, "commit()")
        self._kept = deepcopy(dict(self))
        self._commits += 1

    def _settle(
        self, group: Group, generation: int, start: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    ) -> tuple[int, int]:
        """Bring all ranks to one content; return the number of the new generation, and that of the commits from which they continue."""
        told = group.all_gather_object([generation, self._commits], type=tuple[int, int])
        newest = max(commits for _, commits in told)
        kept = self._kept
        if newest < 0:
            first = packed(start() if callable(start) else start, "elastic()") if group.rank == 0 else None
            kept = unpacked(group.broadcast_object(first))
        elif any(commits != newest for _, commits in told):
            source = [commits for _, commits in told].index(newest)
            mine = packed(kept, "elastic()") if group.rank == source else None
            kept = unpacked(group.broadcast_object(mine, source))
        self._kept, self._commits = kept, max(newest, 0)
        self.clear()
        self.update(deepcopy(kept))
        return max(each for each, _ in told) + 1, self._commits


@overload
def elastic(function: Callable[Concatenate[Group, int, ElasticState, P], T], /) -> Callable[P, T]: ...
@overload
def elastic(
    *,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    backend: str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Callable[[Callable[Concatenate[Group, int, ElasticState, P], T]], Callable[P, T]]: ...
def elastic(
    function: Callable[Concatenate[Group, int, ElasticState, P], T] | None = None,
    /,
    *,
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    backend: str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Let a function survive the death of ranks: after a failure it is called again with a new group, until it has returned on all ranks.

    The function is ``train(group, generation, state, ...)``. The decorated one is called without these three. It makes the group by `init`, and closes
    it in the end. If the group fails, the survivors make a new one by `Group.shrink`; under ``oneaccord run --max-restarts``, replacements of the
    dead ranks join them. Then all have the state that was committed last, and the function is called again.

    >>> @oa.elastic(state=lambda: {"step": 0, "weights": np.zeros(8)})
    ... def train(group, generation, state):
    ...     while state["step"] < 100:
    ...         state["weights"] -= 0.1 * group.all_reduce(gradient(state, group), op="mean")
    ...         state["step"] += 1
    ...         state.commit()
    ...     return state["weights"]

    Parameters
    ----------
    function
        Takes the group, the number of the generation (0 at first, and larger after each failure), the `ElasticState`, and the arguments of the
        decorated function.
    state
        The first content of the state, a dict; or a function that makes it, which rank 0 alone calls, and only once. By default it is empty.
    backend, config, timeout_s
        As for `init`.

    Returns
    -------
    Callable
        The decorated function. It returns the function's result on this rank.

    Raises
    ------
    CommError
        By the decorated function: a `CollectiveMismatchError` or `InputChangedError`, which would come again; the third failure in a row
        that is no death, without a commit; or the survivors did not come together, as `Group.shrink` raises. The errors of `init` pass through, and so
        does any other exception of the function: to the other ranks, this one is then lost.
    UsageError
        ``state`` is neither a mapping with keys of text nor a function; or the first content holds something that cannot travel.
    """
    if not (state is None or callable(state) or isinstance(state, Mapping)):
        raise UsageError(f"state must be a dict, or a function that returns one, not {state!r}")
    options: dict[str, Any] = {"backend": backend, "config": config, "timeout_s": timeout_s}

    def decorate(function: Callable[Concatenate[Group, int, ElasticState, P], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            mark_elastic()
            return _run(init(**options), state or {}, lambda *given: function(*given, *args, **kwargs))

        return run

    return decorate if function is None else decorate(function)


def _run(
    group: Group, start: Mapping[str, Any] | Callable[[], Mapping[str, Any]], call: Callable[[Group, int, ElasticState], T]
) -> T:
    state, generation, base, in_vain = ElasticState(), -1, -1, 0
    failure: CommError | None = None
    while True:
        try:
            before, (generation, base) = base, state._settle(group, generation, start)
            in_vain = in_vain + 1 if _may_be_vain(failure) and base == before else 0
            if failure is not None and in_vain >= _IN_VAIN:
                raise failure
            result = call(group, generation, state)
            group.barrier()  # it has returned on all ranks, or all survivors continue together
        except CommError as error:
            if isinstance(error, _OF_THE_PROGRAM) or error is failure or not group._job.control.failed:
                group.__exit__(type(error), error, None)
                raise
            _log.info("rank %d: generation %d has ended: %s", group.rank, generation, error)
            failure = _without_frames(error)
        except BaseException as error:
            group.__exit__(type(error), error, None)
            raise
        else:
            with contextlib.suppress(CommError):  # a rank that is lost from now on has already returned from the function
                group.close()
            return result
        group = _shrunk(group)


def _without_frames(error: CommError) -> CommError:
    """Take the tracebacks from an error and from those behind it: their frames hold the arrays of the function that has ended."""
    behind: list[BaseException | None] = [error]
    while behind:
        each = behind.pop()
        if each is not None and each.__traceback__ is not None:
            each.__traceback__ = None
            behind += (each.__cause__, each.__context__)
    return error


def _may_be_vain(failure: CommError | None) -> bool:
    """Return whether the error that ended a generation may come again: it is neither a death nor the arrival of new ranks."""
    if failure is None or isinstance(failure, PeerLostError):
        return False
    return not (isinstance(failure, AbortedError) and failure.peer is None)


def _shrunk(group: Group) -> Group:
    try:
        return group.shrink()
    except CommError:
        group.close()
        raise
