"""The algorithms that could carry out a call, their predicted times, and the one that the selector takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneaccord.cli.console import print_json, print_table, print_text
from oneaccord.common.units import bytes_text, parse_bytes, time_text
from oneaccord.config.select import Choice, Selector, default_segments, lacks, reproduces
from oneaccord.config.select.rules import Call
from oneaccord.errors import ConfigError
from oneaccord.schedule.algorithms.registry import Algorithm
from oneaccord.schedule.simulation import PRESETS, Network
from oneaccord.schedule.steps import Collective
from oneaccord_lab.simulation import Outcome, simulate

__all__ = [
    "Candidate",
    "Question",
    "explain",
    "figures",
    "print_choice",
    "print_heading",
    "segments_of",
    "weigh",
    "written",
]

_NETWORK = "fat-tree"


@dataclass(frozen=True, slots=True)
class Question:
    """A call about which the user asks.

    Attributes
    ----------
    call
        The call, as the selector gets it.
    root
        The root, for a collective that has one.
    network, network_name
        The network for predicted times, and its name.
    """

    call: Call
    root: int
    network: Network
    network_name: str

    @classmethod
    def of(
        cls,
        collective: Collective,
        nbytes: str,
        size: int,
        network: str | None,
        *,
        root: int = 0,
        ranks_per_host: int | None = None,
        even: bool = True,
        reproducible: bool = False,
    ) -> Question:
        """Make a question of the words of a command line; the network gives the ranks per host if none are given."""
        chosen, name = _network_of(network)
        if ranks_per_host is not None:
            chosen = chosen.with_ranks_per_host(ranks_per_host)
        asked = 0 if collective is Collective.BARRIER else parse_bytes(nbytes)
        # As in a group: if not all hosts have equally many ranks, none of them share one.
        neighbours = max(1, min(chosen.neighbours(size), size))
        hosts = neighbours if size % neighbours == 0 else 1
        return cls(Call(collective, asked, size, hosts, even, reproducible), root, chosen, name)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm, its predicted cost, and the reason that rules it out; no prediction if it cannot be carried out at all."""

    algorithm: Algorithm
    outcome: Outcome | None
    out: str | None


def _network_of(name: str | None) -> tuple[Network, str]:
    """Return a preset by its name, or the network of a file, and its name."""
    wanted = name or _NETWORK
    if wanted in PRESETS:
        return PRESETS[wanted], wanted
    if not Path(wanted).exists():
        raise ConfigError(
            f"--network {wanted}: this is neither a preset nor a file; presets are: {', '.join(PRESETS)}",
            file="argument",
            key="network",
            value=wanted,
        )
    return Network.load(wanted), wanted


def weigh(question: Question, algorithms: Sequence[Algorithm], selector: Selector) -> tuple[Choice, list[Candidate]]:
    """Return the choice for a call, and all algorithms of the collective, the fastest first."""
    call = question.call
    choice = selector.choose(
        call.collective,
        call.nbytes,
        call.world_size,
        ranks_per_host=call.ranks_per_host,
        even=call.even,
        reproducible=call.reproducible,
    )
    candidates = []
    for algorithm in algorithms:
        if algorithm.collective is not call.collective:
            continue
        outcome = None
        if not algorithm.by_host or call.by_host:
            segments = segments_of(algorithm, choice, call.nbytes, call.world_size)
            outcome = simulate(algorithm, call.world_size, call.nbytes, question.network, root=question.root, segments=segments)
        candidates.append(Candidate(algorithm, outcome, _ruled_out(algorithm, call)))
    candidates.sort(key=lambda each: each.outcome.time_s if each.outcome else float("inf"))
    return choice, candidates


def segments_of(algorithm: Algorithm, choice: Choice, nbytes: int, size: int) -> int:
    """Return into how many segments a group would cut a call, if it took this algorithm."""
    return choice.segments if algorithm is choice.algorithm else default_segments(algorithm, nbytes, size)


