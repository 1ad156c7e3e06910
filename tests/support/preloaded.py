"""Processes that begin with all modules imported: each is forked from one that has done nothing else.

What costs most about a short Python is what it imports. Run as a script, this file is the parent: it has one thread, no state but
its modules, and answers requests. What it forks becomes what was asked for, a script, a module or lines of a program, at the top level
of a ``__main__`` of its own, and ends as any Python ends: tracebacks, exit codes, signals and atexit included. The ranks that such a
process starts, if it is `oneaccord run` or `oneaccord bench`, are forked in the same way, and are its children all the same.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import marshal
import os
import random
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = [
    "BEARING",
    "OF_COMMANDS",
    "OF_PYTEST",
    "OF_RANKS",
    "Popen",
    "Preloaded",
    "Started",
    "ended",
    "preloaded",
    "run",
    "stand_in",
]

OF_RANKS = (
    *(
        "numpy",
        "oneaccord:init",
        "oneaccord.contract.config",
        "oneaccord_hybrid.backend",
        "oneaccord_shm.backend",
        "oneaccord_tcp.backend",
    ),
    "oneaccord.config.select.table:default_rules()",
    *(
        "oneaccord.config.plugins.manager:installed(BACKEND_GROUP)",
        "oneaccord.config.plugins.manager:installed(EXTENSION_GROUP)",
    ),
)
"""What every rank imports. Behind a colon stands what oneaccord imports late, or finds once and keeps."""

OF_COMMANDS = (
    *OF_RANKS,
    "oneaccord.cli.app",
    *("oneaccord.engines.agent", "oneaccord.engines.hosts", "oneaccord.engines.launching", "oneaccord.engines.local"),
    *("oneaccord_simulated.script.launcher", "oneaccord_simulated.running"),
)
"""What the command line imports, a launcher of hosts on both sides, and a simulated world."""
OF_PYTEST = (*OF_RANKS, "pytest")
"""What tests import; no plugin of pytest, which imports them in a way of its own."""

BEARING = {"PRELOADED_FIRST": "from oneaccord.local import processes; processes._GRACE_S = processes._END_S = 20.0"}
"""Variables with which a launcher gives its ranks much time to fail by themselves, and to end when they are asked to. What stands in this one is run before a program."""


class Preloaded:
    """A Python that has imported modules, and forks for each program that it is to run.

    Parameters
    ----------
    modules
        The modules; what a module imports for one of its names alone, or finds once and keeps, is had by ``module:expression``.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, its = socket.socketpair()
        self._lock = threading.Lock()
        self.address: str = f"preloaded-{os.getpid()}-{id(self)}"
        """Where `stand_in` finds it: a socket of Linux without a file."""
        foreign = ("ONEACCORD_", "SLURM_", "PMI", "OMPI_", "PYTEST")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        with its, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self.address}")
            listener.listen(50)
            numbers = [its.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, __file__, *map(str, numbers), *modules],
                env=clean | {"OPENBLAS_NUM_THREADS": "1"},
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is not for it
            )
        self._answers = self._socket.makefile()
        atexit.register(self._close)

    def start(
        self,
        words: Sequence[str],
        *,
        files: Sequence[int],
        environ: Mapping[str, str],
        cwd: str | os.PathLike[str],
        pass_fds: Sequence[int] = (),
        adopt: bool = False,
    ) -> int:
        """Start ``python words...``, a script, ``-m`` or ``-c``, with standard input, output and error; return its process id.

        With ``adopt`` it is a child of this process, which must reap it.
        """
        request = {"words": list(words), "environ": dict(environ), "cwd": os.fspath(cwd), "pass_fds": list(pass_fds)}
        with self._lock:
            if adopt:
                _adopting(True)
            _send(self._socket, {**request, "adopt": adopt}, [*files, *pass_fds])
            pid = int(self._answers.readline())
            if adopt:
                _adopting(False)
            return pid

    def reap(self, pid: int) -> int:
        """Wait for a process; return its exit code, negative for a signal."""
        with self._lock:
            _send(self._socket, {"reap": pid})
            return int(self._answers.readline())

    def _close(self) -> None:
        self._answers.close()
        self._socket.close()
        self._process.wait(10)


@functools.cache
def preloaded(*modules: str) -> Preloaded:
    """Return the parent that has imported ``modules``: the same one for as long as this process lives."""
    return Preloaded(modules)


def ended(pid: int, timeout_s: float | None) -> bool:
    """Tell whether a process ends within a time."""
    end = os.pidfd_open(pid)
    try:
        return bool(select.select([end], [], [], timeout_s)[0])
    finally:
        os.close(end)


