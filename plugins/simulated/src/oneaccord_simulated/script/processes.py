"""The state that each rank takes for its process, although all of them live in one: it is changed whenever another rank runs."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TextIO

from oneaccord_simulated.script.generators import Generators
from oneaccord_simulated.script.modules import Modules

__all__ = ["Processes"]

Streams = tuple[TextIO, TextIO]


class _Process:
    """The state that one rank has for itself, while it does not run."""

    __slots__ = ("argv", "environ", "generators", "main", "modules", "stderr", "stdout", "variables")

    def __init__(
        self, argv: list[str], main: ModuleType, streams: Streams, environ: dict[str, Any], variables: Mapping[str, str]
    ) -> None:
        self.argv = argv
        self.main = main
        self.modules: dict[str, tuple[Any, Any]] = {}
        self.generators: dict[str, Any] = {}
        self.stdout, self.stderr = streams
        self.environ = environ
        self.variables = variables


class Processes:
    """Gives each rank arguments, a main module, modules of the program, output streams, environment variables and generators of its own.

    All else is one for all ranks: the installed modules with their contents, the working directory, open files.

    Parameters
    ----------
    argv
        The arguments that every rank begins with.
    variables
        Returns those variables of a rank that are not the same for all of them.
    folder
        The folder of the program's modules.
    streams
        Returns the standard output and the standard error that a rank begins with.
    seed
        That of the run.

    Attributes
    ----------
    rank
        The one that runs; None before the first one does.
    """

    def __init__(
        self,
        argv: list[str],
        folder: str,
        variables: Callable[[int], Mapping[str, str]],
        streams: Callable[[], Streams],
        seed: int = 0,
    ) -> None:
        self._argv = argv
        self._modules = Modules(folder)
        self._variables = variables
        self._streams = streams
        self._generators = Generators(seed)
        self._processes: dict[int, _Process] = {}
        self._shown: _Process | None = None
        self.rank: int | None = None

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Restore the state of the process when the context ends."""
        argv, path, stdout, stderr, main = sys.argv, sys.path, sys.stdout, sys.stderr, sys.modules["__main__"]
        folders, environ, variables = list(path), vars(os.environ), dict(os.environ)
        self._main, self._environ = main, environ
        generators = self._generators.take()
        sys.meta_path.insert(0, self._modules)
        try:
            yield
        finally:
            sys.meta_path.remove(self._modules)
            self._modules.take()
            sys.argv, sys.path, sys.stdout, sys.stderr, sys.modules["__main__"] = argv, path, stdout, stderr, main
            path[:] = folders
            os.environ.__dict__ = environ
            self._generators.give(generators)
            # Not only Python's view of the variables has changed, but also the system's.
            for name in () if self._shown is None else self._shown.variables:
                os.unsetenv(name)
            os.environ.clear()
            os.environ.update(variables)

    def show(self, rank: int) -> None:
        """Let the process look like that of a rank; to be called often, so that it touches no more than it must."""
        if rank < 0:
            return  # a thread that the program has started itself: its rank is not known
        before = self._shown
        taken = self._modules.take()
        if before is not None:
            before.modules = taken
            before.generators = self._generators.take()
            before.argv, before.stdout, before.stderr, before.main = sys.argv, sys.stdout, sys.stderr, sys.modules["__main__"]
        now = self._processes.get(rank) or self._begin(rank)
        self.rank, self._shown = rank, now
        sys.argv, sys.stdout, sys.stderr, sys.modules["__main__"] = now.argv, now.stdout, now.stderr, now.main
        self._modules.give(now.modules)
        self._generators.give(now.generators, rank)
        # The object stays, because any module may hold it; its content is the rank's.
        os.environ.__dict__ = now.environ
        for name, value in now.variables.items():
            os.putenv(name, value)  # for code other than Python, such as programs that the rank starts

    def _begin(self, rank: int) -> _Process:
        environ = {name: copy.copy(value) for name, value in self._environ.items()}
        variables = self._variables(rank)
        os.environ.__dict__ = environ
        os.environ.update(variables)
        process = self._processes[rank] = _Process(list(self._argv), self._main, self._streams(), environ, variables)
        return process