def _ruled_out(algorithm: Algorithm, call: Call) -> str | None:
    if not reproduces(algorithm, call):
        return "not canonical: it combines in its own order, but --reproducible needs the common one"
    missing = lacks(algorithm, call)
    return None if missing is None else f"needs {missing}"


def explain(question: Question, selector: Selector, *, as_json: bool) -> None:
    """Print all candidates for a call, the choice, and the reason."""
    call = question.call
    choice, candidates = weigh(question, selector.algorithms(call.collective), selector)
    if as_json:
        print_json(
            {
                "collective": call.collective.value,
                "ranks": call.world_size,
                "bytes": call.nbytes,
                "ranks_per_host": call.ranks_per_host,
                "network": question.network_name,
                "algorithms": [{**written(each.algorithm, each.outcome), "out": each.out} for each in candidates],
                "chosen": choice.algorithm.name,
                "segments": choice.segments,
                "reason": choice.reason,
                "row": None if choice.rule is None else choice.rule.conditions,
            }
        )
        return
    print_heading(question)
    print_table(
        ("", "algorithm", "predicted", "steps", "sent per rank", "segments", ""),
        [_row(each, choice.algorithm) for each in candidates],
    )
    for out in dict.fromkeys(each.out for each in candidates if each.out and ":" in each.out):
        print()
        print_text(out)
    print_choice(choice, [(each.algorithm, each.outcome) for each in candidates if each.out is None and each.outcome])


def print_heading(question: Question) -> None:
    """Print a heading: the call and the network of the prediction."""
    call, summary = question.call, question.network.summary
    hosts = f", {call.ranks_per_host:,} per host" if call.ranks_per_host > 1 else ""
    size = "" if call.collective is Collective.BARRIER else f" of {bytes_text(call.nbytes)}"
    print_text(f"{call.collective.value}{size}, {call.world_size:,} ranks{hosts}, network {question.network_name}")
    if summary:
        print_text(f"({summary})")
    print()


def print_choice(choice: Choice, predicted: Sequence[tuple[Algorithm, Outcome]]) -> None:
    """Print the algorithm that a group takes and why, and whether another one is predicted to be faster for this very call."""
    name = choice.algorithm.name
    row = "" if choice.rule is None else f"by the row for {choice.rule.conditions}: "
    print()
    print_text(f"a group takes {name}: {row}{choice.reason or 'no reason is given'}")
    own = next((outcome.time_s for algorithm, outcome in predicted if algorithm is choice.algorithm), None)
    if own is None or len(predicted) == 1:
        return
    best, outcome = min(predicted, key=lambda each: each[1].time_s)
    if outcome.time_s >= own:
        print_text(f"for this call: no other is predicted to be faster than {name}")
        return
    longer = own / outcome.time_s - 1
    print_text(
        f"for this call: {best.name} is predicted to be faster, {time_text(outcome.time_s)}; {name} takes {longer:.0%} longer. "
        f"Rows are for many networks at once. To take it all the same: algorithms.{best.collective.value} = {best.name!r} in the config"
    )


def written(algorithm: Algorithm, outcome: Outcome | None) -> dict[str, Any]:
    """Return an algorithm and its prediction, in a form for JSON."""
    names = ("time_s", "steps", "bytes_per_rank", "segments", "method")
    numbers = {name: getattr(outcome, name, None) for name in names}
    sent = numbers["bytes_per_rank"]
    if sent is not None and sent.is_integer():
        numbers["bytes_per_rank"] = int(sent)
    return {"name": algorithm.name, **numbers}


def figures(outcome: Outcome | None) -> tuple[str, ...]:
    """Return the prediction as the cells of a table: time, steps, bytes that a rank sends, and segments."""
    if outcome is None:
        return ("-",) * 4
    return time_text(outcome.time_s), f"{outcome.steps:,}", bytes_text(outcome.bytes_per_rank), f"{outcome.segments:,}"


def _row(each: Candidate, chosen: Algorithm) -> tuple[str, ...]:
    mark = "*" if each.algorithm is chosen else ""
    return mark, each.algorithm.name, *figures(each.outcome), (each.out or "").partition(":")[0]
