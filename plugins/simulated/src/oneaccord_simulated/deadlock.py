"""The report when no rank can continue: where each rank is, and which rank waits for which."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from oneaccord.api import Record, show_ranks
from oneaccord_simulated.state import State
from oneaccord_simulated.task import READY, RUNNING, Task

__all__ = ["doing", "explain", "positions", "story"]

_BUFFERED_BYTES = 1 << 16
"""The size up to which real backends usually carry a message that is not received yet."""
_DETAILED, _SHOWN = 12, 40
"""The most different lines that are shown with the waits of the ranks, and without."""
_RUNS = 40
"""How many runs of ranks a line names, at most."""
_SENDS, _THREADS = 3, 4
"""The most sends in vain that are shown for a rank, and the most threads outside of the world."""
_SAME = "Every rank must make the same calls in the same order, with the same shape, dtype, op and root"

Tasks = dict[int, list[Task]]
"""The tasks of each rank that have begun and are not over, its own thread first."""


def explain(state: State) -> tuple[str, str, int | None]:
    """Return the kind of failure, the text, and the rank that it is about."""
    tasks = _tasks(state)
    lines = positions(state)
    if len(lines) > _DETAILED:
        lines = _lines({rank: _story(state, rank, mine, _nothing) for rank, mine in tasks.items()})
    odd = _different(tasks)
    if odd:
        return (
            "mismatch",
            "\n".join([f"the ranks did not make the same call: {_contrast(odd)}. {_SAME}", *lines]),
            odd[-1][1][0],
        )
    way = _way({rank: _needs(mine, tasks) for rank, mine in tasks.items()})
    headline = "deadlock: no rank can go on"
    if way:
        headline += f": {_told(way, state, tasks)}"
    elif own := [task for mine in tasks.values() for task in mine if task.waits_for]:
        headline += f": rank {own[0].rank} is {doing(state, own[0])}, and nothing of this world ends that"
    others = state.scheduler.bystanders() if any(task.waits_for for mine in tasks.values() for task in mine) else []
    if others:
        names = ", ".join(others[:_THREADS]) + (f" and {len(others) - _THREADS} more" if len(others) > _THREADS else "")
        lines.append(
            f"  Threads that ran before this world did, and are no part of it: {names}. If a rank waits for one of them, make that thread in "
            "the function that the ranks run, or put the wait into `with oneaccord.outside():`"
        )
    if _hopes_for_buffers(way, tasks):
        lines.append(
            "  These sends wait for their receives. A backend may carry arrays this small all the same, but none promises to: use sendrecv, "
            f"or let one side receive first (backends.simulated.eager_bytes = {_BUFFERED_BYTES} lets them pass here)"
        )
    return "deadlock", "\n".join([headline, *lines]), way[-1] if way else None


def story(state: State, rank: int) -> str:
    """Return where a rank is, which may be about to continue."""
    return _story(state, rank, _tasks(state)[rank], _nothing)


def positions(state: State) -> list[str]:
    """Return lines for the places of the ranks."""
    return _lines({rank: _story(state, rank, mine, _awaited) for rank, mine in _tasks(state).items()})


def _tasks(state: State) -> Tasks:
    tasks: Tasks = {rank: [] for rank in range(state.world.world_size)}
    for task in state.scheduler.tasks():
        if task.ident and task.rank >= 0:
            tasks[task.rank].append(task)
    return tasks


# The places


def _story(state: State, rank: int, tasks: list[Task], awaited: Callable[[Task], str]) -> str:
    gone = _gone(state, rank)
    if gone:
        last = state.last_call(rank)
        lost = state.unreceived(rank)
        said = [f"{gone} after {last}" if last else f"{gone} without a call"]
        said += [f"nobody received its {send}" for send in lost[:_SENDS]]
        return "; ".join(said if len(lost) <= _SENDS else [*said, f"nor {len(lost) - _SENDS} more"])
    if not tasks:
        return "about to begin"
    said = [_alone(state, rank, task, tasks) if task.doing is None else task.doing.describe() + awaited(task) for task in tasks]
    return "; ".join(each for each in said if each)


def _gone(state: State, rank: int) -> str:
    """Return why nothing more can come from a rank; empty if something can."""
    if rank in state.killed:
        return f"killed ({state.killed[rank]})"
    if state.is_over(rank):
        return "ended"
    if state.world.has_left(rank):
        where = state.where_is_rank(rank)
        return f"left the group{f' at {where}' if where else ''}"
    return ""


def _alone(state: State, rank: int, task: Task, tasks: list[Task]) -> str:
    """Return the place of a thread that is in no call; empty for one in the background."""
    if task.number:
        return ""
    where = state.where_is(task)
    at = f" at {where}" if where else ""
    if task.waits_for:
        last = state.last_call(rank)
        return f"{doing(state, task)}, " + (f"after {last}" if last else "before its first call")
    if not state.world.has_met(rank):
        return f"in init{at}, waiting for all ranks"
    if any(other.doing for other in tasks):
        return f"waiting{at or ' in close'} for calls in the background"
    passing = state.passes_time(rank)
    if passing:
        return f"{passing}{at}"
    last = state.last_call(rank)
    return f"{'busy' if task.state in (READY, RUNNING) else 'waiting'}{at}, " + (
        f"after {last}" if last else "before its first call"
    )


def doing(state: State, task: Task) -> str:
    """Return the activity of a thread that is in no call of a group."""
    where = state.where_is(task)
    what = f"waiting {task.waits_for}" if task.waits_for else "busy"
    return f"{what} at {where}" if where else what


def _awaited(task: Task) -> str:
    """Say for whose messages a call waits."""
    wait = None if task.doing is None else task.doing.wait
    if wait is not None:  # the call says it, since the task waits for messages of other calls as well
        if wait.is_any and len(wait.awaiting) > 1:
            return f", waiting for a message of any of {_ranks(wait.awaiting)}"
        return f", waiting for {_ranks(wait.awaiting)}" if wait.awaiting else ", waiting for a message of its own"
    senders = {peer for peer, is_send in task.awaits if not is_send}
    receivers = {peer for peer, is_send in task.awaits if is_send}
    waits = [f"for a message of {_ranks(senders)}"] if senders else []
    if receivers:
        waits.append(f"for {_ranks(receivers)} to receive")
    return f", waiting {' and '.join(waits)}" if waits else ""


def _nothing(_: Task) -> str:
    return ""


def _lines(stories: dict[int, str]) -> list[str]:
    """Return a line for each story, with the ranks that share it."""
    ranks: dict[str, list[int]] = {}
    for rank, each in stories.items():
        ranks.setdefault(each, []).append(rank)
    lines = [f"  {_ranks(mine)}: {each}" for each, mine in ranks.items()]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"  and {len(lines) - _SHOWN} more"]


def _ranks(ranks: Iterable[int]) -> str:
    return show_ranks(ranks, _RUNS)


# Different calls at one place


def _different(tasks: Tasks) -> list[tuple[Record, list[int]]]:
    """Return the calls that ranks make at one place, and the ranks that make them, if these are not all the same; the rarest last."""
    places: dict[tuple[int, int], dict[bytes, tuple[Record, list[int]]]] = {}
    for rank, mine in tasks.items():
        for task in mine:
            record = task.doing
            if record is not None and record.digest:
                calls = places.setdefault((record.channel, record.sequence), {})
                calls.setdefault(record.digest, (record, []))[1].append(rank)
    odd = next((calls for _, calls in sorted(places.items()) if len(calls) > 1), {})
    return sorted(odd.values(), key=lambda call: -len(call[1]))


def _contrast(odd: list[tuple[Record, list[int]]]) -> str:
    return ", and ".join(f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {_words(record)}" for record, ranks in odd)


def _words(record: Record) -> str:
    """Return a call without its line."""
    return record.describe().removesuffix(f" at {record.where}")


# The waits


def _needs(tasks: list[Task], everyone: Tasks) -> list[int]:
    """Return the ranks for which a rank waits, those of its own thread first."""
    needs: list[int] = []
    for task in tasks:
        record = task.doing
        if record is not None and record.wait is not None:
            needs += record.wait.awaiting
        elif record is not None:
            needs += [peer for peer, _ in task.awaits]
        if record is not None and record.sequence < 0:  # at a meeting, the waits are for the ranks that have not come
            needs += [rank for rank in record.members if not any(_meets(other, record) for other in everyone[rank])]
    return needs


def _meets(task: Task, record: Record) -> bool:
    """Return whether a thread has come to a meeting of the ranks."""
    return task.doing is not None and (task.doing.channel, task.doing.what) == (record.channel, record.what)


def _way(needs: dict[int, list[int]]) -> list[int]:
    """Follow the waits: a circle that begins and ends with one rank, or the shortest way to a rank that waits for no other."""
    shortest: list[int] = []
    for start in needs:
        path, seen = [start], {start}
        while needs[path[-1]]:
            following = needs[path[-1]][0]
            if following in seen:
                return [*path[path.index(following) :], following]
            path.append(following)
            seen.add(following)
        if len(path) > 1 and (not shortest or len(path) < len(shortest)):
            shortest = path
    return shortest


def _told(way: list[int], state: State, tasks: Tasks) -> str:
    shown = way if len(way) <= 10 else [*way[:5], *way[-4:]]
    words = f"rank {shown[0]} waits for rank {shown[1]}"
    for index, rank in enumerate(shown[2:], start=2):
        words += f", ..., which waits for rank {rank}" if index == 5 and shown is not way else f", which waits for rank {rank}"
    return words if way[0] == way[-1] else f"{words}, which {_end(way[-1], state, tasks[way[-1]])}"


def _end(rank: int, state: State, tasks: list[Task]) -> str:
    """Return the activity of a rank that waits for no other."""
    if rank in state.killed:
        return "was killed"
    if state.is_over(rank):
        return "has ended"
    if state.world.has_left(rank):
        return "has left the group"
    if not state.world.has_met(rank):
        return "is in init"
    record = next((task.doing for task in tasks if task.doing is not None), None)
    if record is not None:
        return f"is in {_words(record)}"
    own = next((task for task in tasks if task.waits_for), None)
    return f"is {doing(state, own)}" if own else "is in no call"


def _hopes_for_buffers(way: list[int], tasks: Tasks) -> bool:
    """Return whether ranks wait in a circle only because their sends are not received, and these are small."""
    if len(way) < 2 or way[0] != way[-1]:
        return False
    for rank in way[:-1]:
        doing = [task for task in tasks[rank] if task.doing is not None]
        if not doing or not all(
            task.doing is not None
            and task.doing.nbytes <= _BUFFERED_BYTES
            and task.awaits
            and all(is_send for _, is_send in task.awaits)
            for task in doing
        ):
            return False
    return True