def run(
    words: Sequence[str | Path],
    *,
    cwd: str | os.PathLike[str],
    environ: Mapping[str, str] | None = None,
    modules: Sequence[str] = OF_COMMANDS,
    merged: bool = False,
    timeout_s: float = 50,
) -> subprocess.CompletedProcess[str]:
    """Run ``python words...`` as `subprocess.run` does, without the time that imports take.

    Parameters
    ----------
    words
        A script, ``-m`` and a module, or ``-c`` and a program, and its arguments.
    cwd
        Where it runs.
    environ
        All its variables; those of this process, if it is not given.
    modules
        What it finds imported.
    merged
        Whether its standard error goes where its standard output goes.
    timeout_s
        When it is killed.
    """
    variables = dict(os.environ if environ is None else environ)
    parent = preloaded(*modules)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, Path(os.devnull).open() as nothing:
        files = [nothing.fileno(), out.fileno(), (out if merged else err).fileno()]
        pid = parent.start([str(word) for word in words], files=files, environ=variables, cwd=cwd)
        if not ended(pid, timeout_s):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            parent.reap(pid)
            raise subprocess.TimeoutExpired([sys.executable, *map(str, words)], timeout_s, _text(out), _text(err))
        code = parent.reap(pid)
        return subprocess.CompletedProcess([sys.executable, *map(str, words)], code, _text(out), _text(err))


