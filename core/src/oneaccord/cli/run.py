"""``oneaccord run``: start the ranks of a job on this host.

argparse reads its words: importing typer takes as long as all else that the launcher needs before the ranks start.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from oneaccord.common.processors import processors
from oneaccord.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run"]

_DESCRIPTION: Final = """\
Run a script as several ranks, and end all of them when one fails, unless
--keep-going says otherwise.

Each rank is a process with torchrun's variables. Every line of output begins
with its rank. When a rank fails, its traceback is shown last, the others are
ended, and the exit code is its own. With --keep-going the others are left
alone; if all of those end well that did not fail first, the exit code is 0,
and the last lines say which ranks were lost.

With --max-restarts, --min-ranks or --max-ranks the others continue as well,
and ranks that fail are replaced: new ones come into the job when the others
call Group.shrink(), as oneaccord.elastic does. On several hosts, each
launcher replaces those of its own.

With --backend simulated the ranks live in one process, on a clock of their
own: ONEACCORD_BACKENDS__SIMULATED__SEED, ..__NETWORK, ..__FAULTS and
..__TRACE, or the table [backends.simulated] of the configuration, say how.

With --on ssh or another launcher, the ranks run on other hosts. Without one,
run the same command on each host, with its own --node-rank and the same
variable ONEACCORD_SECRET.
"""


_OF_OTHERS: Final = {
    ("-np", "--np", "-p", "--nprocs", "--nproc", "--nproc-per-node", "--num-processes", "--ntasks"): "write -n NUMBER, as in: "
    "oneaccord run -n 4 script.py",
    ("--rdzv-endpoint", "--master-addr", "--master-port"): "write --rendezvous HOST:PORT",
    ("--rdzv-id",): "write --run-id WORD",
    ("-H", "--host"): "write --on ssh --hosts node1:4,node2:4",
    ("-f", "-machinefile", "--machinefile"): "write --on ssh --hostfile FILE",
    (
        "-mca",
        "--mca",
        "--bind-to",
        "--map-by",
    ): "it is mpirun's: leave it out, or write --backend mpi and set OMPI_MCA_ variables",
    ("-ppn", "-npernode", "--npernode"): "write --per-host NUMBER, with --on NAME",
    ("-x", "-genv", "-env"): "write --env NAME=VALUE, or with --on, --env NAME; ranks of this host get the whole environment",
    ("-verbose",): "write --verbose",
    ("--standalone", "--oversubscribe", "--rdzv-backend", "--allow-run-as-root"): "leave it out",
}
"""What torchrun's and mpirun's options are called here."""


_AUTO: Final = "auto"


class _OfAnother(argparse.Action):
    """An option of another launcher: it is refused, with what it is called here."""

    def __call__(self, _parser: Any, _found: Any, _value: Any, option: str | None = None) -> NoReturn:
        raise UsageError(f"oneaccord run has no option {option}; {self.const}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"oneaccord run: {message}; see: oneaccord run --help")

    def refuse(self, word: str) -> NoReturn:
        """Raise for an option that does not exist, with the one that is spelled alike."""
        from difflib import get_close_matches

        name = word.partition("=")[0]
        known = [each for action in self._actions if action.help != argparse.SUPPRESS for each in action.option_strings]
        close = get_close_matches(name.replace("_", "-"), known, n=1)
        raise UsageError(f"oneaccord run has no option {name}; {f'write {close[0]}' if close else 'see: oneaccord run --help'}")


def _number_of_ranks(text: str) -> int | str:
    if text == _AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        count = processors()
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of ranks; this host has {count} processors for them, as in: oneaccord run -n {count}, or -n auto"
        ) from None


def _parser() -> _Parser:
    parser = _Parser(
        prog="oneaccord run",
        usage="oneaccord run [OPTIONS] SCRIPT [ARGS]...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    _add_options(parser)
    for names, advice in _OF_OTHERS.items():
        with_underscores = (f"--{name[2:].replace('-', '_')}" for name in names if name.startswith("--"))
        spellings = dict.fromkeys((*names, *with_underscores))
        parser.add_argument(
            *spellings, action=_OfAnother, nargs="?", const=advice, dest=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser its options, by the names that `Launch` and `start` have for them."""
    basic = parser.add_argument_group("basic")
    # The first word that is no option, and all behind it, --help included.
    text = "A Python script, or with -m a module, and its arguments, passed on untouched."
    basic.add_argument("words", nargs=argparse.PARSER, metavar="SCRIPT", help=text)
    text = "How many ranks to start on this host; 1 unless given. auto: as many as this process may use processors, or with the backend nccl, GPUs."
    basic.add_argument("-n", "--ranks", type=_number_of_ranks, metavar="N", help=text)
    text = "Run a module by its name, as python -m does."
    basic.add_argument("-m", "--module", dest="is_module", action="store_true", help=text)
    basic.add_argument("--backend", metavar="NAME", help="The backend, instead of that of the configuration.")
    basic.add_argument("--config", metavar="FILE", help="The configuration file.")
    text = (
        "A variable for the ranks; may be given several times. NAME alone sends the value that it has here to other hosts, which otherwise get those that "
        "tune oneaccord and the libraries of ranks: ONEACCORD_*, NCCL_*, UCX_*, OMP_*, PYTHONPATH and a few more."
    )
    basic.add_argument("--env", dest="variables", action="append", default=[], metavar="NAME[=VALUE]", help=text)
    text = "How many seconds ranks may take to end after SIGTERM, SIGHUP or Ctrl-C, before they are killed; 30 unless given."
    basic.add_argument("--grace", dest="grace_s", type=float, metavar="SECONDS", help=text)
    text = "Start a Python for each rank, instead of forking one that has imported NumPy."
    basic.add_argument("--no-fork", dest="fork", action="store_false", help=text)
    basic.add_argument("-h", "--help", action="help", help="Show this page and exit.")

    _add_options_of_hosts(parser)

    elastic = parser.add_argument_group("elastic jobs")
    text = "Let the other ranks continue when one fails, as programs do that call Group.shrink()."
    elastic.add_argument("--keep-going", action="store_true", help=text)
    text = "How many ranks that fail are replaced, in all; for programs of oneaccord.elastic."
    elastic.add_argument("--max-restarts", type=int, metavar="N", help=text)
    text = "With how many ranks at least the job continues after a failure."
    elastic.add_argument("--min-ranks", type=int, metavar="N", help=text)
    text = "With how many at most; those beyond -n are started as spares, and come in after a failure."
    elastic.add_argument("--max-ranks", type=int, metavar="N", help=text)

    output = parser.add_argument_group("input and output")
    text = "Which rank reads the standard input: its number, all (each gets a copy), or none; 0 unless given."
    output.add_argument("--stdin", metavar="RANK|all|none", help=text)
    text = "Where to write what each rank prints, besides showing it: rank-N.out and rank-N.err, which must not exist yet."
    output.add_argument("--log-dir", metavar="DIR", help=text)
    text = "Do not begin each line of output with its rank."
    output.add_argument("--no-prefix", dest="prefix", action="store_false", help=text)
    text = "Where each rank writes its last calls when the job fails, at SIGUSR1, and at its end, for `oneaccord explain`."
    output.add_argument("--record", metavar="DIR", help=text)
    text = "Say why ranks are not forked, if they cannot be."
    output.add_argument("-v", "--verbose", action="store_true", help=text)


