"""The driver of host launchers: one agent on each host, which starts the ranks there; one output, one report and one exit code for all."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Self

import oneaccord.errors as known_errors
from oneaccord._version import __version__
from oneaccord.common.variables import OF_ONE_RANK, PREFIX, Variable
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.launcher import Ask, Host, HostLauncher
from oneaccord.engines.agent import MARK, START_S, as_ended
from oneaccord.engines.host_input import HostInput
from oneaccord.engines.outbox import Outbox
from oneaccord.errors import DeadlineError, OneAccordError, RendezvousError, UsageError
from oneaccord.local.failure import Ended, Failure, conclude
from oneaccord.local.groups import signals_as_bytes
from oneaccord.local.launching import Launch
from oneaccord.local.output import screens
from oneaccord.local.stdin import ALL

__all__ = ["ALLOCATE_S", "Share", "how_ended", "passed_on", "raise_refused", "run_on_hosts", "share_out", "start_agent"]

ALLOCATE_S: Final = 86400.0
"""How long an allocation of hosts may take: queues are long."""
_GRACE_S: Final = 1.0
"""How long ranks of other hosts may take to fail by themselves, with errors that name the first cause."""
_END_S: Final = 3.0
"""How long ranks may take to end because of another one."""
_LATE_S: Final = 10.0
"""How much longer than its ranks an agent may take to end."""
_STOP_S: Final = 30.0
_AGAIN_S: Final = 3.0
"""How long after its loss a host is replaced: if it lives, its ranks end within two seconds, and until then they would take the places of the new ones."""
_READ_BYTES: Final = 1 << 16
_TAIL_BYTES: Final = 1 << 12
_TUNES: Final = (
    PREFIX,
    *("NCCL_", "UCX_", "UCC_", "GLOO_", "FI_"),
    *("OMP_", "MKL_", "OPENBLAS_"),
    *("TORCH_NCCL_", "JAX_", "XLA_"),
)
"""How variables begin that tune a library of the ranks, and are usually meant for all hosts. Those that say how one host is laid out, such as PATH, HOME,
LD_LIBRARY_PATH or CUDA_VISIBLE_DEVICES, come from each host."""
_ABOUT_PYTHON: Final = ("PYTHONHASHSEED", "PYTHONPATH", "PYTHONWARNINGS")
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of a host.

    Attributes
    ----------
    host, ranks
        The host, and its ranks.
    """

    host: Host
    ranks: range


def share_out(hosts: Sequence[Host], ask: Ask) -> list[Share]:
    """Return which ranks each host gets, in the order of the hosts; neighbours share a host.

    Raises
    ------
    UsageError
        The ranks do not fit on the hosts, or a host has too few GPUs for its ranks.
    """
    shares, first = list[Share](), 0
    for host in hosts:
        count = min(ask.per_host or host.slots, ask.ranks - first)
        if count > 0:
            if count * ask.gpus > host.gpus:
                raise UsageError(
                    f"{count} ranks on host {host.name} with {ask.gpus} GPUs each need {count * ask.gpus}, and it has {host.gpus}: give it fewer ranks"
                )
            shares.append(Share(host, range(first, first + count)))
            first += count
    if first < ask.ranks:
        room = ", ".join(f"{host.name}: {ask.per_host or host.slots}" for host in hosts) or "none"
        raise UsageError(f"{ask.ranks} ranks do not fit on these hosts ({room}): name more hosts, or give them more slots")
    return shares


def run_on_hosts(
    launcher: HostLauncher,
    ask: Ask,
    job: Launch,
    *,
    backend: str | None = None,
    config: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run a program as ranks on the hosts of a launcher, and wait for its end.

    In the main thread it handles signals while it runs, as `oneaccord.local.processes.run_job` does.

    Parameters
    ----------
    launcher, ask
        What gives the hosts, and what is asked of it. The hosts are given back at the end.
    job
        The program, its arguments and its options; the numbers of ranks and hosts come from ``ask`` and the hosts.
    backend, config
        As for `oneaccord.init`, on the ranks. A configuration file must lie on the hosts too.
    variables
        Variables for the ranks, besides those of `passed_on`.

    Returns
    -------
    int
        As for `oneaccord.local.processes.run_job`. When it returns or raises, the ranks of all hosts have ended, or end within two seconds on a host that
        cannot be reached any more.

    Raises
    ------
    UsageError
        The ranks do not fit on the hosts; or as for `oneaccord.local.starting.start`, with the name of the host.
    RendezvousError
        A host cannot be reached, or has no oneaccord; the message names it, with the words of what should have reached it.
    DeadlineError
        The hosts did not get ready in time.
    """
    try:
        shares = share_out(launcher.allocate(ask, Deadline(ALLOCATE_S)), ask)
        with _Driver(launcher, shares, job) as driver:
            driver.start(backend, config, {**passed_on(), **(variables or {})})
            return driver.wait()
    finally:
        launcher.release()


def passed_on() -> dict[str, str]:
    """Return the variables of this process that hold for the ranks on other hosts too."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_TUNES) or (name in _ABOUT_PYTHON and value)
        if name not in OF_ONE_RANK and name != Variable.SECRET
    }


