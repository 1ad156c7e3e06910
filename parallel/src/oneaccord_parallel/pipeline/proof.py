"""The proof of a plan: each pass once, after its input, no deadlock, and no more activations than promised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from oneaccord.errors import UsageError
from oneaccord_parallel.pipeline.actions import KINDS, Action, Message, issued_at, needs, outcome, outgoing
from oneaccord_parallel.pipeline.errors import (
    MalformedPlanError,
    MissingActionError,
    PlanDeadlockError,
    PlanPeakError,
    RepeatedActionError,
)
from oneaccord_parallel.pipeline.plan import Plan
from oneaccord_parallel.pipeline.timeline import in_order

__all__ = ["Proof", "ahead_of", "prove"]


@dataclass(frozen=True, slots=True)
class Proof:
    """The findings of `prove` about a plan.

    Attributes
    ----------
    peak
        The most activations that each rank holds at once.
    ahead
        The number of actions by which each rank must issue its receives ahead, so that ranks that wait at each send, until its receive is issued, do
        not wait forever. `Pipeline` issues them so, and does not wait at sends.
    """

    peak: tuple[int, ...]
    ahead: int


def prove(plan: Plan) -> Proof:
    """Prove that a plan is right for a pipeline.

    1. Its actions name microbatches, stages and ranks that are there, and each action is on the rank of its stage.
    2. Each microbatch passes each stage forward once, and backward once: whole, or in two halves.
    3. Each action comes after what it needs, and no ranks wait for each other, although no message is stored on its way.
    4. No rank holds more activations than ``promised_peak``.

    Parameters
    ----------
    plan
        The plan; it need not be one that `schedule` gives.

    Returns
    -------
    Proof
        The figures that were found.

    Raises
    ------
    MalformedPlanError, MissingActionError, RepeatedActionError, PlanDeadlockError, PlanPeakError
        The plan breaks one of these, with a counterexample; all are a `PlanError`.
    UsageError
        It is no `Plan`.
    """
    if not isinstance(plan, Plan):
        raise UsageError(
            f"expected a Plan, such as mp.schedule('1f1b', stages=4, microbatches=8) returns, not a {type(plan).__name__}"
        )
    _check_form(plan)
    _check_counts(plan)
    _check_order(plan)
    peak = plan.peak()
    if plan.promised_peak is not None:
        for rank, (found, promised) in enumerate(zip(peak, plan.promised_peak, strict=True)):
            if found > promised:
                raise PlanPeakError(
                    f"{plan}: rank {rank} holds {found} activations at once, and {promised} are promised", rank=rank
                )
    return Proof(peak, ahead_of(plan))


def _check_form(plan: Plan) -> None:
    if plan.microbatches < 1 or not plan.placement:
        raise MalformedPlanError(f"{plan}: a plan has at least one microbatch and one stage")
    for stage, rank in enumerate(plan.placement):
        if not 0 <= rank < plan.stages:
            raise MalformedPlanError(f"{plan}: stage {stage} is on rank {rank}, and the ranks are 0 to {plan.stages - 1}")
    if plan.promised_peak is not None and len(plan.promised_peak) != plan.stages:
        raise MalformedPlanError(f"{plan}: promised_peak has {len(plan.promised_peak)} numbers, one for each rank is expected")
    for rank, step, action in _all(plan):
        fault = _fault_of(plan, rank, action)
        if fault:
            raise MalformedPlanError(f"{plan}: action {step} of rank {rank} is {action}; {fault}", rank=rank, step=step)


def _fault_of(plan: Plan, rank: int, action: Action) -> str:
    if action.kind not in KINDS:
        return f"the kinds are {', '.join(KINDS)}"
    if not 0 <= action.microbatch < plan.microbatches:
        return f"the microbatches are 0 to {plan.microbatches - 1}"
    if not 0 <= action.stage < plan.virtual_stages:
        return f"the stages are 0 to {plan.virtual_stages - 1}"
    if plan.placement[action.stage] != rank:
        return f"that stage is on rank {plan.placement[action.stage]}"
    return ""


def _check_counts(plan: Plan) -> None:
    found: dict[Action, tuple[int, int]] = {}
    for rank, step, action in _all(plan):
        earlier = found.setdefault(outcome(action), (rank, step))
        if earlier != (rank, step):
            raise RepeatedActionError(
                f"{plan}: rank {rank} does the {action} twice, as its actions {earlier[1]} and {step}", rank=rank, step=step
            )
    halves = {(action.microbatch, action.stage) for *_, action in _all(plan) if action.kind == "backward_input"}
    for stage, rank in enumerate(plan.placement):
        for microbatch in range(plan.microbatches):
            for kind in ("forward", "backward"):
                if Action(kind, microbatch, stage) not in found:
                    raise MissingActionError(f"{plan}: rank {rank} never does the {Action(kind, microbatch, stage)}", rank=rank)
            weight = Action("backward_weight", microbatch, stage)
            if (microbatch, stage) in halves and weight not in found:
                raise MissingActionError(
                    f"{plan}: rank {rank} never does the {weight}, the other half of its backward_input", rank=rank
                )
            if (microbatch, stage) not in halves and weight in found:
                raise RepeatedActionError(
                    f"{plan}: rank {rank} does the {weight} as action {found[weight][1]}, and the whole backward as well",
                    rank=rank,
                    step=found[weight][1],
                )


def _check_order(plan: Plan) -> None:
    stands = [0] * plan.stages
    ended: set[Action] = set()
    for rank, action in in_order(plan.actions, plan.virtual_stages):
        stands[rank] += 1
        ended.add(outcome(action))
    stuck = {rank: plan.actions[rank][step] for rank, step in enumerate(stands) if step < len(plan.actions[rank])}
    if not stuck:
        return
    missing = {
        rank: next(need for need in needs(action, plan.virtual_stages) if need not in ended) for rank, action in stuck.items()
    }
    # The waits end in a circle, perhaps of one rank that waits for its own later action.
    rank, path = next(iter(stuck)), []
    while rank not in path:
        path.append(rank)
        rank = plan.placement[missing[rank].stage]
    circle = path[path.index(rank) :]
    told = [
        f"rank {each} cannot begin its action {stands[each]}, {stuck[each]}, before the {missing[each]} of rank "
        f"{plan.placement[missing[each].stage]}"
        for each in circle
    ]
    why = "which comes later there" if len(circle) == 1 else "and none of them can continue"
    raise PlanDeadlockError(f"{plan}: {'; '.join(told)}, {why}", rank=rank, step=stands[rank])


def ahead_of(plan: Plan) -> int:
    """Return by how many actions receives must be issued ahead, so that waiting at each send ends."""
    issued = issued_at(plan.actions, plan.placement)
    low, high = 0, 1
    while not _ends(plan, high, issued):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _ends(plan, middle, issued) else (middle + 1, high)
    return low


def _ends(plan: Plan, ahead: int, issued: Mapping[Message, int]) -> bool:
    """Return whether all ranks come to their end if each waits at its sends until the receive is issued, ``ahead`` actions early."""
    ended: set[Action] = set()
    begun, waits = [0] * plan.stages, [False] * plan.stages
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            while begun[rank] < len(actions):
                action = actions[begun[rank]]
                if not waits[rank]:
                    if any(need not in ended for need in needs(action, plan.virtual_stages)):
                        break
                    ended.add(outcome(action))
                    waits[rank] = True
                message = outgoing(action, plan.placement)
                if message is not None and begun[message.dest] + ahead < issued[message]:
                    break
                waits[rank] = False
                begun[rank] += 1
                moved = True
    return all(begun[rank] == len(actions) for rank, actions in enumerate(plan.actions))


def _all(plan: Plan) -> Iterator[tuple[int, int, Action]]:
    return ((rank, step, action) for rank, actions in enumerate(plan.actions) for step, action in enumerate(actions))
