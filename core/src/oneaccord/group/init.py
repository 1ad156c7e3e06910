"""`init`: find the number of this process, and join the job."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oneaccord.common.checks import whole
from oneaccord.common.variables import Variable
from oneaccord.config import Resolved, Settings, load
from oneaccord.config.plugins import get_plugin_manager
from oneaccord.config.secret import job_secret
from oneaccord.config.select import Selector
from oneaccord.config.selection import make_selector
from oneaccord.contract.deadline import Deadline
from oneaccord.control.joiners import JoinAddress
from oneaccord.control.meeting import Meeting
from oneaccord.control.verdicts import RunsAlreadyError
from oneaccord.errors import (
    ConfigError,
    InvalidRankError,
    InvalidWorldSizeError,
    RendezvousError,
    UsageError,
)
from oneaccord.group.forming import Formed, Setup, among_processes, among_threads, come_alone, finish
from oneaccord.group.group import Group
from oneaccord.group.shrinking import come_later
from oneaccord.job.error_file import gone
from oneaccord.job.error_file import install as install_error_file
from oneaccord.job.job import AS_LONG_AS_IT_TAKES_S, Job
from oneaccord.job.threads import ThreadRank, current_thread_rank
from oneaccord.launchers import LaunchEnvironment, claim, discover, meeting_place, why_not_alone
from oneaccord.launchers.seat import Seat
from oneaccord.net.credentials import Credentials
from oneaccord.net.keepalive import Liveness

__all__ = ["init"]

_log = logging.getLogger("oneaccord.job")

_LONGEST_NAME = 200
"""How many bytes of a job's name are kept as they are, at most."""


def init(
    backend: str | None = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float | None = None,
    seat: Seat | None = None,
) -> Group:
    """Join the job that this process belongs to, and return the group of all its ranks.

    Rank, world size and meeting point come from the launcher of the process: ``oneaccord run``, torchrun, Slurm, Open MPI, MPICH,
    Kubernetes and others are understood. Started by plain ``python``, the process is a world of one.

    Parameters
    ----------
    backend
        The backend's name, or ``"auto"``; overrides the config.
    config
        A configuration file to read instead of ``oneaccord.toml``, or a mapping with the same content.
    rank, world_size
        The number of this process, and of all; overrides the launcher. Without a launcher, the config's ``rendezvous.address`` or the
        variable ``ONEACCORD_RENDEZVOUS`` names the meeting point.
    timeout_s
        Seconds that the meeting and each later operation may last; overrides the config.
    seat
        The place of this rank in its job, if your own code starts the ranks, such as threads of one process. Then neither ``rank`` nor ``world_size`` is
        given, and nothing about them comes from a launcher or from variables.

    Returns
    -------
    Group
        Close it, ideally by ``with``.

    Raises
    ------
    ConfigError
        The configuration or the launcher's variables are wrong.
    InvalidRankError, InvalidWorldSizeError
        ``rank`` or ``world_size`` is impossible.
    UsageError
        ``seat`` is no `Seat`, or is given together with ``rank`` or ``world_size``, or in a thread that is a rank already.
    UnknownBackendError, BackendUnavailableError, PluginError
        The backend is not installed, or cannot run here.
    RendezvousError
        The ranks did not meet: no address, a port in use, no listener, or ranks that were started differently.
    AuthenticationError
        The ranks hold different secrets, or would listen in public without one.
    UnsupportedError
        The configuration needs a feature that this version does not have.
    DeadlineError
        Not all ranks came in time; the message names those that did not.
    """
    plugins = get_plugin_manager()
    member = current_thread_rank()
    if seat is not None:
        _check_seat(seat, rank, world_size, member)
    arguments: dict[str, Any] = {"backend": backend, "timeout_s": timeout_s}
    given = {key: value for key, value in arguments.items() if value is not None}
    resolved = load(config, arguments=given)
    settings = resolved.settings
    plugins.switch(settings.plugins)
    selector = make_selector(resolved, plugins)
    setup = Setup(resolved, plugins, _choices(resolved, selector))
    deadline = Deadline(settings.rendezvous_timeout_s, time.monotonic if member is None else member.world.runtime.now)
    if seat is not None:
        return Group(*finish(_seated(seat, setup, deadline), setup, selector, deadline))
    if member is not None:
        _check_arguments(rank, world_size, member.rank, member.world.world_size)
        return Group(*finish(among_threads(member, setup, deadline), setup, selector, deadline))
    is_told = rank is not None or world_size is not None
    is_elastic = not is_told and Variable.ELASTIC in os.environ
    join_address = JoinAddress.of(os.environ, _credentials(resolved, _run(discover(os.environ)))) if is_elastic else None
    if join_address is not None and Variable.NEWCOMER in os.environ:
        group = Group(*_come_later(setup, join_address))
    else:
        try:
            job = _among_processes(rank, world_size, setup, join_address, deadline)
        except RunsAlreadyError:
            if join_address is None:
                raise
            group = Group(*_come_later(setup, join_address))
        else:
            group = Group(*finish(job, setup, selector, deadline))
    if join_address is not None:
        join_address.enter(os.environ.get("RANK", ""))
        if group.world_size == 1:  # no failure will come that lets others in
            group._job.let_more_come()
    return group


