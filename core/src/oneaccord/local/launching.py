"""What a job consists of: its program, its ranks, and what becomes of them after a failure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from oneaccord.common.folders import here
from oneaccord.common.variables import Variable
from oneaccord.errors import ConfigError, InvalidRankError, InvalidWorldSizeError, UsageError

__all__ = ["Launch"]

_LONGEST_GRACE_S = 1e6


@dataclass(frozen=True, slots=True)
class Launch:
    """The part of a job that one host starts.

    Attributes
    ----------
    target, is_module, args
        The program: a script's path or a module's name, and its arguments.
    ranks
        How many ranks each host starts.
    nodes, node_rank
        How many hosts there are, and which one this is.
    first_rank, total
        The first rank of this host, and the number of ranks on all hosts, if hosts have different numbers of ranks.
    rendezvous
        ``host:port`` on the host of rank 0; None lets the system choose a port of 127.0.0.1, for a single host.
    environ
        Variables to set for each rank besides those of the launch, such as ``ONEACCORD_BACKEND``.
    prefix
        Whether each line of output begins with its rank.
    keep_going
        Whether the others continue when a rank fails.
    fork
        Whether ranks may be forked from a process that has made their imports, instead of starting a Python each.
    verbose
        Whether to say why they cannot be.
    max_restarts
        How many ranks that fail are replaced, in all.
    min_ranks, max_ranks
        The least and the most ranks with which the job continues after a failure; if the most are more than ``ranks``, spares are started.
        If all three are None, no rank comes later.
    grace_s
        How long ranks may take to end after a signal to the launcher; None for its default.
    stdin
        Which rank reads the launcher's standard input: its number, ``all`` or ``none``; None for rank 0.
    log_dir
        The folder for a file of each output of each rank; None for none.
    """

    target: str
    is_module: bool = False
    args: tuple[str, ...] = ()
    ranks: int = 1
    nodes: int = 1
    node_rank: int = 0
    first_rank: int | None = None
    total: int | None = None
    rendezvous: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    prefix: bool = True
    keep_going: bool = False
    fork: bool = True
    verbose: bool = False
    max_restarts: int | None = None
    min_ranks: int | None = None
    max_ranks: int | None = None
    grace_s: float | None = None
    stdin: str | None = None
    log_dir: str | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether the launcher lets the job survive failures."""
        return not self.max_restarts is self.min_ranks is self.max_ranks is None

    @property
    def most(self) -> int:
        """How many ranks the job has at most."""
        return self.world_size if self.max_ranks is None else self.max_ranks

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return self.ranks * self.nodes if self.total is None else self.total

    @property
    def local_ranks(self) -> range:
        """The ranks of this host."""
        first = self.node_rank * self.ranks if self.first_rank is None else self.first_rank
        return range(first, first + self.ranks)

    @property
    def reader(self) -> str:
        """Which rank reads the standard input: its number without leading zeros, ``all`` or ``none``."""
        given = self.stdin or "0"
        return str(int(given)) if given.isdigit() else given

    @property
    def spares(self) -> int:
        """The number of ranks that are started in addition to those that begin."""
        return max(0, self.most - self.world_size)

    def validate(self, environ: Mapping[str, str]) -> None:
        """Check all that can be known before a process is started.

        Raises
        ------
        UsageError
            There is no such script or module; `InvalidWorldSizeError` and `InvalidRankError` for the numbers.
        ConfigError
            Several hosts without ``rendezvous`` or without ``ONEACCORD_SECRET`` in ``environ``; an invalid address.
        """
        if self.ranks < 1:
            raise InvalidWorldSizeError(f"-n {self.ranks}: a job has at least one rank on each host; give -n 1 or more")
        if self.nodes < 1:
            raise InvalidWorldSizeError(f"--nnodes {self.nodes}: a job runs on at least one host; give --nnodes 1 or more")
        if not 0 <= self.node_rank < self.nodes:
            raise InvalidRankError(
                f"--node-rank {self.node_rank} with --nnodes {self.nodes}: hosts count from 0, so that the last one is "
                f"{self.nodes - 1}; give each host its own number"
            )
        if self.grace_s is not None and not 0 <= self.grace_s <= _LONGEST_GRACE_S:
            raise UsageError(
                f"--grace {self.grace_s:g}: give the seconds that ranks may take to end after a signal, 0 to {_LONGEST_GRACE_S:g}"
            )
        if self.is_elastic:
            self._validate_elastic()
        self.validate_stdin()
        if self.rendezvous is not None:
            from oneaccord.launchers import parse_address  # most jobs need no address

            parse_address(self.rendezvous)
        if self.nodes > 1 and self.rendezvous is None:
            raise ConfigError(
                f"--nnodes {self.nodes} needs --rendezvous host:port, the same on every host: an address of the host with "
                "--node-rank 0 and a free port there",
                file="argument",
                key="rendezvous",
            )
        if self.nodes > 1 and not environ.get(Variable.SECRET):
            raise ConfigError(
                f"--nnodes {self.nodes} needs the variable ONEACCORD_SECRET, the same on every host, by which the ranks recognise each "
                "other: set it to a long random text, such as the output of: python -c 'import secrets; "
                "print(secrets.token_hex(32))'",
                file=Variable.SECRET,
            )
        self._find_program()

    def validate_stdin(self) -> None:
        """Check which rank reads the standard input, as `validate` does."""
        if self.stdin in (None, "all", "none"):
            return
        last = max(self.world_size, self.most) - 1
        if not (self.stdin.isascii() and self.stdin.isdigit() and int(self.stdin) <= last):
            ranks = "the number of a rank, which here can only be 0" if last == 0 else f"the number of a rank, 0 to {last}"
            raise UsageError(f"--stdin {self.stdin}: give {ranks}, or all, or none")

    def _validate_elastic(self) -> None:
        fewest = 1 if self.min_ranks is None else self.min_ranks
        if self.nodes > 1 and self.most != self.world_size:
            raise UsageError(
                f"--nnodes {self.nodes} with --max-ranks {self.most}: spares are for one host; leave --max-ranks out"
            )
        if (self.max_restarts or 0) < 0:
            raise UsageError(f"--max-restarts {self.max_restarts}: give 0 or more")
        if not 1 <= fewest <= self.world_size <= self.most:
            given = [f"-n {self.ranks}" + (f" on {self.nodes} hosts, {self.world_size} ranks in all" if self.nodes > 1 else "")]
            given = given if self.min_ranks is None else [f"--min-ranks {fewest}", *given]
            given = given if self.max_ranks is None else [*given, f"--max-ranks {self.most}"]
            raise InvalidWorldSizeError(
                f"{', then '.join(given)}: each must be at least the one before, and the first at least 1"
            )

    def command(self) -> list[str]:
        """Return the command of one rank; its Python does not buffer output, so that lines appear when they are printed."""
        return [sys.executable, "-u", *self.words]

    @property
    def words(self) -> list[str]:
        """The words after ``python -u``."""
        return [*(["-m"] if self.is_module else []), self.target, *self.args]

    def _find_program(self) -> None:
        if not self.is_module:
            path = Path(self.target)
            if not path.exists():
                hint = "; to run a module by its name, give -m" if path.suffix != ".py" else ""
                raise UsageError(f"there is no script {self.target!r} in {here()}{hint}")
            if path.is_dir() and not (path / "__main__.py").exists():
                raise UsageError(f"{self.target!r} is a directory without __main__.py; name the script to run")
            return
        top = self.target.partition(".")[0]
        # The first part alone: to look deeper would import the program's packages into the launcher.
        if top not in sys.builtin_module_names and PathFinder.find_spec(top, [str(here()), *sys.path]) is None:
            raise UsageError(f"there is no module {self.target!r}: {top!r} is neither installed nor in {here()}")
