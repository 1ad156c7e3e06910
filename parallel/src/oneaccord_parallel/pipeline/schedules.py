"""The schedules of pipelines: functions that make plans, by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from oneaccord.errors import DuplicatePluginError, PluginError, UsageError
from oneaccord_parallel.pipeline.actions import Action
from oneaccord_parallel.pipeline.errors import PlanError
from oneaccord_parallel.pipeline.plan import Plan
from oneaccord_parallel.pipeline.proof import prove

__all__ = ["register_schedule", "schedule", "schedules"]

GROUP = "oneaccord.pipeline_schedules"
"""The entry-point group of schedules of other distributions."""

_TRIED = tuple((stages, microbatches) for stages in range(1, 6) for microbatches in (1, 2, 3, 4, 5, 6, 8, 12))
"""The sizes for which a schedule is proved when it is registered."""

Maker = Callable[..., Plan]


def gpipe(stages: int, microbatches: int, virtual: int = 1) -> Plan:
    """All forward passes, then all backward passes.

    ``(p-1)/(m+p-1)`` of the time is idle, and a rank holds m activations (Huang et al., 2019).
    """
    _check_alone("gpipe", virtual)
    actions = [
        [Action("forward", microbatch, rank) for microbatch in range(microbatches)]
        + [Action("backward", microbatch, rank) for microbatch in range(microbatches)]
        for rank in range(stages)
    ]
    return Plan("gpipe", microbatches, actions, promised_peak=[microbatches] * stages)


def one_f_one_b(stages: int, microbatches: int, virtual: int = 1) -> Plan:
    """One forward, one backward: gpipe with fewer activations.

    Rank r holds ``min(m, p-r)`` (Narayanan et al., PipeDream, 2019).
    """
    _check_alone("1f1b", virtual)
    actions = []
    for rank in range(stages):
        forwards = [Action("forward", microbatch, rank) for microbatch in range(microbatches)]
        backwards = [Action("backward", microbatch, rank) for microbatch in range(microbatches)]
        actions.append(_alternate(forwards, backwards, stages - 1 - rank))
    return Plan("1f1b", microbatches, actions, promised_peak=[min(microbatches, stages - rank) for rank in range(stages)])


def interleaved_1f1b(stages: int, microbatches: int, virtual: int = 2) -> Plan:
    """1F1B with several stages on each rank: less idle.

    ``(p-1)/(vm+p-1)`` of the time is idle, for v times the messages; m must be a multiple of p (Narayanan et al., Megatron-LM, 2021).
    """
    if microbatches % stages:
        raise UsageError(
            f"interleaved_1f1b needs as many microbatches as stages, or a multiple: {microbatches} is not a multiple of {stages}"
        )
    passes = microbatches * virtual
    actions, peak = [], []
    for rank in range(stages):

        def pass_of(number: int, kind: Any, rank: int = rank) -> Action:
            turn, within = divmod(number, stages * virtual)
            chunk = within // stages
            stage = (chunk if kind == "forward" else virtual - 1 - chunk) * stages + rank
            return Action(kind, turn * stages + within % stages, stage)

        first = min(passes, 2 * (stages - 1 - rank) + (virtual - 1) * stages)
        forwards = [pass_of(number, "forward") for number in range(passes)]
        backwards = [pass_of(number, "backward") for number in range(passes)]
        actions.append(_alternate(forwards, backwards, first))
        peak.append(min(passes, first + 1))
    placement = [stage % stages for stage in range(stages * virtual)]
    return Plan("interleaved_1f1b", microbatches, actions, placement, peak)


def zb_h1(stages: int, microbatches: int, virtual: int = 1) -> Plan:
    """1F1B whose gradients of weights come later, and fill gaps.

    ``(p-1)(F+B-W)`` is idle, and each rank holds ``min(m, p)`` activations (Qi et al., Zero Bubble, 2023).
    """
    _check_alone("zb_h1", virtual)
    actions = []
    for rank in range(stages):
        forwards = [Action("forward", microbatch, rank) for microbatch in range(microbatches)]
        inputs = [Action("backward_input", microbatch, rank) for microbatch in range(microbatches)]
        weights = [Action("backward_weight", microbatch, rank) for microbatch in range(microbatches)]
        mine = []
        for action in _alternate(forwards, inputs, stages - 1 - rank):
            mine.append(action)
            # Rank r does it r microbatches late, so that all ranks hold as much as the first.
            if action.kind == "backward_input" and action.microbatch >= rank:
                mine.append(weights[action.microbatch - rank])
        mine += weights[max(microbatches - rank, 0) :]
        actions.append(mine)
    return Plan("zb_h1", microbatches, actions, promised_peak=[min(microbatches, stages)] * stages)


def _alternate(forwards: list[Action], backwards: list[Action], first: int) -> list[Action]:
    """Return so many forward passes first, then one of each in turn, then the rest of the backward passes."""
    first = min(first, len(forwards))
    mixed = [action for pair in zip(forwards[first:], backwards, strict=False) for action in pair]
    return [*forwards[:first], *mixed, *backwards[len(forwards) - first :]]


def _check_alone(name: str, virtual: int) -> None:
    if virtual != 1:
        raise UsageError(f"{name} has one stage on each rank, but virtual={virtual} was given; interleaved_1f1b has several")


_BUILTIN: dict[str, Maker] = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved_1f1b": interleaved_1f1b, "zb_h1": zb_h1}
_registered: dict[str, Maker] = {}


def schedules() -> dict[str, str]:
    """Return the names of all schedules, each with the first line of its description; those of other distributions are not loaded."""
    known = {name: (inspect.getdoc(maker) or "").partition("\n")[0] for name, maker in {**_BUILTIN, **_registered}.items()}
    for entry in entry_points(group=GROUP):
        known.setdefault(entry.name, f"of {entry.dist.name if entry.dist else entry.value}")
    return known


def schedule(name: str, stages: int, microbatches: int, virtual: int | None = None) -> Plan:
    """Make a plan for a pipeline.

    - ``"gpipe"``: ``(p-1) / (m+p-1)`` of the time is idle, and rank r holds m activations (Huang et al., GPipe, 2019).
    - ``"1f1b"``: ``(p-1) / (m+p-1)`` idle, ``min(m, p-r)`` activations (Narayanan et al., PipeDream, 2019).
    - ``"interleaved_1f1b"``: ``(p-1) / (v*m+p-1)`` idle, ``v*p+p-1`` activations on rank 0, each of ``1/v`` of a rank's layers (Narayanan et
      al., Megatron-LM, 2021).
    - ``"zb_h1"``: an idle time of ``(p-1) * (F+B-W)``, ``min(m, p)`` activations (Qi et al., Zero Bubble, 2023).

    There p is ``stages``, m ``microbatches``, v ``virtual``; F is the time of a forward pass, B and W those of the two halves of a backward
    pass. The figure of ``zb_h1`` holds for F = B = W and m >= p; `Plan.timeline` has those of all other times.

    Parameters
    ----------
    name
        One of these, or one of `register_schedule`.
    stages
        How many ranks, each of which is one stage of the pipeline.
    microbatches
        Into how many parts the batch is divided.
    virtual
        How many virtual stages each rank has: rank r has r, r + stages, and so on. By default 2 for ``interleaved_1f1b``, else 1.

    Returns
    -------
    Plan
        It is proved, unless it is one of the four: these are proved by the tests.

    Raises
    ------
    UsageError
        There is no such schedule, or not for these sizes.
    PlanError
        A registered function made a plan that is wrong for these sizes; see `prove`.
    PluginError
        The schedule of another distribution cannot be loaded, or its function failed.
    """
    for key, value in {"stages": stages, "microbatches": microbatches, "virtual": 1 if virtual is None else virtual}.items():
        if type(value) is not int or value < 1:
            raise UsageError(f"{key}={value!r}: an integer of at least 1 is expected")
    if type(name) is not str:
        raise UsageError(f"a schedule has a name, such as '1f1b'; {name!r} was given")
    if name in _BUILTIN:
        return _made(_BUILTIN[name], stages, microbatches, virtual)
    if name not in _registered:
        _load(name)
    return _proved(name, _registered[name], stages, microbatches, virtual)


def register_schedule(name: str, function: Callable[..., Plan]) -> None:
    """Make a schedule known by a name, for `schedule`. It is proved first, for many sizes, and again each time it is used.

    A distribution brings schedules in the entry-point group ``oneaccord.pipeline_schedules``, as ``name = "module:function"``. They are
    proved when they are first used.

    Parameters
    ----------
    name
        A new name; registering the same function again changes nothing.
    function
        ``function(stages, microbatches)`` returns a `Plan` for these sizes, or raises a `UsageError` for sizes that it does not have. With a
        third parameter ``virtual`` it can make several stages on each rank.

    Raises
    ------
    UsageError
        The name is taken, or the function has a plan for none of 40 sizes, or one of other sizes. In these cases, as in the next, nothing is
        registered.
    PlanError
        It made a plan that is wrong.
    PluginError
        It raised an exception of another type.
    """
    if type(name) is not str or not callable(function):
        raise UsageError(f"a schedule needs a name and a function, but {name!r} and {function!r} were given")
    if _registered.get(name) is function:
        return
    if name in _BUILTIN or name in _registered:
        raise UsageError(f"there is already a schedule {name!r}; choose another name")
    last: UsageError | None = None
    proved = 0
    for stages, microbatches in _TRIED:
        try:
            _proved(name, function, stages, microbatches, None)
        except _NoSuchSize as error:
            last = error
        else:
            proved += 1
    if not proved:
        raise UsageError(f"the schedule {name!r} has no plan for 1 to 5 stages and up to 12 microbatches: {last}") from last
    _registered[name] = function


def _made(function: Maker, stages: int, microbatches: int, virtual: int | None) -> Plan:
    if virtual is None:
        return function(stages, microbatches)
    if "virtual" in inspect.signature(function).parameters:
        return function(stages, microbatches, virtual)
    if virtual != 1:
        raise UsageError(f"this schedule has one stage on each rank, but virtual={virtual} was given")
    return function(stages, microbatches)


class _NoSuchSize(UsageError):
    """The error of a registered schedule for sizes that it does not have."""


def _proved(name: str, function: Maker, stages: int, microbatches: int, virtual: int | None) -> Plan:
    """Return the plan that a registered function makes, if it is right."""
    try:
        plan: object = _made(function, stages, microbatches, virtual)
    except UsageError as error:
        raise _NoSuchSize(str(error)) from error
    except PlanError:
        raise
    except Exception as error:
        raise PluginError(
            f"the schedule {name!r} failed for {stages} stages and {microbatches} microbatches: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plan, Plan):
        raise UsageError(f"the schedule {name!r} returned a {type(plan).__name__}; expected a Plan")
    if (plan.stages, plan.microbatches) != (stages, microbatches):
        raise UsageError(
            f"the schedule {name!r} returned a plan of {plan.stages} stages and {plan.microbatches} microbatches, and "
            f"{stages} and {microbatches} were asked for"
        )
    prove(plan)
    return plan


def _load(name: str) -> None:
    """Register the schedule that another distribution brings under a name."""
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        known = sorted(schedules())
        near = difflib.get_close_matches(str(name), known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(f"there is no schedule {name!r}{hint} Known are: {', '.join(known)}")
    if len(found) > 1:
        owners = " and ".join(entry.dist.name if entry.dist else entry.value for entry in found)
        raise DuplicatePluginError(f"the schedule {name!r} comes from {owners}; uninstall all but one")
    try:
        function = found[0].load()
    except Exception as error:
        raise PluginError(
            f"the schedule {name!r} of {found[0].value} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    register_schedule(name, function)