def _check_seat(seat: Seat, rank: int | None, world_size: int | None, member: ThreadRank | None) -> None:
    if not isinstance(seat, Seat):
        raise UsageError(f"seat must be a oneaccord.Seat, not {seat!r}")
    if rank is not None or world_size is not None:
        raise UsageError(
            f"init got a seat, and also rank={rank} and world_size={world_size}: leave those out, the seat has them"
        )
    if member is not None:
        raise UsageError(
            f"init got a seat in a thread that is rank {member.rank} of a world of {member.world.world_size} already: leave seat out"
        )


def _seated(seat: Seat, setup: Setup, deadline: Deadline) -> Job:
    """Join the job of a seat. No variable of the process says which rank this is, and none is set: other threads may be ranks of other jobs."""
    _log.info("rank %d of %d, by its seat", seat.rank, seat.world_size)
    if seat.world_size == 1:
        if seat.listener is not None:
            seat.listener.close()  # no rank will come
        return come_alone(setup, deadline, seat.local_rank)
    resolved = setup.resolved
    meeting = Meeting(
        seat.rank,
        seat.world_size,
        resolved.settings.backend,
        setup.choices,
        seat.place,
        _of_secret(resolved, seat.secret.encode()).of_run(seat.job),
        seat.listener,
        _liveness(resolved.settings),
        local_rank=seat.local_rank,
    )
    return among_processes(meeting, setup, deadline)


def _choices(resolved: Resolved, selector: Selector) -> str:
    """Return words for the configuration that must be the same on all ranks."""
    settings = resolved.settings
    words = [f"{name}={algorithm}" for name, algorithm in sorted(settings.algorithms.items())]
    words += [f"ranks_per_host={settings.ranks_per_host}"] if settings.ranks_per_host else []
    words += ["reproducible"] if settings.reproducible else []
    words += ["security.checksum"] if settings.security.checksum else []
    words += ["security.tls_names=any"] if settings.security.tls is not None and settings.security.tls_names == "any" else []
    words += ["gpu_check=always"] if settings.gpu_check == "always" else []
    return ", ".join([*words, f"algorithms {selector.digest}"])


def _come_later(setup: Setup, join_address: JoinAddress) -> Formed:
    """Come in the place of a rank that has ended."""
    launch = discover(os.environ, configured=setup.resolved.settings.rendezvous.address)
    assert launch is not None  # a rank with a door has a launcher
    install_error_file(launch.rank)
    settings = setup.resolved.settings
    address = _address(setup.resolved, launch, launch.rank)
    release = claim(os.environ, launch.rank, launch.world_size, address)
    meeting = Meeting(
        -1,
        0,
        settings.backend,
        setup.choices,
        address,
        join_address.credentials,
        None,
        _liveness(settings),
        local_rank=launch.local_rank,
        join_address=join_address,
    )
    roster = join_address.roster()
    # Its launcher ends a rank that waits in vain, as far as that knows all others.
    patience_s = AS_LONG_AS_IT_TAKES_S if roster.hosts == 1 else settings.rendezvous_timeout_s
    try:
        formed = come_later(meeting, roster.most, setup, settings.rendezvous_timeout_s, patience_s)
    except BaseException:
        release()
        raise
    formed.job.on_close.append(release)
    return formed


def _among_processes(
    rank: int | None, world_size: int | None, setup: Setup, join_address: JoinAddress | None, deadline: Deadline
) -> Job:
    try:
        launch = discover(os.environ, configured=setup.resolved.settings.rendezvous.address)
    except (ConfigError, RendezvousError):
        if rank is None or world_size is None:
            raise
        launch = None  # a rank that gets its number here need not understand an incomplete launcher
    if launch is None and rank is None and world_size is None and (doubt := why_not_alone(os.environ)):
        _log.warning("oneaccord: %s", doubt)
    # An address of the user's own may unite ranks of several launches, which the user numbers.
    is_derived = launch is not None and bool(launch.others)
    run = _run(launch if is_derived or (rank is None and world_size is None) else None)
    rank, world_size = _who(rank, world_size, launch)
    is_numbered = launch is not None and (rank, world_size) == (launch.rank, launch.world_size)
    install_error_file(rank)
    is_alone = world_size == 1 and join_address is None
    address = None if is_alone else _address(setup.resolved, launch, rank)
    release = claim(os.environ, rank, world_size, address)
    try:
        _log.info(
            "rank %d of %d, by %s", rank, world_size, "plain Python or init's arguments" if launch is None else launch.launcher
        )
        # The launcher counts ranks as it started them.
        is_launchers = launch is not None and is_numbered and launch.launcher == "oneaccord"
        those_gone = gone if is_launchers and join_address is None else None
        # Parts of a launch that number themselves have one name, and so must not have several places.
        others = launch.others if launch is not None and is_numbered else []
        credentials = _credentials(setup.resolved, run)
        job = _joined(rank, world_size, address, credentials, setup, join_address, deadline, those_gone, others)
    except BaseException:
        release()
        raise
    job.on_close.append(release)
    return job


