"""The launcher: makes the world, runs the script on each rank, and ends as a launcher does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import cast

from oneaccord.api import OF_ONE_RANK, ConfigError, LaunchRequest, Network, Variable, current_rank
from oneaccord_simulated.deadlock import positions
from oneaccord_simulated.plugin import SimulatedConfig
from oneaccord_simulated.running import Simulation
from oneaccord_simulated.script.failure import conclude
from oneaccord_simulated.script.output import RankLines, text_stream
from oneaccord_simulated.script.processes import Processes
from oneaccord_simulated.script.program import folder_of, load
from oneaccord_simulated.trace import Trace

__all__ = ["launch"]


def launch(request: LaunchRequest) -> int:
    """Run the script or module on each rank; return the exit code.

    That is 128 and the signal's number if SIGINT or SIGTERM ended the run; for all else see `oneaccord_simulated.script.failure.conclude`.
    Must be called from the main thread: it handles signals.

    Raises
    ------
    ConfigError
        There is no such network or fault plan, the plan does not fit the world, or the trace cannot be written.
    """
    made: list[Simulation] = []
    try:
        with _signals(lambda: positions(made[0].runtime) if made else []):
            return _launch(request, made)
    except _SignalledError as signalled:  # outside of the run, which has its own words
        doing = "wrote the trace" if made else f"was making a world of {request.ranks} ranks, before any ran"
        sys.stderr.write(f"\noneaccord run: ended by {signalled.number.name}, while it {doing}\n")
        return 128 + signalled.number


def _launch(request: LaunchRequest, made: list[Simulation]) -> int:
    """As `launch`; take note of the world as soon as there is one."""
    config = cast("SimulatedConfig", request.config or SimulatedConfig())
    trace = Path(config.trace).absolute() if config.trace else None
    if trace is not None and (trace.is_dir() or not trace.parent.is_dir()):
        raise _no_trace(config.trace, "name a file in a folder that exists")
    network = Network.resolve(config.network or None)
    simulation = Simulation(
        request.ranks, seed=config.seed, network=network, faults=config.faults or None, keep_messages=trace is not None
    )
    made.append(simulation)
    code, words = _execute(request, simulation, request.ranks if network is None else network.neighbours(request.ranks))
    if trace is not None:
        _write(simulation.runtime.trace, trace, config.trace)
    sys.stderr.write(words)
    return code


def _execute(request: LaunchRequest, simulation: Simulation, ranks_per_host: int) -> tuple[int, str]:
    """Run the program on all ranks; return the exit code, and the message."""
    runtime = simulation.runtime
    real = sys.stdout, sys.stderr
    digits = len(str(request.ranks - 1)) if request.prefix else 0
    outputs = [RankLines(stream, digits, lambda: _writer(processes), runtime.killed) for stream in real]
    processes = Processes(
        [request.target, *request.args],
        folder_of(request),
        lambda rank: _variables(rank, request.ranks, ranks_per_host),
        lambda: (text_stream(outputs[0], real[0]), text_stream(outputs[1], real[1])),
        runtime.trace.seed,
    )
    program = cache(lambda: load(request))  # by the first rank that runs, since finding a module may run its package
    file = ""

    def body(_: int) -> bool:
        nonlocal file
        try:
            file = program().file
            if request.is_module:
                sys.argv[0] = file
            program().run()
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        finally:
            for output in outputs:
                output.finish()
        return True

    with processes.alive():
        sys.path.insert(0, folder_of(request))
        for name in OF_ONE_RANK:
            os.environ.pop(name, None)
        # The Python that runs all ranks has its seed of hashes already: one that is not in force would mislead the processes that they start.
        os.environ.update({name: value for name, value in _common_variables(request).items() if name != "PYTHONHASHSEED"})
        runtime.scheduler.on_switch = processes.show
        try:
            run = simulation.execute(body)
        except _SignalledError as signalled:
            said = "\n".join(
                [f"oneaccord run: ended by {signalled.number.name}, when the ranks were here:", *signalled.positions]
            )
            return 128 + signalled.number, f"{'-' * 80}\n{said}\n"
    if any(output.is_broken for output in outputs):
        # Nothing reads any more, as in `oneaccord run ... | head`: end as other programs do.
        return 128 + signal.SIGPIPE, ""
    return conclude(run, file)


def _writer(processes: Processes) -> int | None:
    """Return the rank that writes: that of the thread, or if a rank has started the thread itself, the one that runs."""
    rank = current_rank()
    return processes.rank if rank is None else rank


def _common_variables(request: LaunchRequest) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(request.ranks),
        # No launcher listens there, and a simulated rank does not look.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "simulated",
        Variable.LAUNCHED: "127.0.0.1:29500",
        **request.environ,
    }


def _variables(rank: int, size: int, ranks_per_host: int) -> dict[str, str]:
    """Return those variables of a rank that are its own, as on the hosts of the simulated network."""
    host, local_rank = divmod(rank, ranks_per_host)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(min(ranks_per_host, size - host * ranks_per_host)),
        "GROUP_RANK": str(host),
    }


class _SignalledError(BaseException):
    """A signal has come that ends the run."""

    def __init__(self, number: int, positions: list[str]) -> None:
        super().__init__(number)
        self.number: signal.Signals = signal.Signals(number)
        self.positions = positions


@contextmanager
def _signals(where: Callable[[], list[str]]) -> Iterator[None]:
    """Let SIGINT and SIGTERM raise `_SignalledError` with the places of the ranks, unless they are ignored, as under nohup."""

    def raise_signal(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait for anything
        raise _SignalledError(number, where())

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, raise_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write(trace: Trace, path: Path, name: str) -> None:
    try:
        path.write_text(trace.to_json(), encoding="utf-8")
    except OSError as error:
        raise _no_trace(name, str(error)) from None
    sys.stderr.write(
        f"oneaccord run: the trace is in {name} ({trace.duration_s:g} virtual seconds); open it at ui.perfetto.dev\n"
    )


def _no_trace(name: str, why: str) -> ConfigError:
    key = "backends.simulated.trace"
    return ConfigError(f"{key} = {name!r}: the trace cannot be written there: {why}", key=key, value=name)