class Started:
    """A program that runs: ``python words...``, begun as `run` begins one.

    Parameters
    ----------
    words
        A script, ``-m`` and a module, or ``-c`` and a program, and its arguments.
    cwd
        Where it runs.
    environ
        All its variables.
    out
        The file of its standard output, which goes where its standard error goes, if it is not given.

    Attributes
    ----------
    pid
        Its process id.
    said
        What was read of its standard error.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        cwd: str | os.PathLike[str],
        environ: Mapping[str, str],
        out: Path | None = None,
    ) -> None:
        self._parent = preloaded(*OF_COMMANDS)
        err, written = os.pipe()
        with Path(os.devnull).open() as nothing, contextlib.ExitStack() as files:
            output = written if out is None else files.enter_context(out.open("wb")).fileno()
            self.pid = self._parent.start(
                [str(word) for word in words], files=[nothing.fileno(), output, written], environ=environ, cwd=cwd
            )
        os.close(written)
        self._err = os.fdopen(err, encoding="utf-8", errors="backslashreplace")
        self._code: int | None = None
        self.said = ""

    def await_words(self, words: str) -> str:
        """Wait for a line with some words on the standard error; return it."""
        for line in self._err:
            self.said += line
            if words in line:
                return line
        raise AssertionError(self.said)

    def finish(self, timeout_s: float = 50) -> int:
        """Wait for the end, of a program that says no more than a pipe holds; return its exit code, negative for a signal."""
        assert ended(self.pid, timeout_s), "it does not end"
        self._code = self._parent.reap(self.pid)
        self.said += self._err.read()
        return self._code

    def close(self) -> None:
        """Kill it, if it still runs."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._parent.reap(self.pid)
        self._err.close()


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of this Python, begun as `run` begins one: ``[sys.executable, words...]``, in a session of its own.

    As any other it is a child of this process.
    """

    def _execute_child(self, args: Any, *more: Any, **options: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(args, *more, **options).arguments
        first, *words = map(os.fspath, args)
        assert first == sys.executable, f"{first} is another program"
        self.pid = preloaded(*OF_COMMANDS).start(
            words,
            files=[number if given[name] < 0 else given[name] for number, name in enumerate(_OF_CHILD)],
            environ=os.environ if given["env"] is None else given["env"],
            cwd=given["cwd"] or Path.cwd(),
            pass_fds=given["pass_fds"],
            adopt=True,
        )
        _begun(self, given)


_OF_CHILD = ("p2cread", "c2pwrite", "errwrite")
"""Of a `subprocess.Popen`, the files of its child; below 0, they are those of this process."""


def _begun(process: subprocess.Popen[Any], given: Mapping[str, Any]) -> None:
    """Take note that a process has begun, as `subprocess.Popen` does."""
    process._child_created = True  # type: ignore[attr-defined]
    process._close_pipe_fds(*(given[name] for name in "p2cread p2cwrite c2pread c2pwrite errread errwrite".split()))  # type: ignore[attr-defined]


_STAND_IN = """#!{executable} -IS
import _socket, array, marshal, os, sys
link = _socket.socket(_socket.AF_UNIX)
link.connect("\\0{address}")
data = marshal.dumps(({first} + sys.argv[1:], dict(os.environ), os.getcwd()))
link.sendmsg([len(data).to_bytes(8)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
link.sendall(data)
for file in range(3):
    os.close(file)
code = int(link.recv(20))
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def stand_in(path: Path, *first: str) -> Path:
    """Write a program that begins as `run` does, for whatever starts a Python by its path, such as a shell; return its path.

    It has the words, variables, folder, standard streams and end of ``python first... words...``. If it is killed, so is what it stands for;
    signals that can be handled, and those that stop a process, reach it alone.
    """
    address = preloaded(*OF_COMMANDS).address
    path.write_text(_STAND_IN.format(executable=sys.executable, address=address, first=[*first]))
    path.chmod(0o700)
    return path


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    # Which translates ends of lines, as `subprocess` does.
    return io.TextIOWrapper(io.BytesIO(file.read()), errors="backslashreplace").read()


def _send(link: socket.socket, request: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    data = json.dumps(request).encode()
    # The length and the files go first, in one piece.
    socket.send_fds(link, [len(data).to_bytes(8)], files)
    link.sendall(data)


# The parent


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    length, files, _, _ = socket.recv_fds(link, 8, 8)
    return link.recv(int.from_bytes(length), socket.MSG_WAITALL) if length else b"", files


def _serve(link: socket.socket, listener: socket.socket | None = None) -> list[str]:
    """Answer requests until there will be no more; in a forked process, return the words that say what it is to run."""
    sources = [each for each in (link, listener) if each is not None]
    stand_ins = set[int]()
    while True:
        ready = select.select(sources, [], [])[0]
        if listener is not None and listener in ready:
            stand_ins = {pid for pid in stand_ins if not os.waitpid(pid, os.WNOHANG)[0]}
            pid, words = _answer_stand_in(listener.accept()[0], sources)
            if not pid:
                return words
            stand_ins.add(pid)
        if link not in ready:
            continue
        data, files = _receive(link)
        if not data:
            return []
        request = json.loads(data)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = _fork_a_grandchild() if request["adopt"] else os.fork()
            if not answer:
                for each in sources:
                    each.close()
                _become(request, files)
                return list(request["words"])
            for file in files:
                os.close(file)
        link.sendall(b"%d\n" % answer)


def _answer_stand_in(link: socket.socket, sources: Sequence[socket.socket]) -> tuple[int, list[str]]:
    """Fork what a stand-in asks for. Return 0 there, with the words; and here the process that waits for the end of either, and ends the other."""
    data, files = _receive(link)
    waiting = os.fork()
    if waiting:
        link.close()
        for file in files:
            os.close(file)
        return waiting, []
    for each in sources:
        each.close()
    words, environ, folder = marshal.loads(data)
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        end = os.pidfd_open(pid)
        if end not in select.select([end, link], [], [])[0]:  # the stand-in says no more: it was killed
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            link.sendall(b"%d" % code)
        os._exit(0)
    link.close()
    _control(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    _become({"environ": environ, "cwd": folder}, files)
    return 0, words


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Make a forked process another one: its variables, its files, its folder, its session and process group."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    for number, file in zip([0, 1, 2, *request.get("pass_fds", ())], files, strict=True):
        if number != file:
            os.dup2(file, number)
            os.close(file)
    random.seed()


def _code(words: list[str]) -> Any:
    """Prepare ``sys`` for a program; return its code."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_unbuffered = words[0] == "-u"
    is_safe = words[0] == "-P"
    if is_unbuffered or is_safe:
        del words[0]
    if is_unbuffered or stat.S_ISFIFO(
        os.fstat(1).st_mode
    ):  # as `sys.stdout` takes what it had for a file, in which one can seek
        for name, file in (("stdout", 1), ("stderr", 2)):
            raw = io.FileIO(file, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, errors=getattr(sys, name).errors, write_through=True))
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        return compile(words[1], "<string>", "exec")
    if words[0] == "-m":
        sys.argv, sys.path[0] = [*words[1:]], str(Path.cwd())
        if is_safe:
            del sys.path[0]
        if not hasattr(sys.modules.get(words[1]), "__path__"):
            sys.modules.pop(words[1], None)  # of which Python would say that it is there already
        return compile("import runpy, sys; runpy.run_module(sys.argv[0], {}, '__main__', alter_sys=True)", "<string>", "exec")
    sys.argv, sys.path[0] = list(words), str(Path(words[0]).resolve().parent)
    main.__file__ = words[0]
    return compile(Path(words[0]).read_bytes(), words[0], "exec")


class _Leaving:
    """The last thing that Python does where a program went well; to take its modules apart as well would copy all of their memory."""

    code: int | None = None

    def __call__(self) -> None:
        if self.code is not None:
            with contextlib.suppress(OSError, ValueError):  # which Python is to tell
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(self.code)


# A launcher, whose ranks are forked as well


class _Popen(subprocess.Popen[Any]):
    """Starts a rank by asking a parent of ranks for it; anything else, as always."""

    ranks: socket.socket
    lock = threading.Lock()

    def _execute_child(self, args: Any, *more: Any, **options: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(args, *more, **options).arguments
        if args[:2] != [sys.executable, "-u"]:
            super()._execute_child(args, *more, **options)
            return
        files = [number if given[name] < 0 else given[name] for number, name in enumerate(_OF_CHILD)]
        passed = list(given["pass_fds"])
        request = {"words": args[1:], "environ": given["env"], "cwd": str(Path.cwd()), "pass_fds": passed, "adopt": True}
        with self.lock:
            _adopting(True)
            _send(self.ranks, request, [*files, *passed])
            with self.ranks.makefile() as answers:
                self.pid = int(answers.readline())
            _adopting(False)
        _begun(self, given)


def _control(*words: int) -> None:
    """Call ``prctl``."""
    ctypes.CDLL(None).prctl(*words, *[0] * (5 - len(words)))


def _adopting(whether: bool) -> None:
    """Make this process the parent of the descendants whose own one ends, or do so no more."""
    _control(36, int(whether))  # PR_SET_CHILD_SUBREAPER


def _fork_a_grandchild() -> int:
    """Fork a process that has no parent among those of this file: who adopts it is its parent."""
    told, telling = os.pipe()
    adopted, adopting = os.pipe()
    between = os.fork()
    if not between:
        pid = os.fork()
        if pid:
            os.write(telling, str(pid).encode())
            os._exit(0)
        os.close(adopting)
        os.read(adopted, 1)  # nothing comes, but the end
        for file in (told, telling, adopted):
            os.close(file)
        return 0
    os.waitpid(between, 0)
    pid = int(os.read(told, 20))
    for file in (told, telling, adopted, adopting):
        os.close(file)
    return pid


def _starts_ranks(words: list[str]) -> bool:
    """Return whether a program is a launcher that starts ranks; one of hosts starts what does so."""
    if "oneaccord.engines.agent" in words or os.environ.pop("PRELOADED_RANKS", ""):
        return True
    return words[:3] in (["-m", "oneaccord", "run"], ["-m", "oneaccord", "bench"]) and "--on" not in words


def _prepare_for_ranks(words: list[str]) -> list[str]:
    """Fork a parent of ranks from one that is to be a launcher; in a rank, return the words that say what it is to run."""
    ours, its = socket.socketpair()
    if os.fork():
        its.close()
        _Popen.ranks = ours
        subprocess.Popen = _Popen
        return words
    ours.close()
    os.setsid()  # no signal to the launcher's group is for it
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)  # the launcher's files end with the launcher
    os.close(nothing)
    return _serve(its)


if __name__ == "__main__":
    leaving = _Leaving()
    atexit.register(leaving)  # before any module does so, which are called in turn from the last to the first
    sys.path[0] = ""  # as most of those will have it, so that they find what was kept for it
    for each in sys.argv[3:]:
        module, _, expression = each.partition(":")
        imported = importlib.import_module(module)
        if expression:
            eval(expression, {name: getattr(imported, name) for name in re.findall(r"\w+", expression)})
    # What is there now stays out of the collections of what is forked, which would copy the memory of all of it.
    gc.collect()
    gc.freeze()
    words = _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
    exec(os.environ.pop("PRELOADED_FIRST", ""), {})
    if _starts_ranks(words):
        words = _prepare_for_ranks(words)
    if words:
        try:
            exec(_code(words), vars(sys.modules["__main__"]))
            leaving.code = 0
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                leaving.code = (end.code or 0) & 0xFF
            raise
        except Exception as error:
            # As Python does it, but without this file's frame.
            trace = error.__traceback__ and error.__traceback__.tb_next
            sys.last_exc, sys.last_type, sys.last_value, sys.last_traceback = error, type(error), error, trace
            sys.excepthook(type(error), error, trace)
            leaving.code = 1
            sys.exit(1)
