"""Carrying out a plan on the ranks of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from oneaccord.errors import InvalidWorldSizeError, OneAccordError, SizeMismatchError, UsageError
from oneaccord_parallel.agreement import need_group
from oneaccord_parallel.arrays import shape_of
from oneaccord_parallel.pipeline.actions import Action, Message, channels, incoming, issued_at, outgoing
from oneaccord_parallel.pipeline.messages import Mail
from oneaccord_parallel.pipeline.plan import Plan
from oneaccord_parallel.pipeline.proof import ahead_of, prove
from oneaccord_parallel.pipeline.stages import Stage, pair
from oneaccord_parallel.pipeline.sums import TreeSum
from oneaccord_parallel.trees import flatten, rebuild

if TYPE_CHECKING:
    from oneaccord import Group

__all__ = ["Pipeline"]

Loss = Callable[[Any, Any], Any]


class Pipeline:
    """A model whose stages lie on the ranks of a group, trained by a plan. Every rank of the group must make it.

    >>> plan = mp.schedule("1f1b", stages=group.world_size, microbatches=8)
    >>> pipeline = mp.Pipeline(group, [mp.Stage(forward, backward)], plan)
    >>> loss, (gradients,) = pipeline.step(x, y, loss=mean_square)

    Parameters
    ----------
    group
        Rank r of the plan is rank r of the group; of a `DeviceMesh` give the group along the axis of the pipeline.
    stages
        Those of this rank, as many as the plan has there (`Plan.stages_of`), in the order in which data passes.
    plan
        The same on all ranks. It is proved.
    reduction
        ``"mean"``: the loss and the gradients are the sums over the microbatches, divided once by their number; so they are those of the
        whole batch, if the loss of a microbatch is a mean. ``"sum"``: they are the sums.
    timeout_s
        Seconds that each message may last, and each stage may keep the others waiting; by default the config's ``timeout_s``.

    Attributes
    ----------
    plan
        The plan that was given.
    held
        How many activations this rank holds now: microbatches in its stages whose backward pass has not ended.
    most_held
        The most that it has held at once, never more than ``plan.peak()[group.rank]``.

    Raises
    ------
    PlanError
        The plan is wrong; see `prove`.
    InvalidWorldSizeError
        The group has not as many ranks as the plan.
    UsageError
        The plans or reductions of the ranks differ, a rank has too few or too many stages, or one that cannot divide its backward pass as the plan
        demands. Every rank raises an error; the group stays usable.
    """

    def __init__(
        self,
        group: Group,
        stages: Sequence[Stage],
        plan: Plan,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        timeout_s: float | None = None,
    ) -> None:
        need_group(group)
        self._group = group
        self._stages: dict[int, Stage] = {}
        self._timeout_s = timeout_s
        self._spoilt = ""
        self.plan = plan
        self.held: int = 0
        self.most_held: int = 0
        problem: OneAccordError | None = None
        try:
            ahead = max(prove(plan).ahead, 1)  # at least 1, so that messages come while the rank computes
            self._check(group, stages, reduction)
        except OneAccordError as error:
            problem, ahead = error, 0
        self._meet(problem, reduction)
        numbers = plan.stages_of(group.rank)
        self._stages = dict(zip(numbers, stages, strict=True))
        self._parts = plan.microbatches if reduction == "mean" else 1
        self._last = plan.virtual_stages - 1
        self._ways = {"step": _Way.of(plan, group.rank, ahead)}

    def __repr__(self) -> str:
        return f"<oneaccord_parallel.Pipeline {self.plan}, rank {self._group.rank}>"

    def step(self, x: Any = None, y: Any = None, *, loss: Loss | None = None) -> tuple[float, list[Any]]:
        """Carry a batch through the pipeline and back. Every rank of the group must call it.

        Parameters
        ----------
        x
            On the rank of the first stage, the batch: an array or a tree of arrays, whose first axes are divided into as many equal parts as
            the plan has microbatches. Elsewhere ignored.
        y
            On the rank of the last stage, the targets, divided in the same way; by default None for each microbatch. Elsewhere ignored.
        loss
            On the rank of the last stage, ``loss(output, target)`` returns the loss of a microbatch and its gradient with respect to the
            output. If the last stage is one of torch or JAX, it returns the loss alone. Elsewhere ignored.

        Returns
        -------
        float, list
            The loss of the batch, on all ranks; and for each stage of this rank its gradients, summed in the order of the plan's backward
            passes. They are new arrays, except for ``None`` if a stage has none.

        Raises
        ------
        SizeMismatchError
            The batch cannot be divided. The other ranks raise a `UsageError` that names this one; nothing has moved.
        UsageError
            On all ranks: ``x`` or ``loss`` is missing on a rank that needs it; nothing has moved. On one rank: a function of a stage returned a wrong
            value, or an error ended a step before.
        Exception
            The exception of a stage's function, with a note that says which. If it ends the program of this rank, the other ranks get an
            `AbortedError` that names it.
        """
        inputs, targets = self._meet_batch("step", x, y, loss)
        return _Step(self, self._ways["step"], inputs, targets, loss).run()

    def eval(self, x: Any = None, y: Any = None, *, loss: Loss | None = None) -> tuple[float | None, list[Any] | None]:
        """Carry a batch through the pipeline, without a backward pass: for validation and predictions. Every rank of the group must call it.

        Each rank makes the forward passes of the plan, in its order, and keeps nothing of them. Modules of torch run without a graph; call
        their ``eval()`` before, or layers such as batch normalisation train on.

        Parameters
        ----------
        x, y
            As for `step`.
        loss
            On the rank of the last stage, ``loss(output, target)`` returns a number, or an array of one: nothing is differentiated, so that it may be any
            metric, such as an accuracy. It may also be that of `step`, whose gradient is not used. None: there is no loss.

        Returns
        -------
        float or None
            The loss of the batch, on all ranks; None if the last stage has no ``loss``.
        list or None
            On the rank of the last stage the output of each microbatch, in order; elsewhere None.

        Raises
        ------
        SizeMismatchError, UsageError, Exception
            As for `step`.
        """
        inputs, targets = self._meet_batch("eval", x, y, loss)
        if "eval" not in self._ways:
            forward = [[action for action in actions if action.kind == "forward"] for actions in self.plan.actions]
            plan = Plan(self.plan.name, self.plan.microbatches, forward, self.plan.placement)
            self._ways["eval"] = _Way.of(plan, self._group.rank, max(ahead_of(plan), 1))
        return _Step(self, self._ways["eval"], inputs, targets, loss).evaluate()

    def _meet_batch(self, call: str, x: Any, y: Any, loss: Loss | None) -> tuple[list[Any], list[Any]]:
        """Divide a batch, on the ranks that need it; raise on each rank if that cannot be done on one."""
        if self._spoilt:
            raise UsageError(
                f"this pipeline cannot continue, because {self._spoilt}, and other ranks may wait for messages that this one has not sent; begin again "
                "with a new group and a new pipeline on all ranks"
            )
        problem: OneAccordError | None = None
        inputs: list[Any] = []
        targets: list[Any] = []
        try:
            if 0 in self._stages:
                if x is None:
                    raise UsageError(f"the rank of the first stage needs the batch: {call}(x)")
                inputs = _divided(x, self.plan.microbatches, "x")
            if self._last in self._stages:
                if not callable(loss) and (call == "step" or loss is not None):
                    raise UsageError(f"the rank of the last stage needs a loss: {call}(x, y, loss=function)")
                targets = _divided(y, self.plan.microbatches, "y")
        except OneAccordError as error:
            problem = error
        # Three numbers, so that this costs little: it is the first stage that begins, and it has ended last.
        is_eval = call == "eval"
        mine = np.array([problem is not None, is_eval, not is_eval], np.int32)
        failed, some_eval, some_step = map(int, self._group.all_reduce(mine, "max", timeout_s=self._timeout_s))
        if failed:
            said = self._group.all_gather_object(None if problem is None else str(problem), timeout_s=self._timeout_s)
            _raise_first(said, problem, self._group.rank)
        if some_eval and some_step:
            raise UsageError(
                f"this rank calls {call}(), and another one {'step' if is_eval else 'eval'}(): every rank must make the same call",
                rank=self._group.rank,
            )
        return inputs, targets

    def _check(self, group: Group, stages: Sequence[Stage], reduction: str) -> None:
        """Return the problem of this rank's arguments."""
        plan = self.plan
        if reduction not in ("mean", "sum"):
            raise UsageError(f"reduction={reduction!r}: 'mean' or 'sum' is expected")
        if group.world_size != plan.stages:
            raise InvalidWorldSizeError(f"the plan is for {plan.stages} ranks ({plan}), but the group has {group.world_size}")
        numbers = plan.stages_of(group.rank)
        if not isinstance(stages, Sequence):
            raise UsageError(f"expected a list of the stages of this rank, not a {type(stages).__name__}")
        if len(stages) != len(numbers):
            raise UsageError(
                f"rank {group.rank} of {plan} has {len(numbers)} stages, {list(numbers)}, but a list of {len(stages)} was given"
            )
        divided = {action.stage for action in plan.actions[group.rank] if action.kind == "backward_weight"}
        for number, stage in zip(numbers, stages, strict=True):
            if not isinstance(stage, Stage):
                raise UsageError(f"expected a list of mp.Stage, but stage {number} is a {type(stage).__name__}")
            if number in divided and stage.backward_weight is None:
                raise UsageError(
                    f"{plan.name} divides the backward pass, but stage {number} has no backward_weight; give one, or use 1f1b"
                )

    def _meet(self, problem: OneAccordError | None, reduction: str) -> None:
        """Compare the arguments of all ranks; raise on each of them if they differ, or if one rank has a problem."""
        plan = self.plan
        digest = ""
        if isinstance(plan, Plan):
            digest = hashlib.sha256(repr((plan.microbatches, plan.actions, plan.placement, reduction)).encode()).hexdigest()
        card = [digest, f"{plan}, reduction={reduction!r}", None if problem is None else str(problem)]
        cards = self._group.all_gather_object(card, timeout_s=self._timeout_s)
        _raise_first([said for *_, said in cards], problem, self._group.rank)
        for rank, (other, named, _) in enumerate(cards):
            if other != cards[0][0]:
                more = ", in other orders" if named == cards[0][1] else ""
                raise UsageError(
                    f"the plans differ: rank 0 has {cards[0][1]}, and rank {rank} has {named}{more}; give the same on all ranks"
                )


