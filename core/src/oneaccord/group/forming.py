"""How the ranks of a job meet and start the backend: at the beginning, and again among the survivors of a failure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from oneaccord.calls.devices.opening import open_channel
from oneaccord.config import Resolved
from oneaccord.config.plugins import PluginManager
from oneaccord.config.plugins.choice import candidates, weigh
from oneaccord.config.select import Selector
from oneaccord.config.selection import make_selector
from oneaccord.contract.backend import BackendSpec
from oneaccord.contract.deadline import Deadline
from oneaccord.contract.device import DeviceChannel
from oneaccord.control import timing
from oneaccord.control.meeting import Meeting
from oneaccord.job.autobackend import start_best
from oneaccord.job.group_ranks import Members, ranks_per_host
from oneaccord.job.job import Job
from oneaccord.job.threads import ThreadRank, ThreadWorld
from oneaccord.net.network import show_address

__all__ = ["Formed", "Setup", "among_processes", "among_threads", "come_alone", "finish"]

_NO_BACKEND = "none"

_log = logging.getLogger("oneaccord.job")


class Setup(msgspec.Struct, frozen=True):
    """The description of the job that this rank got.

    Attributes
    ----------
    resolved
        Its configuration.
    plugins
        The manager of plugins, which knows the backends.
    choices
        In words, the configuration that must be the same on all ranks, besides the backend.
    """

    resolved: Resolved
    plugins: PluginManager
    choices: str


class Formed(NamedTuple):
    """The parts of the group of all ranks of a job."""

    job: Job
    members: Members
    setup: Setup
    selector: Selector
    channel: DeviceChannel | None


def among_processes(meeting: Meeting, setup: Setup, deadline: Deadline, hosts: Sequence[int] | None = None) -> Job:
    """Meet the other ranks, and start the backend with them; all of them do so together.

    Parameters
    ----------
    meeting
        The meeting point of the ranks.
    setup
        With which backend.
    deadline
        Until when.
    hosts
        For each rank a number that it shares with the ranks of its host, if that is known already.
    """
    name = meeting.backend
    spec = None if name == "auto" else setup.resolved.runnable(name)
    if spec is None:
        candidates(setup.plugins, setup.resolved.lacking)  # without any, there is no need to meet
    job = Job.meet(meeting, deadline)
    _log.info("rank %d met the others, %d in all, at %s", job.rank, job.world_size, show_address(meeting.address))
    try:
        _prepare(job, setup.resolved, hosts)
        # The next exchange of the ranks then shows that each of them outlives the store, from the first line after init() on.
        job.control.await_successor(min(timing.SUCCESSOR_S, deadline.remaining()))
        if spec is None:
            start_best(job, setup.resolved, setup.plugins, deadline)
        else:
            _log.info("rank %d: backend %s, from %s", job.rank, name, setup.resolved.origin("backend"))
            job.start_backend(spec, setup.resolved, setup.plugins, None, deadline)
    except BaseException as error:
        job.abort(error)
        raise
    return job


def among_threads(member: ThreadRank, setup: Setup, deadline: Deadline, hosts: Sequence[int] | None = None) -> Job:
    """As `among_processes`, if the ranks are threads of this process."""
    name = setup.resolved.settings.backend
    if name == "auto":
        name = member.world.backend
    spec = setup.plugins.describe(name)
    job = Job.among_threads(member, name, setup.choices, deadline)
    _prepare(job, setup.resolved, hosts)
    if job.world_size > 1 or _moves_alone(spec):
        _start_backend(job, spec, setup, deadline, member.world.shared)
    return job


def come_alone(setup: Setup, deadline: Deadline, local_rank: int | None = None, meeting: Meeting | None = None) -> Job:
    """Join a world of one; ``local_rank`` as for `Meeting`. If others may come later, ``meeting`` says how.

    A backend has work there only on GPUs. One that is chosen by its name must be able to run here, and is made all the same, so
    that its errors do not first show in a world of two; except those that have a launcher of their own, which alone makes
    their world.
    """
    name = setup.resolved.settings.backend
    is_named = name != "auto"
    if not is_named:
        name = weigh(setup.plugins, setup.resolved.lacking)[0] or _NO_BACKEND
    spec = None if name == _NO_BACKEND else setup.plugins.describe(name)
    is_made = spec is not None and (_moves_alone(spec) or (is_named and spec.launcher is None))
    if is_made or (spec is not None and is_named):
        setup.resolved.runnable(name)
    if spec is not None and not is_made:
        setup.resolved.backend_config(name)
        if is_named:
            setup.plugins.load_factory(spec)
    if meeting is None:
        job = Job.among_threads(ThreadRank(ThreadWorld(1, name), 0), name, setup.choices, deadline, local_rank)
    else:
        job = Job.meet(meeting, deadline)
    _place(job, setup.resolved, None)
    if spec is not None and is_made:
        _start_backend(job, spec, setup, deadline, None)
    return job


def finish(job: Job, setup: Setup, selector: Selector | None, deadline: Deadline) -> Formed:
    """Return the parts of the group of all ranks; ``selector`` is the one for any backend, if it is known already."""
    members = Members(0, tuple(range(job.world_size)), job.rank, ranks_per_host(job.hosts))
    try:
        if job.backend is not None or selector is None:
            spec = setup.plugins.describe(job.backend_name) if job.backend is not None else None
            selector = make_selector(setup.resolved, setup.plugins, spec)
        channel = open_channel(job, members, deadline)
    except BaseException as error:
        job.abort(error)
        raise
    return Formed(job, members, setup, selector, channel)


def _start_backend(job: Job, spec: BackendSpec, setup: Setup, deadline: Deadline, shared: dict[str, Any] | None) -> None:
    try:
        job.start_backend(spec, setup.resolved, setup.plugins, shared, deadline)
    except BaseException as error:
        job.abort(error)
        raise


def _prepare(job: Job, resolved: Resolved, hosts: Sequence[int] | None) -> None:
    recorder = resolved.settings.recorder
    job.record(recorder.calls, recorder.directory)
    _place(job, resolved, hosts)


def _place(job: Job, resolved: Resolved, hosts: Sequence[int] | None) -> None:
    """Give a job the facts about hosts that its backend may need: the known ones, or those of the config, if it has any."""
    count = resolved.settings.ranks_per_host
    if hosts is not None:
        job.hosts = tuple(hosts)
    elif count is not None:
        job.hosts = tuple(rank // count for rank in range(job.world_size))


def _moves_alone(spec: BackendSpec) -> bool:
    """Return whether a backend is needed in a world of one: it launches calls on GPU arrays on their device, for any number of ranks."""
    return "cuda" in spec.devices
