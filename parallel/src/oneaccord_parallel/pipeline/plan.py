"""Plans of pipelines, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import index

from oneaccord_parallel.pipeline.actions import Action, Actions, Message, Placement, incoming, outgoing
from oneaccord_parallel.pipeline.drawing import Heading, svg_of, text_of
from oneaccord_parallel.pipeline.errors import MalformedPlanError, PlanDeadlockError
from oneaccord_parallel.pipeline.timeline import Delay, Number, Timeline, timeline_of

__all__ = ["Plan"]


@dataclass(frozen=True, init=False)
class Plan:
    """The actions of each rank of a pipeline, in order; plain data that all ranks share.

    A rank does its actions in order. An action begins when its input has come: the activation of the stage before, or the gradient
    from the stage behind. Its own result leaves at once, while the rank continues. So messages follow from the actions, see `steps`.

    `schedule` makes plans; `prove` proves them; `Pipeline` carries them out.

    Parameters
    ----------
    name
        Its name in messages.
    microbatches
        Into how many parts the batch is divided.
    actions
        For each rank its actions, as `Action` or ``(kind, microbatch, stage)``.
    placement
        The rank of each stage, in the order in which data passes. By default each rank has one stage, its own number.
    promised_peak
        The most activations that each rank may hold at once; `prove` compares.

    Raises
    ------
    MalformedPlanError
        The arguments are no such data.
    """

    name: str
    microbatches: int
    actions: Actions
    placement: Placement
    promised_peak: tuple[int, ...] | None

    def __init__(
        self,
        name: str,
        microbatches: int,
        actions: Sequence[Sequence[Action]],
        placement: Sequence[int] | None = None,
        promised_peak: Sequence[int] | None = None,
    ) -> None:
        def keep(key: str, value: object) -> None:
            object.__setattr__(self, key, value)

        keep("name", name)
        try:
            keep("microbatches", index(microbatches))
            keep("actions", tuple(tuple(Action(kind, index(m), index(s)) for kind, m, s in each) for each in actions))
            keep("placement", tuple(range(len(self.actions)) if placement is None else map(index, placement)))
            keep("promised_peak", None if promised_peak is None else tuple(map(index, promised_peak)))
        except (TypeError, ValueError) as error:
            raise MalformedPlanError(
                f"{name}: a plan has a number of microbatches, a list of actions (kind, microbatch, stage) for each rank, and lists of "
                f"integers: {error}"
            ) from error

    def __str__(self) -> str:
        virtual = "" if self.virtual_stages == self.stages else f" ({self.virtual_stages} virtual)"
        return f"{self.name}: {_count(self.stages, 'stage')}{virtual}, {_count(self.microbatches, 'microbatch')}"

    @property
    def stages(self) -> int:
        """How many ranks there are, each of which is a stage of the pipeline, or has several virtual ones."""
        return len(self.actions)

    @property
    def virtual_stages(self) -> int:
        """How many stages there are on all ranks together: those that actions name."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the stages that a rank has.

        Parameters
        ----------
        rank
            The rank, from 0 on.
        """
        return tuple(stage for stage, place in enumerate(self.placement) if place == rank)

    def steps(self, rank: int) -> tuple[Action | Message, ...]:
        """Return the actions of a rank with the messages that follow from them: each `Message` is one that it receives, or sends.

        Parameters
        ----------
        rank
            The rank, from 0 on.
        """
        steps: list[Action | Message] = []
        for action in self.actions[rank]:
            around = (incoming(action, self.placement), action, outgoing(action, self.placement))
            steps += [step for step in around if step is not None]
        return tuple(steps)

    def peak(self) -> tuple[int, ...]:
        """Return the most activations that each rank holds at once.

        The data that a stage saves of a microbatch count from its forward pass to the end of its backward pass. Each is that of one stage: if a
        rank has several virtual stages, of a part of its layers.
        """
        peaks = []
        for actions in self.actions:
            held = most = 0
            for action in actions:
                held += (action.kind == "forward") - (action.kind in ("backward", "backward_weight"))
                most = max(most, held)
            peaks.append(most)
        return tuple(peaks)

    def timeline(self, forward: Number = 1, backward: Number = 2, weight: Number | None = None, message: Delay = 0) -> Timeline:
        """Return when each action begins and ends, if each begins as early as it can.

        On a network, a message takes the time of its way:

        >>> paths = oneaccord.api.Paths(oneaccord.api.NETWORKS["fat-tree"], plan.stages)
        >>> def seconds(message):
        ...     return paths.between(message.source, message.dest).flight_s(nbytes)
        >>> timeline = plan.timeline(1e-3, 2e-3, message=seconds)

        Here messages do not wait for each other. They do so in a simulated world, in which the pipeline itself runs on the same network, with
        `Group.compute` in its stages.

        Parameters
        ----------
        forward, backward
            How long a forward pass of one microbatch through one stage takes, and a whole backward pass, in any unit.
        weight
            The share of ``backward`` that makes the gradients of the weights; by default a half of it.
        message
            The time of a message between two ranks, during which they continue; or a function that returns it for a `Message`.

        Raises
        ------
        UsageError
            A duration is negative or not finite, or ``weight`` is more than ``backward``.
        PlanError
            The plan is wrong, so that not all of its actions can begin; `prove` says why.
        """
        try:
            timeline = timeline_of(self.actions, self.placement, forward, backward, weight, message)
        except (LookupError, TypeError) as error:
            raise MalformedPlanError(f"{self} cannot be carried out; mp.prove says why") from error
        if any(len(spans) < len(actions) for spans, actions in zip(timeline.spans, self.actions, strict=True)):
            raise PlanDeadlockError(f"{self}: some of its actions can never begin; mp.prove says why")
        return timeline

    def bubble(self, forward: Number = 1, backward: Number = 2, weight: Number | None = None, message: Delay = 0) -> Fraction:
        """Return the share of the time in which a rank has nothing to do, in the mean over the ranks.

        Parameters
        ----------
        forward, backward, weight, message
            As for `timeline`.
        """
        return self.timeline(forward, backward, weight, message).bubble

    def svg(self, forward: Number = 1, backward: Number = 2, weight: Number | None = None, message: Delay = 0) -> str:
        """Draw the timeline, with ranks as rows and time across; the same bytes for the same plan.

        Parameters
        ----------
        forward, backward, weight, message
            As for `timeline`.

        Returns
        -------
        str
            An SVG document. Each row is a group of the class ``rank``, each action one of the class ``action`` with the attributes
            ``data-kind``, ``data-microbatch``, ``data-stage``, ``data-start`` and ``data-end``.
        """
        timeline = self.timeline(forward, backward, weight, message)
        return svg_of(timeline, self._heading(timeline))

    def text(
        self,
        forward: Number = 1,
        backward: Number = 2,
        weight: Number | None = None,
        message: Delay = 0,
        *,
        width: int = 100,
        colour: bool = False,
    ) -> str:
        """Draw the timeline with characters of ASCII.

        Parameters
        ----------
        forward, backward, weight, message
            As for `timeline`.
        width
            The longest line; the rest continues below.
        colour
            Whether the kinds of actions have colours, as terminals understand them.
        """
        timeline = self.timeline(forward, backward, weight, message)
        return text_of(timeline, self._heading(timeline), width, colour=colour)

    def _heading(self, timeline: Timeline) -> Heading:
        share = timeline.bubble
        held = ", ".join(map(str, self.peak()))
        cost = f"idle {share} = {float(100 * share):.1f} % of the time; activations held at most: {held}"
        chunks = {stage: self.placement[:stage].count(rank) for stage, rank in enumerate(self.placement)}
        return Heading(str(self), cost, chunks)


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