def _raise_first(said: Sequence[str | None], problem: OneAccordError | None, rank: int) -> None:
    """Raise the problem of this rank, or else report that of another."""
    if problem is not None:
        raise problem
    for other, text in enumerate(said):
        if text is not None:
            raise UsageError(f"rank {other}: {text}", rank=rank, peer=other)


def _divided(tree: Any, parts: int, name: str) -> list[Any]:
    """Return the parts of a tree of arrays along their first axes."""
    leaves, spec = flatten(tree)
    for path, leaf in leaves.items():
        shape = shape_of(leaf) if hasattr(leaf, "shape") else ()
        if not shape or shape[0] % parts:
            what = f"{name} ({path})" if path else name
            raise SizeMismatchError(
                f"{what} has the shape {shape}, and is divided along the first axis into {parts} microbatches of one size; give a batch that "
                "can be"
            )
    size = {path: shape_of(leaf)[0] // parts for path, leaf in leaves.items()}
    return [
        rebuild(spec, {path: leaf[part * size[path] : (part + 1) * size[path]] for path, leaf in leaves.items()})
        for part in range(parts)
    ]


@dataclass(frozen=True)
class _Way:
    """The work of one rank for a batch: its actions, the messages from each sender, and the action before which it begins to receive each."""

    actions: Sequence[Action]
    expected: dict[int, list[Message]]
    early: dict[int, list[Message]]

    @classmethod
    def of(cls, plan: Plan, rank: int, ahead: int) -> _Way:
        """Return the way of a rank that issues its receives so many actions ahead."""
        expected = {
            source: messages for (source, dest), messages in channels(plan.actions, plan.placement).items() if dest == rank
        }
        early: dict[int, list[Message]] = {}
        for message, step in issued_at(plan.actions, plan.placement).items():
            if message.dest == rank:
                early.setdefault(max(step - ahead, 0), []).append(message)
        return cls(plan.actions[rank], expected, early)


class _Step:
    """One batch on its way through the stages of this rank."""

    def __init__(self, pipeline: Pipeline, way: _Way, inputs: list[Any], targets: list[Any], loss: Loss | None) -> None:
        self._of, self._way = pipeline, way
        self._inputs, self._targets, self._loss = inputs, targets, loss
        self._mail = Mail(pipeline._group, way.expected, pipeline._timeout_s)
        self._here: dict[tuple[str, int, int], Any] = {}  # data from one stage of this rank to another
        self._saved: dict[tuple[int, int], Any] = {}
        self._losses: dict[int, float] = {}
        self._outputs: dict[int, Any] = {}  # of the last stage, if there is no backward pass
        self._sums = {stage: TreeSum() for stage in pipeline._stages}

    def run(self) -> tuple[float, list[Any]]:
        """Carry the batch through and back."""
        of = self._of
        self._carry(self._do)
        root = of.plan.placement[of._last]
        shared = of._group.broadcast(np.array(self._total_loss(), np.float64), root, timeout_s=of._timeout_s)
        return float(shared), [self._sums[stage].result(of._parts) for stage in of._stages]

    def evaluate(self) -> tuple[float | None, list[Any] | None]:
        """Carry the batch through."""
        of = self._of
        self._carry(self._pass)
        told = np.array([self._loss is not None, self._total_loss()], np.float64)
        shared = of._group.broadcast(told, of.plan.placement[of._last], timeout_s=of._timeout_s)
        outputs = [self._outputs[microbatch] for microbatch in sorted(self._outputs)] if of._last in of._stages else None
        return float(shared[1]) if shared[0] else None, outputs

    def _total_loss(self) -> float:
        total = 0.0
        for microbatch in sorted(self._losses):  # not by `sum`, which rounds in another way from Python 3.12 on
            total += self._losses[microbatch]
        return total / self._of._parts

    def _carry(self, do: Callable[[Action], None]) -> None:
        """Do all actions of this rank."""
        of = self._of
        of.held = of.most_held = 0
        try:
            for number, action in enumerate(self._way.actions):
                for message in self._way.early.get(number, ()):
                    self._mail.issue(message)
                try:
                    do(action)
                except Exception as error:
                    error.add_note(f"raised in the {action}, on rank {of._group.rank}")
                    raise
            self._mail.finish()
        except BaseException as error:
            of._spoilt = f"an error ended a step ({type(error).__name__}: {error})"
            # Code that keeps the error keeps this step as well, by the traceback, but not the saved data of the stages.
            self._saved.clear()
            self._here.clear()
            raise
        finally:
            of.held = 0

    def _do(self, action: Action) -> None:
        of, (kind, microbatch, number) = self._of, action
        stage = of._stages[number]
        if kind == "forward":
            self._forward(stage, action)
            of.held += 1
            of.most_held = max(of.most_held, of.held)
            return
        saved = self._saved.pop((microbatch, number))
        if kind == "backward_weight":
            assert stage.backward_weight is not None  # checked when the pipeline was made
            self._sums[number].add(stage.backward_weight(saved))
        else:
            dy = self._take(action)
            if kind == "backward":
                dx, gradients = pair(stage._whole_backward(saved, dy), "backward")
                self._sums[number].add(gradients)
            else:
                dx, self._saved[microbatch, number] = pair(stage.backward(saved, dy), "backward")
            self._give(action, dx)
        if kind != "backward_input":
            of.held -= 1

    def _forward(self, stage: Stage, action: Action) -> None:
        _, microbatch, number = action
        output, self._saved[microbatch, number] = pair(stage.forward(self._take(action)), "forward")
        if number < self._of._last:
            self._give(action, output)
            return
        assert self._loss is not None
        value, self._here["gradient", microbatch, number] = stage._loss_of(self._loss, output, self._targets[microbatch])
        self._lose(microbatch, value)

    def _pass(self, action: Action) -> None:
        """Make a forward pass of which nothing is kept."""
        _, microbatch, number = action
        stage = self._of._stages[number]
        output = stage._evaluate(self._take(action))
        if number < self._of._last:
            self._give(action, output)
            return
        self._outputs[microbatch] = output
        if self._loss is not None:
            self._lose(microbatch, stage._value_of(self._loss, output, self._targets[microbatch]), alone=True)

    def _lose(self, microbatch: int, value: Any, *, alone: bool = False) -> None:
        """Take the loss of a microbatch."""
        try:
            self._losses[microbatch] = float(value)
        except (TypeError, ValueError, RuntimeError):  # torch raises the last one for a tensor of several elements
            expected = "; expected a number" if alone else " and a gradient; expected a number and a gradient"
            raise UsageError(f"loss returned {value!r:.80}{expected}") from None

    def _take(self, action: Action) -> Any:
        """Return the input of an action: a part of the batch, a message from another rank, or data of this rank."""
        kind, microbatch, number = action
        if kind == "forward" and not number:
            return self._inputs[microbatch]
        message = incoming(action, self._of.plan.placement)
        if message is not None:
            return self._mail.take(message)
        return self._here.pop(("activation" if kind == "forward" else "gradient", microbatch, number))

    def _give(self, action: Action, value: Any) -> None:
        kind, microbatch, number = action
        message = outgoing(action, self._of.plan.placement)
        if message is not None:
            self._mail.send(message, value)
        elif kind == "forward":
            self._here["activation", microbatch, number + 1] = value
        elif number:
            self._here["gradient", microbatch, number - 1] = value
