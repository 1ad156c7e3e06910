"""`launch`: a function on many ranks, from a program or a notebook."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from oneaccord.common.checks import whole
from oneaccord.common.threads import Thread
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.launcher import Ask
from oneaccord.contract.workers import WorkerLauncher
from oneaccord.engines.local import LocalOptions, LocalWorkers
from oneaccord.engines.packing import pack
from oneaccord.engines.registry import make_launcher
from oneaccord.engines.workers import Call, Gang, Status
from oneaccord.errors import DeadlineError, InvalidWorldSizeError, UsageError

__all__ = ["PLACING_S", "Job", "asked", "launch", "launch_async", "packed_call", "start"]

PLACING_S: Final = 300.0
"""How long an engine may take to provide workers, if the caller gives no time."""


def launch(
    function: Callable[..., Any],
    n: int,
    *,
    on: str | WorkerLauncher = "local",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    per_host: int | None = None,
    gpus: int = 0,
    timeout_s: float | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call a function on ``n`` new ranks, each a process of its own, and return what it returned on each.

    The function and its arguments travel by pickle, and so does what it returns. A function of a notebook, of the program itself, or a ``lambda`` needs cloudpickle:
    ``pip install "oneaccord[launch]"``. What the ranks print appears here, with the rank in front of each line. Ctrl-C ends the ranks. When this
    returns or raises, no rank is left, and none outlives this program.

    Parameters
    ----------
    function
        Called as ``function(group, *args, **kwargs)`` on each rank, with the `Group` of all of them, which is closed afterwards.
    n
        How many ranks.
    on
        Where they run: ``"local"`` for processes on this host, or a launcher.
    args, kwargs
        The arguments, the same on all ranks.
    per_host
        How many ranks each host gets; by default the launcher decides.
    gpus
        How many GPUs each rank gets, and sees as the only ones.
    timeout_s
        The most seconds for all of it, by default as long as it takes. Each call of the group has its own timeout in any case.
    options
        What the launcher takes; for ``"local"``: ``prefix`` (of each line of output, a bool), ``grace_s`` (seconds that ranks may take to end after a
        failure or Ctrl-C, 3), ``environ`` (more variables), ``fork`` (False starts a Python for each rank).
    backend, config
        As for `oneaccord.init`, on the ranks.

    Returns
    -------
    list
        What ``function`` returned on each rank, by rank.

    Raises
    ------
    Exception
        What the rank raised that failed first, of its own type. A note (``__notes__``) names the rank and the others that failed, and holds the
        traceback.
    RankError
        A rank was killed or left by ``sys.exit()``, or its exception cannot be pickled.
    DeadlineError
        ``timeout_s`` is up; the message names the ranks that had not finished.
    UsageError
        An argument is impossible; the function, an argument or a result cannot be pickled, or only by cloudpickle, which is not installed.
    PluginError
        The backend is not installed, or cannot run here.

    Examples
    --------
    >>> import oneaccord as oa
    >>> oa.launch(oa.Group.all_gather_object, 2, args=["hello"])  # doctest: +SKIP
    [['hello', 'hello'], ['hello', 'hello']]
    """
    job = launch_async(
        function,
        n,
        on=on,
        args=args,
        kwargs=kwargs,
        per_host=per_host,
        gpus=gpus,
        timeout_s=timeout_s,
        options=options,
        backend=backend,
        config=config,
    )
    try:
        return job.results()
    finally:
        job.cancel()