def _joined(
    rank: int,
    world_size: int,
    address: tuple[str, int] | None,
    credentials: Credentials,
    setup: Setup,
    join_address: JoinAddress | None,
    deadline: Deadline,
    those_gone: Callable[[], dict[int, str]] | None,
    others: Sequence[tuple[str, int]],
) -> Job:
    if address is None:
        return come_alone(setup, deadline)
    resolved = setup.resolved
    inherited = os.environ.get(Variable.RENDEZVOUS_FD) if rank == 0 else None
    meeting = Meeting(
        rank,
        world_size,
        resolved.settings.backend,
        setup.choices,
        address,
        credentials,
        int(inherited) if inherited is not None else None,
        _liveness(resolved.settings),
        join_address=join_address,
        gone=those_gone,
        others=others,
    )
    return come_alone(setup, deadline, None, meeting) if world_size == 1 else among_processes(meeting, setup, deadline)


def _liveness(settings: Settings) -> Liveness:
    return Liveness(settings.liveness.heartbeat_s, settings.liveness.patience_s)


def _check_arguments(rank: int | None, world_size: int | None, actual_rank: int, actual_size: int) -> None:
    if (rank is not None and rank != actual_rank) or (world_size is not None and world_size != actual_size):
        raise InvalidRankError(
            f"init got rank={rank} and world_size={world_size} in a thread that is rank {actual_rank} of {actual_size}: leave them out"
        )


def _who(rank: int | None, world_size: int | None, launch: LaunchEnvironment | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return (launch.rank, launch.world_size) if launch is not None else (0, 1)
    if rank is None and world_size is not None and launch is not None:
        rank = launch.rank
    if world_size is None and launch is not None:
        world_size = launch.world_size
    for value in (rank, world_size):
        if value is not None and whole(value) is None:
            raise InvalidRankError(f"rank and world_size must be integers, not {value!r}")
    if world_size is None or (rank is None and world_size > 1):
        raise InvalidWorldSizeError(f"init got rank={rank} and world_size={world_size}: give both, or neither")
    if world_size < 1:
        raise InvalidWorldSizeError(f"world_size must be at least 1, not {world_size}")
    rank = rank or 0
    if not 0 <= rank < world_size:
        raise InvalidRankError(f"rank={rank} is not in a world of {world_size}: ranks are 0 to {world_size - 1}", rank=rank)
    return rank, world_size


def _address(resolved: Resolved, launch: LaunchEnvironment | None, rank: int) -> tuple[str, int]:
    if launch is not None and launch.host is not None and launch.port is not None:
        return launch.host.strip("[]"), launch.port
    return meeting_place(os.environ, resolved.settings.rendezvous.address, rank)


def _credentials(resolved: Resolved, run: str) -> Credentials:
    return _of_secret(resolved, job_secret(resolved.settings.rendezvous, os.environ)).of_run(run)


def _of_secret(resolved: Resolved, secret: bytes) -> Credentials:
    """Return the credentials of a secret, with the certificates that the configuration names."""
    folder = resolved.settings.security.tls
    if folder is None:
        return Credentials.of_text(secret)
    from oneaccord.net.tls import Tls

    return Credentials.of_text(secret, Tls(folder, resolved.settings.security.tls_names == "host"))


def _run(launch: LaunchEnvironment | None) -> str:
    """Return the name of this process's job, which all its ranks have: the launcher's that gave the rank, and the user's."""
    given = os.environ.get(Variable.RUN_ID, "")
    of_launcher = f"{launch.launcher} {launch.job}" if launch is not None and launch.job else ""
    # A launcher of ours that is started again on a host has another name, and the user's is enough; so it is if the user numbers the ranks.
    if given and (launch is None or launch.launcher == "oneaccord" or Variable.RANK in os.environ):
        of_launcher = ""
    name = " ".join(filter(None, (of_launcher, given))).encode(errors="surrogateescape")
    if len(name) > _LONGEST_NAME:
        name = name[:_LONGEST_NAME] + b" " + hashlib.sha256(name).hexdigest().encode()
    return name.decode(errors="backslashreplace")