def start_agent(launcher: HostLauncher, host: Host) -> subprocess.Popen[bytes]:
    """Start the local process that leads to an agent on a host.

    Raises
    ------
    RendezvousError
        There is no such command.
    """
    command = launcher.command(host, [host.python, "-P", "-m", "oneaccord.engines.agent"])
    environ = {name: value for name, value in os.environ.items() if name != Variable.SECRET}
    try:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the driver, which passes it on once
        )
    except OSError as error:
        raise RendezvousError(f"host {host.name} cannot be reached: {command[0]} cannot be started ({error})") from error


def how_ended(command: str, code: int, words: str) -> str:
    """Return how the process that led to a host has ended, with its last words."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{Path(command).name} ended ({how}){f': {words}' if words else ''}"


def raise_refused(host: str, error: Mapping[str, str]) -> NoReturn:
    """Raise the error of an agent here, with the name of its host."""
    raise getattr(known_errors, error["type"], OneAccordError)(f"host {host}: {error['message']}")


@dataclass(slots=True, eq=False)
class _Agent:
    """The local process that leads to the agent of a host."""

    share: Share
    process: subprocess.Popen[bytes]
    outbox: Outbox
    order: Mapping[str, Any]
    replaces: _Agent | None = None
    """The agent of the same host that was lost, in whose place this one has come."""
    is_made_good: bool = False
    """Whether the ranks of another one have come in the place of its own."""
    held: bytes = b""
    noise: bytearray = field(default_factory=bytearray)
    """The end of what was written that is neither output nor an answer."""
    said_hello: bool = False
    is_ready: bool = False
    meeting: str | None = None
    report: list[Ended] | None = None
    lost: str = ""
    """How the connection ended, if it did before the report."""
    lost_at: float = 0.0
    open_files: int = 2

    @property
    def name(self) -> str:
        return self.share.host.name

    @property
    def runs(self) -> bool:
        """Whether its ranks may still run."""
        return self.report is None and not self.lost

    def end_of_noise(self) -> str:
        return self.noise.decode(errors="replace").strip()


class _Driver:
    """The agents of a job, from their start to their end."""

    def __init__(self, launcher: HostLauncher, shares: Sequence[Share], job: Launch) -> None:
        self._launcher = launcher
        self._shares = shares
        self._job = job
        self._screens = screens(1, 2)
        self._may_go_on = job.keep_going or job.is_elastic
        self._agents: list[_Agent] = []
        self._open_line: dict[int, _Agent] = {}
        """For each screen, the host whose line there is not ended yet."""
        self._to_send: list[tuple[float, signal.Signals | None]] = []
        """Signals for the agents, each with its time; None kills the local processes."""
        self._to_replace: list[tuple[float, _Agent]] = []
        """The agents that were lost and are replaced, each with the time of the next attempt."""
        self._restarts = 0
        self._told: signal.Signals | None = None
        self._has_begun = False
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._selector = self._cleanup.enter_context(selectors.DefaultSelector())
        self._signals = self._cleanup.enter_context(signals_as_bytes(_PASSED_ON))
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        self._input = HostInput(self._selector)
        self._cleanup.callback(self._input.close)
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:  # the end of its standard input ends an agent, with its ranks
            agent.outbox.close()
        until = time.monotonic() + _END_S
        for agent in self._agents:
            try:
                agent.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()
            agent.outbox.join(_END_S)
            for pipe in (agent.process.stdout, agent.process.stderr):
                if pipe is not None:
                    pipe.close()
        self._cleanup.close()

    def start(self, backend: str | None, config: str | None, variables: Mapping[str, str]) -> None:
        """Start the agents, and let the ranks begin when all hosts are ready."""
        secret, total = secrets.token_hex(32), self._shares[-1].ranks.stop
        run = {str(Variable.RUN_ID): os.environ.get(Variable.RUN_ID) or secrets.token_hex(8)}
        for index, share in enumerate(self._shares):
            host = share.host
            part = replace(
                self._job,
                ranks=len(share.ranks),
                nodes=len(self._shares),
                node_rank=index,
                first_rank=share.ranks.start,
                total=total,
                environ={**run, **self._job.environ},
            )
            order = {
                "version": __version__,
                "secret": secret,
                "variables": variables,
                "folder": host.folder,
                "address": host.address,
                "job": asdict(part),
                "backend": backend,
                "config": config,
                "reads": self._reads(share),
            }
            self._start_one(share, order)
        deadline = Deadline(START_S)
        while not all(agent.is_ready for agent in self._agents) and self._told is None:
            if deadline.passed():
                late = [agent for agent in self._agents if not agent.is_ready]
                words = "".join(f"\n{agent.name}: {agent.end_of_noise() or 'said nothing'}" for agent in late)
                raise DeadlineError(f"these hosts did not get ready within {START_S:g} s:{words}")
            self._step(deadline.at)
        if self._told is None:
            self._has_begun = True
            for agent in self._agents:
                agent.outbox.send(meeting=self._agents[0].meeting)
            self._input.begin(agent.outbox for agent in self._agents if self._reads(agent.share))

    def wait(self) -> int:
        """Pass on output and signals until the ranks of all hosts have ended; return the exit code."""
        if not self._has_begun:
            assert self._told is not None
            self._say(f"oneaccord run: ended by {self._told.name}, while the hosts were getting ready\n")
            return 128 + self._told
        while any(agent.runs for agent in self._agents):
            self._step(None)
            if not any(agent.runs and agent.is_ready for agent in self._agents):  # the others have ended without it
                self._kill_replacements()
        text, code = conclude(self._ranks(), self._told, may_go_on=self._may_go_on)
        if text:
            self._say(text)
        for screen in self._screens:
            screen.tell_of_lost()
        return code

    def _start_one(self, share: Share, order: Mapping[str, Any], replaces: _Agent | None = None) -> None:
        process = start_agent(self._launcher, share.host)
        assert process.stdin is not None
        agent = _Agent(share, process, Outbox(process.stdin), order, replaces)
        for pipe, read in ((process.stdout, self._on_answer), (process.stderr, self._on_noise)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, read, agent, pipe))
        self._agents.append(agent)
        agent.outbox.send(**order)

    def _step(self, until: float | None) -> None:
        """Wait for the next thing to happen, or for the time ``until``, and deal with it."""
        due = [at for at, _ in [*self._to_send[:1], *self._to_replace[:1]]] + ([] if until is None else [until])
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        for key, _ in self._selector.select(timeout):
            key.data()
        if any(screen.broken for screen in self._screens) and self._told is None:
            self._end_from_outside(signal.SIGPIPE)
        while self._to_send and self._to_send[0][0] <= time.monotonic():
            self._send_signal(self._to_send.pop(0)[1])
        while self._to_replace and self._to_replace[0][0] <= time.monotonic():
            self._replace(self._to_replace.pop(0)[1])

    def _read(self, read: Any, agent: _Agent, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), _READ_BYTES)
        if data:
            read(agent, data)
            return
        self._selector.unregister(pipe)
        agent.open_files -= 1
        if not agent.open_files and agent.runs:
            self._on_loss(agent)

    def _on_noise(self, agent: _Agent, data: bytes) -> None:
        """Keep what ssh and the like say; show it once the ranks run."""
        agent.noise += data
        del agent.noise[:-_TAIL_BYTES]
        if self._has_begun and agent.report is None:
            self._show(agent, 2, data)

    def _on_answer(self, agent: _Agent, data: bytes) -> None:
        *lines, agent.held = (agent.held + data).split(b"\n")
        for line in lines:
            if line.startswith(MARK):
                ((kind, value),) = json.loads(line[len(MARK) :]).items()
                getattr(self, f"_on_{kind}")(agent, value)
            else:  # a login shell greets
                agent.noise += line + b"\n"
                del agent.noise[:-_TAIL_BYTES]

    def _on_hello(self, agent: _Agent, _value: Any) -> None:
        agent.said_hello = True

    def _on_ready(self, agent: _Agent, meeting: str | None) -> None:
        agent.is_ready, agent.meeting = True, meeting
        if agent.replaces is not None:
            agent.replaces.is_made_good = True
            agent.outbox.send(meeting=self._agents[0].meeting)

    def _on_refused(self, agent: _Agent, error: Mapping[str, str]) -> None:
        if agent.replaces is None:
            raise_refused(agent.name, error)
        agent.noise += error["message"].encode()  # and it ends

    def _on_output(self, agent: _Agent, output: tuple[int, str]) -> None:
        self._show(agent, output[0], base64.b64decode(output[1]))

    def _on_failed(self, _agent: _Agent, _rank: int) -> None:
        if not self._may_go_on:
            self._end_soon()

    def _on_done(self, agent: _Agent, report: Mapping[str, Any]) -> None:
        several = len(self._shares) > 1
        self._input.end(agent.outbox)
        agent.report = [as_ended(each, agent.name if several else "") for each in report["ranks"]]

    def _on_loss(self, agent: _Agent) -> None:
        """Deal with the end of a connection before the report of its agent."""
        code = agent.process.wait()
        what = how_ended(str(agent.process.args[0]), code, agent.end_of_noise())  # type: ignore[index] # a sequence
        if not agent.said_hello and agent.replaces is None:
            raise RendezvousError(f"host {agent.name} cannot be reached, or has no oneaccord: {what}")
        if not self._has_begun:
            raise RendezvousError(f"host {agent.name} was lost before its ranks began: {what}")
        agent.lost, agent.lost_at = f"its host {agent.name} was lost: {what}", time.monotonic()
        self._input.end(agent.outbox)
        if not self._may_go_on:
            self._end_soon()
        elif self._job.max_restarts:
            self._replace_soon(agent, what)

    def _replace_soon(self, agent: _Agent, what: str) -> None:
        """Begin to replace a host that was lost, and say so, or why not."""
        most, why = self._job.max_restarts or 0, ""
        if self._told is not None or self._to_send or not any(each.runs and each.is_ready for each in self._agents):
            return
        if agent.share is self._shares[0]:
            why = (
                "it is the first host, on which the others meet; end the job and start it again, if it is to have all its ranks"
            )
        elif self._restarts == most:
            why = f"--max-restarts is {most}"
        if why:
            self._say(f"oneaccord run: host {agent.name} was lost ({what}), and its ranks are not replaced: {why}\n")
            return
        self._restarts += 1
        self._say(
            f"oneaccord run: host {agent.name} was lost ({what}), and its ranks are started again: restart {self._restarts} of {most}\n"
        )
        self._to_replace.append((time.monotonic() + _AGAIN_S, agent))

    def _replace(self, lost: _Agent) -> None:
        """Start the agent of a host again. Its ranks find that the job runs, and come into it as new ones."""
        if self._told is not None or self._to_send:
            return
        try:
            self._start_one(lost.share, {**lost.order, "reads": False}, lost)
        except RendezvousError as error:
            self._say(f"oneaccord run: {error}\n")

    def _kill_replacements(self) -> None:
        self._to_replace.clear()
        for agent in self._agents:
            if agent.runs:
                agent.process.kill()

    def _reads(self, share: Share) -> bool:
        """Return whether a rank of a host reads the standard input."""
        reader = self._job.reader
        return reader == ALL or any(reader == str(rank) for rank in share.ranks)

    def _on_took(self, agent: _Agent, count: int) -> None:
        self._input.took(agent.outbox, count)

    def _ranks(self) -> list[Ended]:
        found = list[Ended]()
        for agent in self._agents:
            if agent.report is not None:
                found += agent.report
                continue
            if agent.replaces is not None and not agent.is_ready:
                continue  # an attempt that came to nothing
            code = agent.process.returncode or 1
            for rank in agent.share.ranks:
                failure = Failure(rank, code, agent.lost_at, None, "", host=agent.name, reason=agent.lost)
                found.append(Ended(failure, signalled=self._told is not None, made_good=agent.is_made_good))
        return found

    def _end_soon(self) -> None:
        """Let the ranks of all hosts end that still run after a while."""
        if not self._to_send and self._told is None:
            at = time.monotonic() + _GRACE_S
            self._to_send = [(at, signal.SIGTERM), (at + _END_S, signal.SIGINT), (at + _END_S + _LATE_S, None)]

    def _on_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._signals.recv(4096):
                if number == signal.SIGUSR1:
                    self._send_signal(signal.SIGUSR1)
                elif number != signal.SIGCHLD:
                    self._end_from_outside(signal.Signals(number))

    def _end_from_outside(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._told is not None:
            if number == signal.SIGINT:  # the second one kills
                self._send_signal(signal.SIGINT)
                self._to_send = [(now + _LATE_S, None)]
            return
        self._told = number
        if not self._has_begun:
            return
        if number == signal.SIGPIPE:
            self._send_signal(signal.SIGTERM)
            self._to_send = [(now + _END_S, signal.SIGINT), (now + _END_S + _LATE_S, None)]
            return
        self._send_signal(number)
        stop_s = _STOP_S if self._job.grace_s is None else self._job.grace_s
        self._to_send = [(now + stop_s + _LATE_S, None)]

    def _send_signal(self, number: signal.Signals | None) -> None:
        for agent in self._agents:
            if agent.runs:
                if number is None:
                    agent.process.kill()
                else:
                    agent.outbox.send(signal=int(number))

    def _show(self, agent: _Agent, fd: int, data: bytes) -> None:
        """Write output of a host; end a line first that another host has begun."""
        screen = self._screens[fd - 1]
        other = self._open_line.pop(id(screen), None)
        screen.write(fd, (b"\n" if other not in (None, agent) else b"") + data)
        if not data.endswith(b"\n"):
            self._open_line[id(screen)] = agent

    def _say(self, text: str) -> None:
        screen = self._screens[1]
        before = "\n" if self._open_line.pop(id(screen), None) is not None else ""
        screen.write(2, (before + text).encode(errors="backslashreplace"))
