"""``manyhands run --backend simulated``: an unchanged script on every rank, each with globals of its own."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TextIO

from manyhands.api import LaunchRequest, ThreadWorld, UsageError, current_rank
from manyhands_simulated.running import run_ranks

__all__ = ["launch"]


def launch(request: LaunchRequest) -> int:
    """Run the script or module on each rank, as a thread; return the exit code."""
    code, place = _load(request)
    world = ThreadWorld(request.ranks, request.backend)

    def body(_: int) -> None:
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__, **place})  # noqa: S102 - running the user's script is the task

    with _process_state(request, str(place["__file__"])):
        return _outcome(lambda: run_ranks(world, _with_exit_codes(body)), str(place["__file__"]))


def _outcome(run: Callable[[], object], file: str) -> int:
    """Run the ranks; say how they failed, as ``manyhands run`` does for processes, and return the exit code."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        run()
    except _Terminated:
        _say("ended by SIGTERM")
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        _say("ended by SIGINT")
        return 128 + signal.SIGINT
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        _say(f"rank {getattr(error, 'rank', '?')} failed first: exit code {code}")
        if not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")  # as the interpreter does
        return code
    except Exception as error:  # noqa: BLE001 - any exception of the user's script
        _say(f"rank {getattr(error, 'rank', '?')} failed first: exit code 1")
        traceback.print_exception(type(error), error, _users_part(error, file))
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


class _Terminated(BaseException):
    """SIGTERM came."""


def _terminate(_number: int, _frame: object) -> None:
    raise _Terminated


def _say(text: str) -> None:
    sys.stderr.write(f"{'-' * 80}\nmanyhands run: {text}\n")


def _users_part(error: BaseException, file: str) -> TracebackType | None:
    """Return the traceback from the program's own first frame on, as plain Python would show it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return trace or error.__traceback__


def _with_exit_codes(body: Callable[[int], None]) -> Callable[[int], None]:
    def wrapped(rank: int) -> None:
        try:
            body(rank)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise

    return wrapped


def _load(request: LaunchRequest) -> tuple[CodeType, dict[str, Any]]:
    """Return the compiled program, and the names that Python gives a main module."""
    if not request.is_module:
        path = Path(request.target).resolve()
        return compile(path.read_bytes(), str(path), "exec"), {"__file__": str(path), "__package__": None, "__spec__": None}
    name = request.target
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader = spec.loader if spec is not None else None
    get_code = getattr(loader, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise UsageError(f"no module named {name!r} can be run: is it installed, and does a package have a __main__?")
    return code, {"__file__": spec.origin, "__package__": spec.parent, "__spec__": spec}


@contextmanager
def _process_state(request: LaunchRequest, file: str) -> Iterator[None]:
    """Give the process the arguments, path, variables and output of the program, as long as it runs."""
    saved = sys.argv, list(sys.path), dict(os.environ), sys.stdout, sys.stderr
    sys.argv = [file if request.is_module else request.target, *request.args]
    if not request.is_module:
        sys.path.insert(0, str(Path(file).resolve().parent))
    os.environ.update(request.environ)
    width = len(str(request.ranks - 1))
    if request.prefix:
        sys.stdout = _Prefixed(sys.stdout, width)
        sys.stderr = _Prefixed(sys.stderr, width)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Prefixed):
                stream.finish()
        sys.argv, sys.path, environ, sys.stdout, sys.stderr = saved
        os.environ.clear()
        os.environ.update(environ)


class _Prefixed(io.TextIOBase):
    """A stream that begins each line with the rank of the thread that writes it."""

    def __init__(self, stream: TextIO, width: int) -> None:
        self._stream = stream
        self._width = width
        self._lock = threading.Lock()
        self._partial: dict[int, str] = {}

    def write(self, text: str) -> int:
        rank = current_rank()
        with self._lock:
            if rank is None:
                self._stream.write(text)
                return len(text)
            whole = self._partial.pop(rank, "") + text
            *lines, rest = whole.replace("\r", "\r\0").replace("\n", "\n\0").split("\0")
            for line in lines:
                self._stream.write(f"[{rank:>{self._width}}] {line}")
            if rest:
                self._partial[rank] = rest
            if lines:
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._stream.flush()

    def writable(self) -> bool:
        return True

    def finish(self) -> None:
        """Write out what did not end with a line."""
        for rank, rest in sorted(self._partial.items()):
            self._stream.write(f"[{rank:>{self._width}}] {rest}\n")
        self._partial.clear()
        self._stream.flush()
