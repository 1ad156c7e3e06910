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
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["BEARING", "OF_COMMANDS", "OF_PYTEST", "OF_RANKS", "Preloaded", "Started", "ended", "preloaded", "run"]

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

OF_COMMANDS = (*OF_RANKS, "oneaccord.cli.app", "oneaccord_simulated.script.launcher", "oneaccord_simulated.running")
"""What the command line imports, and a simulated world."""
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
        foreign = ("ONEACCORD_", "SLURM_", "PMI", "OMPI_", "PYTEST")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno()), *modules],
                env=clean | {"OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is not for it
            )
        self._answers = self._socket.makefile()
        atexit.register(self._close)

    def start(
        self, words: Sequence[str], *, files: Sequence[int], environ: Mapping[str, str], cwd: str | os.PathLike[str]
    ) -> int:
        """Start ``python words...``, a script, ``-m`` or ``-c``, with standard input, output and error; return its process id."""
        _send(self._socket, {"words": list(words), "environ": dict(environ), "cwd": os.fspath(cwd)}, files)
        return int(self._answers.readline())

    def reap(self, pid: int) -> int:
        """Wait for a process; return its exit code, negative for a signal."""
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


def _requests(link: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    while True:
        length, files, _, _ = socket.recv_fds(link, 8, 8)
        if not length:
            return
        yield json.loads(link.recv(int.from_bytes(length), socket.MSG_WAITALL)), files


def _serve(link: socket.socket, fork: Callable[[], int] = os.fork) -> list[str]:
    """Answer requests until there will be no more; in a forked process, return the words that say what it is to run."""
    for request, files in _requests(link):
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = fork()
            if not answer:
                link.close()
                _become(request, files)
                return list(request["words"])
            for file in files:
                os.close(file)
        link.sendall(b"%d\n" % answer)
    return []


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
    if is_unbuffered:
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

    def _execute_child(self, args: Any, *more: Any, **options: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(args, *more, **options).arguments
        if args[:2] != [sys.executable, "-u"]:
            super()._execute_child(args, *more, **options)
            return
        files = [max(given["p2cread"], 0), given["c2pwrite"], given["errwrite"], *given["pass_fds"]]
        _adopting(True)
        request = {"words": args[1:], "environ": given["env"], "cwd": str(Path.cwd()), "pass_fds": given["pass_fds"]}
        _send(self.ranks, request, files)
        with self.ranks.makefile() as answers:
            self.pid = int(answers.readline())
        _adopting(False)
        self._child_created = True
        pipes = "p2cread p2cwrite c2pread c2pwrite errread errwrite".split()
        self._close_pipe_fds(*map(given.__getitem__, pipes))


def _adopting(whether: bool) -> None:
    """Make this process the parent of the descendants whose own one ends, or do so no more."""
    ctypes.CDLL(None).prctl(36, int(whether), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


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
    return _serve(its, _fork_a_grandchild)


if __name__ == "__main__":
    leaving = _Leaving()
    atexit.register(leaving)  # before any module does so, which are called in turn from the last to the first
    sys.path[0] = ""  # as most of those will have it, so that they find what was kept for it
    for each in sys.argv[2:]:
        module, _, expression = each.partition(":")
        imported = importlib.import_module(module)
        if expression:
            eval(expression, {name: getattr(imported, name) for name in re.findall(r"\w+", expression)})
    # What is there now stays out of the collections of what is forked, which would copy the memory of all of it.
    gc.collect()
    gc.freeze()
    words = _serve(socket.socket(fileno=int(sys.argv[1])))
    exec(os.environ.pop("PRELOADED_FIRST", ""), {})
    if words[:3] in (["-m", "oneaccord", "run"], ["-m", "oneaccord", "bench"]):
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