def launch_async(
    function: Callable[..., Any],
    n: int,
    *,
    on: str | WorkerLauncher = "local",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    per_host: int | None = None,
    gpus: int = 0,
    timeout_s: float | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Job:
    """Start what `launch` does, and return at once.

    Parameters
    ----------
    function, n, on, args, kwargs, per_host, gpus, timeout_s, options, backend, config
        As for `launch`.

    Returns
    -------
    Job
        Its `Job.results` are those of `launch`. It ends with this program at the latest.

    Raises
    ------
    UsageError, PluginError
        As for `launch`, as far as it is known before a rank starts.
    """
    ask = asked(n, per_host, gpus)
    deadline = None if timeout_s is None else Deadline(timeout_s)
    call = packed_call(function, args, kwargs, backend, config)
    return Job(start(on, options, call), ask, call, deadline)


class Job:
    """A function that runs on many ranks, started by `launch_async`."""

    def __init__(self, launcher: WorkerLauncher, ask: Ask, call: Call, deadline: Deadline | None) -> None:
        self._launcher = launcher
        self._ask = ask
        self._call = call
        self._deadline = deadline
        self._gang: Gang | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._process = os.getpid()
        self._results: list[Any] = []
        self._error: BaseException | None = None
        Thread(target=self._run, name="oneaccord-job", daemon=True).start()

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the end, and return what the function returned on each rank, by rank.

        Parameters
        ----------
        timeout_s
            The most seconds to wait; by default as long as it takes. The job goes on afterwards.

        Raises
        ------
        Exception
            As for `launch`.
        AbortedError
            The job was cancelled.
        DeadlineError
            It has not ended by then; the message names the ranks that run.
        UsageError
            This process was forked from the one that has started the job.
        """
        if self._process != os.getpid() and not self._done.is_set():
            raise UsageError(
                f"{self._call.name} was started by process {self._process}, from which this one was forked: ask for the results there"
            )
        if not self._done.wait(None if timeout_s is None else Deadline(timeout_s).remaining()):
            running = ", ".join(str(each.rank) for each in self.ranks if each.state == "running")
            raise DeadlineError(
                f"{self._call.name} has not ended within {timeout_s:g} s, and goes on; still running: rank {running}"
            )
        if self._error is not None:
            raise self._error
        return self._results

    def cancel(self) -> None:
        """End the ranks, and wait until none is left. If the job has ended already, or in a forked child, nothing changes."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._is_cancelled = True
            gang = self._gang
        if gang is not None:
            gang.cancel()
        self._done.wait()

    @property
    def ranks(self) -> tuple[Status, ...]:
        """What is known of each rank: its number, its host and its state; empty until they have places."""
        gang = self._gang
        return (
            ()
            if gang is None
            else tuple(
                Status(worker.index, worker.host, state) for worker, state in zip(gang.workers, gang.states, strict=True)
            )
        )

    def _run(self) -> None:
        try:
            self._results = self._on_ranks()
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            self._error = error
        self._done.set()

    def _on_ranks(self) -> list[Any]:
        gang = Gang.of(self._launcher, self._ask, self._deadline or Deadline(PLACING_S), stays=False)
        try:
            with self._lock:
                self._gang = gang
                if self._is_cancelled:
                    gang.cancel()
            return gang.run(self._call, self._deadline)
        finally:
            gang.close()


def asked(n: int, per_host: int | None, gpus: int) -> Ask:
    """Return what is asked of a launcher, after checks."""
    ranks, each_host, each_rank = whole(n), per_host if per_host is None else whole(per_host), whole(gpus)
    if ranks is None or ranks < 1:
        raise InvalidWorldSizeError(f"n must be a positive number of ranks, not {n!r}")
    if per_host is not None and (each_host is None or each_host < 1):
        raise UsageError(f"per_host must be a positive number of ranks, or None, not {per_host!r}")
    if each_rank is None or each_rank < 0:
        raise UsageError(f"gpus must be a number of GPUs for each rank, 0 or more, not {gpus!r}")
    return Ask(ranks, each_host, each_rank)


def packed_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    backend: str | None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> Call:
    """Return a call that can travel."""
    if not callable(function):
        raise UsageError(f"function must be callable, as function(group, *args, **kwargs), not {function!r}")
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise UsageError(f"args must be a sequence of arguments, not {args!r}; for one argument: args=(value,)")
    _check_named("kwargs", kwargs)
    if not isinstance(config, str | os.PathLike | Mapping | None):
        raise UsageError(f"config must be the path of a file, or a mapping, not {config!r}")
    name = getattr(function, "__qualname__", None) or repr(function)
    packed = pack((function, tuple(args), dict(kwargs or {})), f"the function {name} with its arguments")
    where = dict(config) if isinstance(config, Mapping) else None if config is None else str(Path(config).absolute())
    return Call(packed, f"{name}()", backend, where)


def start(on: str | WorkerLauncher, options: Mapping[str, Any] | None, call: Call) -> WorkerLauncher:
    """Return a new launcher."""
    _check_named("options", options)
    if "max_restarts" in (options or {}):
        raise UsageError(
            "launch() and Ranks replace no ranks, so max_restarts is no option: start a script by oneaccord run --max-restarts N, or repeat tasks "
            "by Ranks(retries=N)"
        )
    if not isinstance(on, str):
        if not callable(getattr(on, "place", None)):
            raise UsageError(f'on must be "local", the name of a launcher, or a launcher itself, not {on!r}')
        if options:
            raise UsageError("options are for a launcher that is named; give them to the launcher itself")
        return on
    if on != "local":
        return make_launcher(on, dict(options or {}))
    try:
        chosen = LocalOptions(**(options or {}))
    except TypeError as error:
        known = ", ".join(LocalOptions.__dataclass_fields__)
        raise UsageError(f'options of on="local" are {known}; {", ".join(options or {})} was given ({error})') from None
    return LocalWorkers(chosen, _modules(call))


def _check_named(name: str, given: Any) -> None:
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(each, str) for each in given)):
        raise UsageError(f"{name} must be a mapping from names to values, not {given!r}")


def _modules(call: Call) -> tuple[str, ...]:
    """Return what ranks will import for the backend, so that they can be forked with it; find mistakes in the configuration before a rank starts."""
    from oneaccord.local.resolve import resolve_launcher  # imports pydantic

    resolution = resolve_launcher(call.backend, call.config)
    if resolution.launcher is not None:
        raise UsageError(
            f"the backend {resolution.backend!r} starts its ranks itself, so launch() has no use for it: run a script by oneaccord run --backend "
            f"{resolution.backend}, or choose another backend"
        )
    return resolution.modules
