"""The process that imports Python, NumPy and oneaccord once, and forks each rank of `oneaccord run` from there.

It is started as a script, with the variables that all ranks share, so that Python and the libraries start as in
a rank of its own. It has one thread, a socket to the launcher, and no other state but its modules. Each fork becomes one rank: a
session and group of its own, its own variables, files and ``__main__``, and ends as any Python ends.
"""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # imported objects stay, so that a collection finds nothing
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder, whose modules are the launcher's own

import builtins
import importlib
import io
import json
import os
import select
import signal
import socket
from collections.abc import Iterable
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

from oneaccord.common.variables import Variable
from oneaccord.local.groups import exit_status, is_stopped
from oneaccord.local.orphans import end_with

__all__: list[str] = []

_MODULES = ("numpy", "oneaccord.group.init", "oneaccord.config.select.table")
"""The imports of every rank that calls `oneaccord.init`."""


class _Server:
    """Serves one launcher: says once whether ranks can be forked from here, forks them, reports when they stop or end, and reaps them on the launcher's request."""

    def __init__(self, link: socket.socket, folder: str) -> None:
        link.set_inheritable(False)
        self._link = link
        self._folder = folder
        self._ranks: set[int] = set()
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        self._reason = self._load(_MODULES)

    def serve(self) -> list[str]:
        """Answer until the launcher is gone; in a rank, return the words that describe its program."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == self._woken.fileno():
                    self._woken.recv(4096)
                    self._tell_of_ranks()
                    continue
                length, files, _, _ = socket.recv_fds(self._link, 8, 8)
                if not length:
                    os._exit(0)
                request = json.loads(self._read(int.from_bytes(length, "big")))
                if "modules" in request:
                    self._prepare(request["modules"])
                elif "reap" in request:
                    os.waitpid(request["reap"], 0)
                elif self._fork(request, files):
                    words: list[str] = request["words"]
                    return words
                for file in files:
                    os.close(file)

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:  # the end of a rank may interrupt it
            part = self._link.recv(length - len(data))
            if not part:
                os._exit(0)
            data += part
        return data

    def _load(self, modules: Iterable[str]) -> str:
        """Import modules; return the error."""
        try:
            for module in modules:
                importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - a rank that is no fork meets it too, and says it in its own words
            return f"an import raised {type(error).__name__}: {error}"
        return ""

    def _prepare(self, modules: Iterable[str]) -> None:
        reason = self._reason or self._load(modules) or self._tied() or _shadowed(self._folder)
        if not reason:
            if not sys.flags.safe_path:
                sys.path.insert(0, self._folder)
            _look_up()
        gc.freeze()  # no collection in a rank visits shared objects, which would copy their memory
        self._tell(f"no {reason}" if reason else "ready")

    def _tied(self) -> str:
        """Return words for the state of this process that a fork would lose; empty if there is none."""
        known = {0, 1, 2, *(each.fileno() for each in (self._link, self._woken, self._waking))}
        if any(os.path.exists(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if int(each) not in known):
            return "an import has opened a file"
        if len(os.listdir("/proc/self/task")) > 1:
            # The threads of OpenBLAS end before a fork, and begin again if they are needed.
            if not (child := os.fork()):
                os._exit(0)
            os.waitpid(child, 0)
            if len(os.listdir("/proc/self/task")) > 1:
                return "an import has started a thread"
        return ""

    def _fork(self, request: dict[str, Any], files: list[int]) -> bool:
        begun, beginning = os.pipe()
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(f"failed {error}")
            pid = -1
        if not pid:
            os.setsid()
            end_with(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (self._link, self._woken, self._waking):
                each.close()
            os.close(begun)
            os.close(beginning)
            _become(request, files)
            return True
        os.close(beginning)
        if pid > 0:
            os.read(begun, 1)  # nothing but the end: the rank has its session now, or is gone
            self._ranks.add(pid)
            self._tell(f"started {pid}")
        os.close(begun)
        return False

    def _tell_of_ranks(self) -> None:
        for rank in list(self._ranks):
            if (status := exit_status(rank)) is not None:
                self._ranks.remove(rank)
                self._tell(f"ended {rank} {status}")
            elif is_stopped(rank):
                self._tell(f"stopped {rank}")

    def _tell(self, line: str) -> None:
        try:
            self._link.sendall(" ".join(line.split()).encode(errors="backslashreplace") + b"\n")
        except OSError:  # the launcher is gone
            os._exit(0)


def _shadowed(folder: str) -> str:
    """Return the module here that a program in ``folder`` would replace by its own of that name; empty if there is none."""
    try:
        beside = {entry.partition(".")[0] for entry in os.listdir(folder)}
    except OSError:
        return ""
    for name in beside.intersection(sys.modules):
        found = PathFinder.find_spec(name, [folder])
        if found is not None and found.loader is not None and found.origin != getattr(sys.modules[name], "__file__", None):
            return f"the program has a module {name} of its own"
    return ""


def _look_up() -> None:
    """Find once the constant facts that every rank looks up."""
    from oneaccord.config.plugins.installed import BACKEND_GROUP, EXTENSION_GROUP
    from oneaccord.config.plugins.loading import installed
    from oneaccord.config.select.table import default_rules

    default_rules()
    installed(BACKEND_GROUP)
    installed(EXTENSION_GROUP)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Make a forked process a rank: its files, its variables, and random numbers of its own."""
    for name in request["unset"]:
        os.environ.pop(name, None)
    os.environ.update(request["environ"])
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    for file in files[3:]:  # the sockets of the meeting point
        os.set_inheritable(file, True)
        os.environ[Variable.RENDEZVOUS_FD] = str(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open_stream(number, name)
    if "numpy.random" in sys.modules:  # `random` does so by itself
        sys.modules["numpy.random"].seed()
    gc.enable()


def _open_stream(number: int, name: str) -> None:
    """Open a standard stream as ``python -u`` does; a stream of the server's knows its own former file."""
    before = getattr(sys, name)
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = f"<{name}>"
    stream: Any = io.TextIOWrapper(
        raw if number else io.BufferedReader(raw),
        before.encoding,
        before.errors,
        "\n" if number else None,
        write_through=True,
    )
    stream.mode = "w" if number else "r"
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> None:
    """Run the words after ``python``, a script or ``-m`` and a module, as ``__main__``."""
    main = ModuleType("__main__")
    names = vars(main)
    names.update({name: {} for name in ("__annotations__",) if name in globals()}, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, "-u", *words]
    if words[0] == "-m":
        import runpy

        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined] # what `python -m` calls
        return
    sys.argv = words
    path = words[0] if os.path.isabs(words[0]) else os.path.join(os.getcwd(), words[0])
    names.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), names)  # noqa: S102 - running the program is its purpose


class _Hook:
    """Leaves the frames of this file out of the traceback that ends a program."""

    def __init__(self) -> None:
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        self._before(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    _words = _Server(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]).serve()
    try:
        _run(_words)
    except BaseException:
        sys.excepthook = _Hook()  # called by Python, which then ends as usual: by SIGINT, if that interrupted it
        raise
