"""What runs on each host of a host launcher: ``python -m oneaccord.engines.agent``, which starts and ends the ranks of that host.

Lines of JSON come on standard input: first the order, then the address at which the ranks meet, then signals and the input of the ranks. Its end, as when the driver is killed or the
connection breaks, ends the ranks. Lines go out on standard output, each behind a mark, because a login shell may write there too.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from oneaccord._version import __version__
from oneaccord.common.threads import Thread
from oneaccord.common.variables import Variable
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.launcher import Ask
from oneaccord.errors import OneAccordError, UsageError
from oneaccord.job.error_file import ErrorRecord
from oneaccord.local.failure import Ended, Failure
from oneaccord.local.forked import fork_server
from oneaccord.local.groups import signals_as_bytes
from oneaccord.local.launching import Launch
from oneaccord.local.output import Screen
from oneaccord.local.owner import Owner
from oneaccord.local.processes import run_job
from oneaccord.local.variables import shared_variables, with_hash_seed
from oneaccord.net.credentials import Credentials
from oneaccord.net.network import guarded_bind, show_address

__all__ = ["MARK", "START_S", "as_ended", "as_text"]

MARK: Final = b"oneaccord-agent "
"""In front of each line that the agent writes."""
START_S: Final = 120.0
"""How long the hosts may take to be reached and to get ready."""
_END_S: Final = 1.0
"""How long ranks may take to end once the driver is gone."""
_READ_BYTES: Final = 1 << 16
_HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class _Driver:
    """The connection to the driver: lines from it, and lines to it.

    Parameters
    ----------
    source, target
        The descriptors.
    """

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._held = bytearray()
        self._target = target
        self._lock = threading.Lock()
        self._is_gone = False
        self._input: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive(self) -> dict[str, Any] | None:
        """Return what comes next; None at the end."""
        # No buffered file: a thread that waits in one would keep the interpreter from ending.
        looked = 0
        while (end := self._held.find(b"\n", looked)) < 0:
            looked = len(self._held)
            more = os.read(self._source, _READ_BYTES)
            if not more:
                return None
            self._held += more
        message: dict[str, Any] = json.loads(self._held[:end])
        del self._held[: end + 1]
        return message

    def send(self, kind: str, value: Any) -> None:
        """Send a line. Without a driver it is lost."""
        data = MARK + json.dumps({kind: value}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            while data and not self._is_gone:
                try:
                    data = data[os.write(self._target, data) :]
                except OSError:
                    self._is_gone = True

    def pass_on(self) -> None:
        """Turn the lines that come from now on into signals to this process, and into its input; end its ranks when the driver is gone."""
        while (message := self.receive()) is not None:
            if "signal" in message:
                os.kill(os.getpid(), message["signal"])
            elif "stdin" in message:
                self._input.put(base64.b64decode(message["stdin"]))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_S)
        os.kill(os.getpid(), signal.SIGINT)  # the second one kills

    def become_stdin(self) -> None:
        """Let the standard input of this process be what the driver sends."""
        readable, writable = os.pipe()
        os.dup2(readable, 0)
        os.close(readable)
        Thread(target=self._write_input, args=(writable,), name="oneaccord-stdin", daemon=True).start()

    def _write_input(self, pipe: int) -> None:
        """Write what comes until an empty piece says that this was all, and tell the driver how much the ranks have taken: it sends little in advance."""
        while data := self._input.get():
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(pipe, rest) :]
            self.send("took", len(data))
        os.close(pipe)


class _Screen(Screen):
    """Output on its way to the driver."""

    def __init__(self, driver: _Driver) -> None:
        super().__init__()
        self._driver = driver

    def write(self, fd: int, data: bytes) -> None:
        """Send it."""
        self._driver.send("output", [fd, base64.b64encode(data).decode()])


def as_text(ranks: Sequence[Ended]) -> list[dict[str, Any]]:
    """Return the ends of ranks as plain data. Times are how long ago it was, as another host has another clock."""
    now = time.monotonic()
    found = []
    for each in ranks:
        plain = asdict(each)
        failure = plain["failure"]
        failure["at"] = now - failure["at"]
        if failure["record"] is not None and failure["record"]["clock"] is not None:
            failure["record"]["clock"] = now - failure["record"]["clock"]
        found.append(plain)
    return found


def as_ended(plain: Mapping[str, Any], host: str) -> Ended:
    """Return what `as_text` has made into plain data, with the name of its host and with times of this one."""
    now, failure = time.monotonic(), Failure(**plain["failure"])
    record = None if failure.record is None else ErrorRecord(**plain["failure"]["record"])
    if record is not None and record.clock is not None:
        record = replace(record, clock=now - record.clock)
    return Ended(**{**plain, "failure": replace(failure, at=now - failure.at, record=record, host=host)})


def _main() -> None:
    driver = _Driver(os.dup(0), os.dup(1))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what anything else prints here is no line of ours
    driver.send("hello", {"version": __version__, "pid": os.getpid()})
    order = driver.receive()
    if order is None:
        sys.exit(1)
    try:
        _run(driver, order)
    except OneAccordError as error:
        driver.send("refused", {"type": type(error).__name__, "message": str(error)})
        sys.exit(2)


def _run(driver: _Driver, order: dict[str, Any]) -> None:
    if order["version"] != __version__:
        raise UsageError(
            f"oneaccord-core {__version__} is installed there, and {order['version']} here: install the same version"
        )
    folder = order["folder"]
    if folder is not None:
        try:
            os.chdir(folder)
        except OSError as error:
            raise UsageError(
                f"the working directory {folder} cannot be entered there ({error.strerror}): name another one by the launcher's "
                "option folder, or make it"
            ) from error
    os.environ.update(order["variables"])
    # Ranks read it when they begin. This process has begun, and imports the plugins of the configuration.
    sys.path += [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
    if "workers" in order:
        _serve(driver, order)
    else:
        _run_program(driver, order)


def _run_program(driver: _Driver, order: dict[str, Any]) -> None:
    given = order["job"]
    job = Launch(**{**given, "args": tuple(given["args"])})
    # The secret is in the environment of the ranks alone.
    environ = with_hash_seed({**os.environ, Variable.SECRET: order["secret"]})
    server = None
    if job.fork:
        shared = shared_variables(job.ranks, {name: value for name, value in environ.items() if name != Variable.SECRET})
        server = fork_server(job.target, job.is_module, shared)
    with contextlib.ExitStack() as cleanup:
        if server is not None:
            cleanup.callback(server.close)
        from oneaccord.local.starting import completed_for_host

        job, modules = completed_for_host(job, order["backend"], order["config"])
        job, listener = _with_address(driver, job, order)
        if listener is not None:
            cleanup.callback(listener.close)
        job.validate(environ)
        signals = cleanup.enter_context(signals_as_bytes(_HANDLED))
        Thread(target=driver.pass_on, name="oneaccord-driver", daemon=True).start()
        screens = _Screen(driver), _Screen(driver)
        if order["reads"]:
            driver.become_stdin()

        def ended(failure: Failure) -> None:
            if failure.code:
                driver.send("failed", failure.rank)

        def concluded(ranks: Sequence[Ended], told: signal.Signals | None) -> None:
            driver.send("done", {"ranks": as_text(ranks), "told": told})

        owner = Owner(signals, None, screens, ended, concluded, listener, is_alone=True)
        run_job(job, environ, server, modules, owner)


def _with_address(driver: _Driver, job: Launch, order: dict[str, Any]) -> tuple[Launch, socket.socket | None]:
    """Return the job with the address at which its ranks meet: host 0 binds a port, and the driver tells it to all when all are ready."""
    listener, meeting = None, None
    if job.nodes > 1 and job.node_rank == 0:
        address = order["address"]
        listener = guarded_bind((address, 0), Credentials.of_text(order["secret"].encode()))
        meeting = show_address((address, listener.getsockname()[1]))
    driver.send("ready", meeting)
    message = driver.receive()
    if message is None:
        sys.exit(1)
    if "meeting" not in message:  # a signal, before any rank is there
        sys.exit(128 + message["signal"])
    return replace(job, rendezvous=message["meeting"]), listener


class _Text:
    """Stands in for ``sys.stdout`` or ``sys.stderr``: what the ranks print goes to the driver."""

    def __init__(self, driver: _Driver, fd: int) -> None:
        self._driver = driver
        self._fd = fd

    def write(self, text: str) -> int:
        self._driver.send("output", [self._fd, base64.b64encode(text.encode(errors="replace")).decode()])
        return len(text)

    def flush(self) -> None:
        """Do nothing: what was written is on its way."""


def _serve(driver: _Driver, order: dict[str, Any]) -> None:
    """Start workers, and run the calls in them that the driver sends, until it is done with them.

    If the driver is gone, this process ends at once, and its guard ends the workers.
    """
    from oneaccord.engines.local import LocalOptions, LocalWorkers

    given = order["workers"]
    sys.path += [each for each in given["path"] if each not in sys.path]
    sys.stdout, sys.stderr = _Text(driver, 1), _Text(driver, 2)  # what a screen needs of them
    launcher = LocalWorkers(LocalOptions(**given["options"]), (), given["first_rank"], given["total"])
    workers = launcher.place(Ask(given["ranks"]), Deadline(START_S))
    driver.send("ready", None)

    def answer(number: int, future: Future[Any]) -> None:
        error = future.exception()
        value = (False, error) if error is not None else (True, future.result())
        try:
            packed = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as problem:  # noqa: BLE001 - of any kind
            packed = pickle.dumps((False, UsageError(f"the answer of a worker cannot be pickled: {problem}")))
        driver.send("answer", [number, base64.b64encode(packed).decode()])

    while (message := driver.receive()) is not None:
        if "stop" in message:
            launcher.stop(workers)
            return
        number, index, packed = message["call"]
        function, args = pickle.loads(base64.b64decode(packed))  # noqa: S301 - from the program that has started this process
        launcher.call(workers[index], function, args).add_done_callback(partial(answer, number))
    os._exit(1)


if __name__ == "__main__":
    _main()