def _add_options_of_hosts(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("several hosts")
    text = "How many hosts run the job, each with its own `oneaccord run`; 1 unless given."
    hosts.add_argument("--nnodes", dest="nodes", type=int, default=1, metavar="N", help=text)
    text = "Which of the hosts this is, counted from 0; 0 unless given."
    hosts.add_argument("--node-rank", type=int, default=0, metavar="N", help=text)
    text = "Where the ranks meet: an address of host 0 and a free port."
    hosts.add_argument("--rendezvous", metavar="HOST:PORT", help=text)
    text = "What distinguishes this run from others with the same address and secret: the same word on each host, and a new one for each run."
    hosts.add_argument("--run-id", metavar="WORD", help=text)

    text = "The launcher that starts the ranks on other hosts, such as ssh or slurm; then -n counts the ranks of all hosts. `oneaccord doctor` lists them."
    hosts.add_argument("--on", metavar="NAME", help=text)
    text = (
        "The hosts, and how many ranks each takes; rank 0 is on the first. They are reached by ssh, unless --on says otherwise."
    )
    hosts.add_argument("--hosts", metavar="HOST:N,...", help=text)
    text = "A file with a host on each line, as HOST:N or HOST slots=N, in the place of --hosts."
    hosts.add_argument("--hostfile", metavar="FILE", help=text)
    text = "With --on: how many ranks each host gets; as many as fit unless given."
    hosts.add_argument("--per-host", type=int, metavar="N", help=text)
    text = "With --on: an option of the launcher, such as user=ada; may be given several times."
    hosts.add_argument("--option", dest="options", action="append", default=[], metavar="KEY=VALUE", help=text)


def run(words: Sequence[str]) -> int:
    """Start the job that the words after ``run`` describe, wait for its end, and return the exit code.

    Raises
    ------
    UsageError
        The words describe no job.
    SystemExit
        The page of help was asked for, and printed.
    """
    parser = _parser()
    found, unknown = parser.parse_known_args(words)
    if unknown:
        parser.refuse(unknown[0])
    given = vars(found)
    program: list[str] = given.pop("words")
    # Versions of Python differ in whether a -- before the program is left there.
    target, *args = program[1:] if program[0] == "--" else program
    choices: dict[str, Any] = {name: given.pop(name) for name in ("backend", "config", "record", "run_id", "variables")}
    elsewhere = {name: given.pop(name) for name in ("on", "hosts", "hostfile", "per_host", "options")}
    if given["ranks"] == _AUTO:
        given["ranks"], choices["is_auto"] = 1, True
    elif given["ranks"] is None:
        given["ranks"] = 1
        if given["nodes"] == 1:
            _warn_of_options_behind(target, args)
    # Imported here, so that the other commands do not pay for it.
    from oneaccord.local.launching import Launch
    from oneaccord.local.starting import start

    job = Launch(target, args=tuple(args), **given)
    if elsewhere["on"] is None and (elsewhere["hosts"] or elsewhere["hostfile"]):
        elsewhere["on"] = "ssh"
    if elsewhere["on"] is not None:
        from oneaccord.engines.starting import start_on

        return start_on(job, **elsewhere, **choices)
    for name, value in elsewhere.items():
        if value:
            option = {"options": "--option"}.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{option} is for a launcher on other hosts: name it by --on")
    return start(job, **choices)


def _warn_of_options_behind(target: str, args: Sequence[str]) -> None:
    """Say that words which look like options of ``run`` are the program's, since one rank may run because of that."""
    for word, following in zip(args, [*args[1:], ""], strict=False):
        name, _, value = word.partition("=")
        number = value or following
        if name in {"-n", "-np", "--ranks", "--nproc-per-node", "--nproc_per_node"} and number.isdigit():
            sys.stderr.write(
                f"oneaccord run: {name} {number} stands after {target} and is passed on to it, and only one rank runs; "
                f"to run {number} ranks: oneaccord run -n {number} {target}\n"
            )
            return
