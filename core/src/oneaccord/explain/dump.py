"""The content of a rank's flight recorder, as a JSON file, for `oneaccord explain`.

A file is written when the job fails, when the rank gets SIGUSR1, and when the job ends. Its content is read at that moment, and costs a call
nothing: the line of the program at which a call waits is that of the waiting thread.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import threading
import time
import weakref
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import msgspec

from oneaccord.arrays.dtypes import dtype_name
from oneaccord.common.checks import UNREADABLE
from oneaccord.common.folders import write_new
from oneaccord.common.lines import OURS, PROGRAM, kind_of, line_of
from oneaccord.common.threads import Thread
from oneaccord.contract.header import CallSignature
from oneaccord.control.connection import Control
from oneaccord.control.protocol import Progress, Verdict, Wait
from oneaccord.control.recorder import Record
from oneaccord.runtime.computer import namespaces
from oneaccord.runtime.idle import current_frames

__all__ = ["Call", "Dump", "Dumper", "Place", "decode", "job_id"]

_log = logging.getLogger("oneaccord.job")

FORMAT = 1
"""The number of this form of the files."""
_WRITE_S = 5.0
"""How long the end of a job waits for its file, on a disk that does not answer."""
_UNKNOWN = "unknown"
_MOST_RANKS = 1 << 20
_LAST_S = 1e11
"""A time that no clock shows: three thousand years."""


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a rank.

    Attributes
    ----------
    channel, sequence
        The channel of its group, and its number there; -1 if it has none.
    operation, what
        Its name, and the call in words.
    started, finished
        On the clock of the rank, in seconds; None while it runs.
    thread
        The thread that made it; 0 if that is not known.
    place
        The line of the program that made the call, if that is known: for a call that runs.
    nbytes
        The size of its array; 0 if that is not known.
    wait
        The messages for which it has waited for a while.
    digest
        Of a collective: it differs if two ranks do not make the same call. Empty for other calls.
    dtype, shape, op, root, counts, algorithm, part, reproducible, device
        Of a collective: the facts on which the ranks must agree, as in `CallSignature`; the dtype by its name.
    """

    channel: int
    sequence: int
    operation: str
    what: str
    started: float
    finished: float | None = None
    thread: int = 0
    place: str = ""
    nbytes: int = 0
    wait: Wait | None = None
    digest: bytes = b""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = -1
    counts: tuple[int, ...] | None = None
    algorithm: str = ""
    part: str = ""
    reproducible: bool = False
    device: str = ""


class Place(msgspec.Struct, frozen=True):
    """The line at which a thread of the program was."""

    thread: int
    name: str
    line: str


class Dump(msgspec.Struct, frozen=True):
    """The knowledge of one rank at one moment.

    Attributes
    ----------
    format
        The form of the file.
    job
        A value that all ranks of a job share, and no two jobs.
    rank, world_size
        The rank, and the number of all ranks.
    origin
        Its number when the job began, if the ranks have been renumbered since.
    host, pid
        The host and the process.
    clock
        The clock of `now` and of the times of the calls; ranks with the same text share a clock.
    now, time
        The moment, on that clock and as seconds since the epoch.
    reason
        ``"failed"``, ``"signal"`` or ``"closed"``.
    verdict
        The first cause of the failure.
    raised
        The line of the program that raised the error that ended it on this rank.
    groups
        For each channel of an open group its ranks.
    progress
        How far the rank has come.
    calls
        Its last calls, in the order in which they began.
    places
        The lines at which the threads of its program are.
    names
        For each number of a group, the group in words.
    """

    format: int
    job: str
    rank: int
    world_size: int
    origin: int
    host: str
    pid: int
    clock: str
    now: float
    time: float
    reason: str
    verdict: Verdict | None
    raised: str
    groups: dict[int, tuple[int, ...]]
    progress: Progress
    calls: list[Call]
    places: list[Place]
    names: dict[int, str] = {}


def job_id(key: bytes) -> str:
    """Return the name of a job, of the key that its ranks share; the key cannot be found by it."""
    return hashlib.blake2b(key, digest_size=4, person=b"oneaccord job").hexdigest()


def decode(data: bytes) -> Dump | None:
    """Return the content of a file; None if it does not have this format."""
    try:
        dump = msgspec.json.decode(data, type=Dump)
    except UNREADABLE:
        return None
    is_whole = dump.format == FORMAT and 0 <= dump.rank < dump.world_size <= _MOST_RANKS
    times = [time for call in dump.calls for time in (call.started, call.started if call.finished is None else call.finished)]
    in_order = all(ended >= begun for begun, ended in zip(times[::2], times[1::2], strict=True))
    return dump if is_whole and in_order and all(abs(time) < _LAST_S for time in (dump.now, dump.time, *times)) else None


