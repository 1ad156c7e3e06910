"""The shares of a data set: what is covered, and how an epoch goes on."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oneaccord_parallel as mp
from oneaccord.errors import UsageError


@dataclass(frozen=True)
class Place:
    rank: int
    world_size: int


def places(world_size):
    return [Place(rank, world_size) for rank in range(world_size)]


def in_turn(shares):
    """Return the samples in the order in which the ranks use them: the first of each rank, the second of each, and so on."""
    return [index for row in zip_longest(*(share.tolist() for share in shares)) for index in row if index is not None]


NUMBERS = st.integers(0, 40)
RANKS = st.integers(1, 7)


@given(NUMBERS, RANKS, st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 45))
def test_each_mode_has_the_lengths_and_the_samples_that_it_promises(n, ranks, epoch, seed, shuffle, start):
    order = np.random.default_rng((seed, epoch)).permutation(n).tolist() if shuffle else list(range(n))
    rest = max(n - start, 0)
    for uneven, total in (("keep", rest), ("pad", -(-rest // ranks) * ranks), ("drop", rest // ranks * ranks)):
        shares = [mp.shard_indices(n, place, epoch, seed, uneven, shuffle, start=start) for place in places(ranks)]
        assert {share.dtype for share in shares} == {np.dtype(np.int64)}
        assert [len(share) for share in shares] == [len(range(rank, total, ranks)) for rank in range(ranks)]
        assert in_turn(shares) == (order * (ranks + 1))[start : start + total]


@given(NUMBERS, st.lists(st.tuples(RANKS, st.integers(0, 4)), max_size=4), RANKS, st.integers(1, 5))
def test_an_epoch_goes_on_on_any_number_of_ranks_with_the_samples_that_are_left(n, stops, ranks, batch_size):
    used: list[int] = []
    state = mp.Sampler(n, Place(0, 1), 1, seed=5).state()
    for world_size, batches in [*stops, (ranks, n + 1)]:
        samplers = [mp.Sampler(n, place, batch_size, seed=5) for place in places(world_size)]
        for sampler in samplers:
            sampler.load_state(state)
        # All ranks are given batches alike: `strict` finds one that has fewer.
        steps = zip(*(sampler.epoch(0) for sampler in samplers), strict=True)
        for _, step in zip(range(batches), steps, strict=False):
            assert all(len(batch) <= batch_size for batch in step)
            used += in_turn(step)
        states = [sampler.state() for sampler in samplers]
        assert states == [states[0]] * world_size
        assert states[0]["start"] == len(used)
        state = states[0]
    assert used == np.random.default_rng((5, 0)).permutation(n).tolist()


@given(NUMBERS, RANKS, st.integers(1, 5), st.sampled_from(["keep", "pad", "drop"]))
def test_every_rank_has_as_many_batches_and_together_they_are_its_share(n, ranks, batch_size, uneven):
    for place in places(ranks):
        sampler = mp.Sampler(n, place, batch_size, seed=1, uneven=uneven)
        batches = list(sampler.epoch(2))
        assert len(batches) == len(sampler) == len(mp.Sampler(n, Place(0, ranks), batch_size, uneven=uneven))
        assert [i for batch in batches for i in batch] == mp.shard_indices(n, place, 2, 1, uneven).tolist()
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert n == 0 or not batches or sampler.state() == {"epoch": 2, "start": n, "n": n, "seed": 1, "shuffle": 1}


def test_a_state_that_was_loaded_counts_once_and_only_for_its_epoch():
    one = mp.Sampler(10, Place(0, 2), 2)
    next(one.epoch(3))
    other = mp.Sampler(10, Place(0, 2), 2)
    other.load_state(one.state())
    assert other.epoch_number == 3
    assert [len(list(other.epoch(number))) for number in (3, 3)] == [2, 3]
    other.load_state(one.state())
    assert [len(list(other.epoch(number))) for number in (4, 3)] == [3, 3]
    assert len(list(other.epoch(3, start=9))) == 1


@pytest.mark.parametrize("changed", [{"n": 11}, {"seed": 1}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused(changed):
    state = mp.Sampler(10, Place(0, 1), 2).state()
    (name,) = changed
    with pytest.raises(UsageError, match=f"with {name}="):
        mp.Sampler(**({"n": 10, "group": Place(0, 1), "batch_size": 2} | changed)).load_state(state)
    del state[name]
    with pytest.raises(UsageError, match=f"has no {name}"):
        mp.Sampler(10, Place(0, 1), 2).load_state(state)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"n": -1}, "n must be a whole number from 0 on, below 2.*63, not -1"),
        ({"n": 2.5}, "n must be"),
        ({"seed": -1}, "seed must be"),
        ({"uneven": "wrap"}, "must be one of 'keep', 'pad', 'drop', not 'wrap'"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1 on"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        mp.Sampler(**({"n": 3, "group": Place(0, 1), "batch_size": 1} | wrong))
    with pytest.raises(UsageError, match="epoch must be"):
        mp.shard_indices(3, Place(0, 1), -1)


# Batches that are taken before they are used


def ahead_of(batches, ahead):
    """Yield batches as a loader does that takes some in advance."""
    queue = deque()
    for batch in batches:
        queue.append(batch)
        if len(queue) > ahead:
            yield queue.popleft()
    yield from queue


@pytest.mark.parametrize("ahead", [0, 1, 4, 100])
def test_the_state_within_following_is_that_of_the_batches_that_came_out(ahead):
    used = []
    samplers = [mp.Sampler(50, Place(rank, 2), 4, seed=3) for rank in range(2)]
    for sampler in samplers:
        for number, batch in enumerate(sampler.following(ahead_of(sampler.epoch(0), ahead))):
            used += batch.tolist()
            if number == 2:
                state = sampler.state()
                break
        assert (sampler.epoch_number, sampler.start) == (0, 24)
    for rank in range(3):  # goes on on three ranks
        again = mp.Sampler(50, Place(rank, 3), 5, seed=3)
        again.load_state(state)
        used += [i for batch in again.following(ahead_of(again.epoch(0), ahead)) for i in batch.tolist()]
        assert int(again.state()["start"]) == 50
    assert sorted(used) == list(range(50))


def test_following_goes_through_several_epochs():
    sampler = mp.Sampler(20, Place(0, 1), 4)
    seen = [
        (int(sampler.state()["epoch"]), int(sampler.state()["start"]))
        for epoch in range(2)
        for _ in sampler.following(ahead_of(sampler.epoch(epoch), 2))
    ]
    assert seen == [(epoch, start) for epoch in range(2) for start in (4, 8, 12, 16, 20)]


def test_what_following_cannot_count_is_refused():
    sampler = mp.Sampler(40, Place(0, 1), 4)
    loader = ahead_of(sampler.epoch(0), 2)
    next(loader)
    with pytest.raises(UsageError, match="has taken batches before following"):
        list(sampler.following(loader))
    with pytest.raises(UsageError, match="not taken from this sampler within following"):
        list(sampler.following([1, 2]))
    one = sampler.following(loader := ahead_of(sampler.epoch(0), 2))
    next(one)
    with pytest.raises(UsageError, match="another following"):
        next(sampler.following([]))
    one.close()
    assert int(sampler.state()["start"]) == 4
    next(loader)
    with pytest.raises(UsageError, match=r"the loop of following\(\) was left, but its loader continues"):
        sampler.state()


def test_another_epoch_within_following_is_refused_until_the_first_has_no_more():
    sampler = mp.Sampler(12, Place(0, 1), 4)
    loop = sampler.following(ahead_of(sampler.epoch(0), 1))
    next(loop)
    with pytest.raises(UsageError, match=r"still uses the batches of another epoch\(\).*leave it first"):
        next(sampler.epoch(1))
    next(loop)
    assert (int(sampler.state()["epoch"]), int(sampler.state()["start"])) == (0, 8)
    loop.close()
    next(sampler.epoch(1))
    assert (int(sampler.state()["epoch"]), int(sampler.state()["start"])) == (1, 4)
    both = chain.from_iterable(sampler.epoch(epoch) for epoch in range(2))
    places = [(sampler.epoch_number, int(sampler.state()["start"])) for _ in sampler.following(ahead_of(both, 2))]
    assert places == [(epoch, start) for epoch in range(2) for start in (4, 8, 12)]


def test_the_state_is_known_everywhere_when_following_is_over_in_another_thread():
    sampler = mp.Sampler(40, Place(0, 1), 4)
    loop = sampler.following(ahead_of(sampler.epoch(0), 2))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(next, loop).result()
        with pytest.raises(UsageError, match="another thread has taken the last batch"):
            sampler.state()
        pool.submit(next, loop).result()
        pool.submit(loop.close).result()
        assert int(sampler.state()["start"]) == 8
        pool.submit(lambda: list(sampler.following(ahead_of(sampler.epoch(1), 2)))).result()
    assert (int(sampler.state()["epoch"]), int(sampler.state()["start"])) == (1, 40)


def test_a_state_after_batches_were_taken_in_another_thread_is_refused():
    sampler = mp.Sampler(40, Place(0, 1), 4)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: list(sampler.epoch(0))).result()
    with pytest.raises(UsageError, match=r"another thread has taken the last batch.*sampler.following\(loader\)"):
        sampler.state()
    sampler.load_state(mp.Sampler(40, Place(0, 1), 4).state())
    assert int(sampler.state()["start"]) == 0


@pytest.mark.peers
@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # of jax, if a test before has loaded it
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_of_torch_with_workers_needs_following(workers):
    from torch.utils.data import DataLoader

    sampler = mp.Sampler(96, Place(0, 1), 4, seed=1)

    def loader():
        return DataLoader(range(96), batch_sampler=(batch for batch in sampler.epoch(0)), num_workers=workers)

    seen = []
    for number, batch in enumerate(sampler.following(loader())):
        seen += batch.tolist()
        if number == 2:
            break
    state = sampler.state()
    assert int(state["start"]) == 12
    again = mp.Sampler(96, Place(0, 1), 4, seed=1)
    again.load_state(state)
    assert sorted(seen + [i for batch in again.epoch(0) for i in batch.tolist()]) == list(range(96))
    for _ in loader():
        if workers:
            with pytest.raises(UsageError, match="a DataLoader with num_workers=2 has taken them"):
                sampler.state()
        else:
            assert int(sampler.state()["start"]) == 4
        break