def take(control: Control, job: str, reason: str, verdict: Verdict | None, home: int) -> Dump:
    """Return the present knowledge of a rank; ``home`` is the thread of its program."""
    lines, inside = _look()
    recorder = control.recorder
    calls: dict[tuple[int, int], Call] = {}
    for number, record in enumerate(recorder.records()):  # records without a number are distinguished by their position
        key = (record.channel, record.sequence if record.sequence >= 0 else -1 - number)
        # A short call that had to wait is also in the counters, which do not know its thread.
        if key not in calls or record.thread:
            calls[key] = _call(record, lines)
    unknown = [key for key, call in calls.items() if call.finished is None and not call.thread]
    inside -= {call.thread for call in calls.values() if call.finished is None}
    if len(unknown) == 1 and (
        home in inside or len(inside) == 1
    ):  # if ranks are threads, the threads of other ranks are inside too
        (key,), thread = unknown, home if home in inside else inside.pop()
        calls[key] = msgspec.structs.replace(calls[key], thread=thread, place=lines[thread])
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    made = {home, *(call.thread for call in calls.values() if call.finished is None)}
    places = [Place(ident, names.get(ident, ""), line) for ident in made if (line := lines.get(ident))]
    origin = control.origins[control.rank] if control.origins else None
    return Dump(
        FORMAT,
        job,
        control.rank,
        control.world_size,
        control.rank if origin is None else origin,
        socket.gethostname(),
        os.getpid(),
        _clock(),
        control.runtime.now(),
        time.time(),
        reason,
        verdict,
        control.raised,
        dict(control.counted.members),
        control.counted.progress(),
        list(calls.values()),
        places,
        dict(control.counted.names),
    )


def _look() -> tuple[dict[int, str], set[int]]:
    """Return for each thread the line of the program that it is at, and which threads of the program are in a call of oneaccord."""
    lines, inside = {}, set()
    for ident, frame in current_frames().items():
        lines[ident] = line_of(frame)
        kinds = (kind_of(each.f_code.co_filename) for each, _ in walk_stack(frame))
        if lines[ident] and next((kind for kind in kinds if kind in (OURS, PROGRAM)), PROGRAM) == OURS:
            inside.add(ident)
    return lines, inside


def _call(record: Record, lines: dict[int, str]) -> Call:
    finished = record.finished or None
    place = record.where or ("" if finished is not None else lines.get(record.thread, ""))
    operation = record.operation if record.is_of_program else "exchange"
    about = record.channel, record.sequence, operation, record.what, record.started, finished
    signature = record.call
    if not isinstance(signature, CallSignature):
        return Call(*about, record.thread, place, record.nbytes or getattr(signature, "nbytes", 0), record.wait)
    return Call(
        *about,
        record.thread,
        place,
        record.nbytes or signature.nbytes,
        record.wait,
        record.digest,
        dtype_name(signature.dtype, signature.fields) if signature.dtype else "",
        signature.shape,
        signature.op,
        signature.root,
        signature.counts,
        signature.algorithm,
        signature.part,
        signature.reproducible,
        signature.device,
    )


def _clock() -> str:
    """Return an identifier that two processes share if they have one monotonic clock: the boot of the host, and the namespace of times."""
    return namespaces("time") or f"{_UNKNOWN} {socket.gethostname()} {os.getpid()}"


_open: set[weakref.ref[Dumper]] = set()
"""Those that SIGUSR1 is for. No `WeakSet`, which cannot be listed while another thread adds to it."""


class Dumper:
    """Writes the file of one rank of one job.

    Parameters
    ----------
    control
        The rank's control connection.
    job
        The name of the job.
    directory
        The folder for the file; it is made if it does not exist.
    """

    def __init__(self, control: Control, job: str, directory: Path) -> None:
        self._control = control
        self._job = job
        self._directory = directory
        self._home = threading.get_ident()
        self._writing: threading.Thread | None = None
        self._ended = False
        self.path: Path = directory / f"{job}-rank-{control.rank}.json"
        control.before_failure = self.failed
        _open.add(weakref.ref(self, _open.discard))
        _listen()

    def failed(self, verdict: Verdict) -> None:
        """Write the knowledge of this rank as its job fails, before any of its threads learns of it. Does not wait for the disk."""
        self._ended = True
        dump = self._taken("failed", verdict)
        if dump is None:
            return
        writing = Thread(target=self._write, args=(dump,), name="oneaccord-recorder", daemon=True)
        try:
            writing.start()
        except RuntimeError:  # the interpreter is ending, or there are too many threads
            self._write(dump)
        else:
            self._writing = writing

    def signalled(self) -> None:
        """Write the present knowledge of this rank, unless its job has failed."""
        if not self._ended and (dump := self._taken("signal")) is not None:
            self._write(dump)

    def close(self) -> None:
        """Write the knowledge of this rank at the end of its job; if the job has failed, only wait for the file."""
        _open.discard(weakref.ref(self))
        if self._writing is not None:
            self._writing.join(_WRITE_S)
        elif not self._ended and (dump := self._taken("closed")) is not None:
            self._write(dump)
        self._ended = True

    def _taken(self, reason: str, verdict: Verdict | None = None) -> Dump | None:
        try:
            return take(self._control, self._job, reason, verdict, self._home)
        except Exception:  # noqa: BLE001 - the report of a failure must not hide the failure
            _log.exception("oneaccord: rank %d cannot read its own flight recorder", self._control.rank)
            return None

    def _write(self, dump: Dump) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            data = msgspec.json.encode(dump)
            try:
                write_new(self.path, data)
            except (PermissionError, IsADirectoryError):  # another user has a file of this name, in a folder like /tmp
                self.path = self.path.with_name(f"{self.path.stem}-{os.urandom(8).hex()}.json")
                write_new(self.path, data)
        except (OSError, MemoryError) as error:
            _log.warning("oneaccord: rank %d could not write its flight recorder to %s: %s", dump.rank, self.path, error)


def _listen() -> None:
    """Write all files at SIGUSR1 from now on, unless the program has a use of its own for it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    for reference in list(_open):
        dumper = reference()
        if dumper is not None:
            dumper.signalled()


def _in_child() -> None:
    _open.clear()  # the jobs are the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
