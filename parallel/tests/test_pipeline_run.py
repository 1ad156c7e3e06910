"""Pipelines carried out: the gradients of one process, bit for bit; memory, time and failures as the plan says."""

from __future__ import annotations

import gc
import weakref
from fractions import Fraction

import numpy as np
import pytest
from support.waiting import until
from support.worlds import must, thread_world

import oneaccord_parallel as mp
from oneaccord.errors import (
    AbortedError,
    InvalidWorldSizeError,
    PeerLostError,
    SizeMismatchError,
    UsageError,
)
from oneaccord_simulated import Kill, explore, run

F, B = "forward", "backward"
V_SHAPED = mp.Plan(  # the first rank has the first and the last layer
    "v-shaped",
    2,
    [
        [(F, 0, 0), (F, 1, 0), (F, 0, 3), (B, 0, 3), (B, 0, 0), (F, 1, 3), (B, 1, 3), (B, 1, 0)],
        [(F, 0, 1), (F, 0, 2), (F, 1, 1), (F, 1, 2), (B, 0, 2), (B, 0, 1), (B, 1, 2), (B, 1, 1)],
    ],
    [0, 1, 1, 0],
)
CROSSED = mp.Plan(  # the second rank takes the microbatches in another order than they come
    "crossed",
    3,
    [
        [(F, m, s) for s in (0, 1) for m in range(3)] + [(B, m, s) for s in (1, 0) for m in range(3)],
        [(F, m, s) for s in (2, 3) for m in (2, 0, 1)] + [(B, m, s) for s in (3, 2) for m in range(3)],
    ],
    [0, 0, 1, 1],
)
PLANS = {
    "gpipe": mp.schedule("gpipe", 4, 8),
    "1f1b": mp.schedule("1f1b", 4, 8),
    "interleaved_1f1b": mp.schedule("interleaved_1f1b", 2, 8, 2),
    "zb_h1": mp.schedule("zb_h1", 4, 8),
}
BATCH, WIDTH = 24, 3
RNG = np.random.default_rng(16)
X, Y = RNG.standard_normal((2, BATCH, WIDTH)).astype(np.float32)
WEIGHTS = RNG.standard_normal((4, WIDTH, WIDTH)).astype(np.float32)


class Saved:
    """What a forward pass saves; it can be counted."""

    def __init__(self, *parts):
        self.parts = parts


def layer(number, saved=None, give=lambda array: array):
    """Return the functions of a layer: tanh(x @ w)."""
    w = give(WEIGHTS[number])

    def forward(x):
        y = np.tanh(x @ w)
        kept = Saved(x, y)
        if saved is not None:
            saved.add(kept)
        return y, kept

    def backward_input(kept, dy):
        x, y = kept.parts
        before = dy * (1 - y * y)
        return before @ w.T, Saved(x, before)

    def backward_weight(kept):
        x, before = kept.parts
        return {"w": x.T @ before}

    return forward, backward_input, backward_weight


def mean_square(output, target):
    difference = output - target
    return (difference.astype(np.float64) ** 2).mean(), 2 * difference / difference.size


def alone(microbatches):
    """Return what one process computes from one microbatch after the other."""
    layers = [layer(number) for number in range(len(WEIGHTS))]
    total, sums = 0.0, [np.zeros_like(w) for w in WEIGHTS]
    for x, y in zip(np.split(X, microbatches), np.split(Y, microbatches), strict=True):
        kept = []
        output = x
        for forward, *_ in layers:
            output, saved = forward(output)
            kept.append(saved)
        value, dy = mean_square(output, y)
        total += float(value)
        for number in reversed(range(len(layers))):
            dy, rest = layers[number][1](kept[number], dy)
            sums[number] += layers[number][2](rest)["w"]
    return total / microbatches, [each / microbatches for each in sums]


def train(group, plan, steps=1, give=lambda array: array):
    stages = [mp.Stage(*layer(number, give=give)) for number in plan.stages_of(group.rank)]
    pipeline = mp.Pipeline(group, stages, plan)
    first, last = group.rank == plan.placement[0], group.rank == plan.placement[-1]
    for _ in range(steps):
        loss, gradients = pipeline.step(
            give(X) if first else None, give(Y) if last else None, loss=mean_square if last else None
        )
    return loss, {number: each["w"] for number, each in zip(plan.stages_of(group.rank), gradients, strict=True)}


def check_as_alone(results, microbatches):
    loss, gradients = alone(microbatches)
    assert [each for each, _ in results] == [loss] * len(results)
    found = {number: w for _, each in results for number, w in each.items()}
    assert len(found) == len(gradients)
    for number, expected in enumerate(gradients):
        assert found[number].dtype == expected.dtype
        assert found[number].tobytes() == expected.tobytes()


@pytest.mark.parametrize("plan", [*PLANS.values(), V_SHAPED, CROSSED], ids=[*PLANS, "v-shaped", "crossed"])
@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_loss_and_gradients_are_those_of_one_process_bit_for_bit(plan, backend, library):
    def program(group):
        return library.take(train(group, plan, 2, library.give))

    check_as_alone(must(thread_world(program, plan.stages, backend)), plan.microbatches)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_order_of_events_changes_anything(plan):
    explore(lambda group: train(group, plan), plan.stages, seeds=range(3), alike=True).raise_failure()


@pytest.mark.parametrize("plan", [*PLANS.values(), mp.schedule("1f1b", 4, 2)], ids=[*PLANS, "short"])
def test_a_step_takes_the_time_of_the_timeline(plan):
    forward, inputs, weight = 0.5, 0.75, 0.25  # exact as floats

    def body(group):
        def computing(number):
            first, second, third = layer(number)

            def timed(function, seconds):
                def call(*arguments):
                    group.compute(seconds)
                    return function(*arguments)

                return call

            return mp.Stage(timed(first, forward), timed(second, inputs), timed(third, weight))

        pipeline = mp.Pipeline(group, [computing(number) for number in plan.stages_of(group.rank)], plan)
        pipeline.step(X, Y, loss=mean_square)

    duration = run(body, plan.stages).duration_s
    assert Fraction(duration) == plan.timeline(forward, inputs + weight, weight).makespan


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_saved_activations_are_freed_when_the_plan_says_so(plan):
    """The scheduler of a simulated world may look at a rank's frames, which holds what they refer to for a moment longer."""

    def body(group):
        alive, most, promised = weakref.WeakSet(), 0, plan.peak()[group.rank]

        def watched(number):
            first, second, third = layer(number, alive)

            def forward(x):
                nonlocal most
                result = first(x)
                until(lambda: len(alive) <= promised, "activations to be freed")
                most = max(most, len(alive))
                return result

            def backward(kept, dy):
                dx, rest = second(kept, dy)
                alive.add(rest)  # it counts until the weights' gradient is made
                return dx, rest

            return mp.Stage(forward, backward, third)

        pipeline = mp.Pipeline(group, [watched(number) for number in plan.stages_of(group.rank)], plan)
        pipeline.step(X, Y, loss=mean_square)
        until(lambda: not alive, "all activations to be freed")
        return most, pipeline.most_held, pipeline.held

    gc.disable()  # what is freed is freed at once
    try:
        results = must(thread_world(body, plan.stages, "simulated"))
    finally:
        gc.enable()
    assert results == [(peak, peak, 0) for peak in plan.peak()]


def test_shapes_dtypes_and_tuples_come_with_the_message():
    plan = mp.schedule("1f1b", 3, 4)

    def body(group):
        seen = []

        def first(x):
            # A different number of rows each time, and a mask that has no gradient.
            x = x[: int(x[0, 0]) + 1]
            return (x.astype(np.float64) * 2, x > 1), x

        def middle(both):
            seen.append((both[0].shape, both[0].dtype, both[1].dtype))
            return (both[0] + 1, both[1]), None

        def first_back(x, dy):
            assert dy[1] is None
            seen.append((dy[0].shape, float(dy[0].sum())))
            return None, {"n": np.ones(())}

        def last(both):
            return both[0][both[1]], both

        def last_back(both, dy):
            dx = np.zeros_like(both[0])
            dx[both[1]] = dy
            return (dx, None), {}

        stage = [mp.Stage(first, first_back), mp.Stage(middle, lambda _, dy: (dy, None)), mp.Stage(last, last_back)][group.rank]
        batch = np.repeat(np.arange(4, dtype=np.float32), 5)[:, None] * np.ones(
            2, np.float32
        )  # five rows of the microbatch's number
        loss, grads = mp.Pipeline(group, [stage], plan, reduction="sum").step(
            batch, loss=lambda out, _: (out.sum(), np.ones_like(out))
        )
        return loss, grads, seen

    results = must(thread_world(body, 3, "simulated"))
    assert [loss for loss, *_ in results] == [3 * 2 * 5 + 4 * 2 * 7] * 3
    assert [shape for shape, *_ in results[1][2]] == [(1, 2), (2, 2), (3, 2), (4, 2)]
    assert {(kind, mask) for _, kind, mask in results[1][2]} == {(np.dtype("f8"), np.dtype("?"))}
    assert results[0][2] == [((1, 2), 0), ((2, 2), 0), ((3, 2), 6), ((4, 2), 8)]
    assert results[0][1] == [{"n": 4.0}]
    assert results[1][1] == [None]


@pytest.mark.parametrize(
    ("x", "y", "loss", "own", "error", "said"),
    [
        (X[:20], Y, mean_square, 0, SizeMismatchError, r"x has the shape \(20, 3\), and is divided .* into 8 microbatches"),
        (X, {"a": Y, "b": Y[:3]}, mean_square, 3, SizeMismatchError, r"y \(b\) has the shape \(3, 3\)"),
        (None, Y, mean_square, 0, UsageError, "needs the batch"),
        (X, Y, None, 3, UsageError, "needs a loss"),
        (1.5, Y, mean_square, 0, SizeMismatchError, "shape"),
    ],
)
def test_an_impossible_step_is_refused_on_every_rank_and_the_next_one_works(x, y, loss, own, error, said):
    plan = PLANS["1f1b"]

    def body(group):
        pipeline = mp.Pipeline(group, [mp.Stage(*layer(group.rank))], plan)
        with pytest.raises(error if group.rank == own else UsageError, match=said) as caught:
            pipeline.step(x, y, loss=loss)
        assert (group.rank == own) != str(caught.value).startswith(f"rank {own}: ")
        return pipeline.step(X, Y, loss=mean_square)[0]

    assert must(thread_world(body, 4, "simulated")) == [alone(8)[0]] * 4


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda rank: (mp.schedule("1f1b" if rank < 2 else "gpipe", 4, 8), 1),
            UsageError,
            "rank 0 has 1f1b: .*, and rank 2 has gpipe: ",
        ),
        (lambda rank: (mp.schedule("1f1b", 4, 8 + rank // 3), 1), UsageError, "rank 3 has 1f1b: 4 stages, 9 microbatches"),
        (lambda rank: (PLANS["1f1b"], 1 + (rank == 1)), UsageError, r"rank 1 of 1f1b.* has 1 stages, \[1\], but a list of 2"),
        (lambda rank: (mp.schedule("1f1b", 3, 8), 1), InvalidWorldSizeError, "for 3 ranks"),
        (lambda rank: (mp.Plan("odd", 8, [[]] * 4), 1), mp.MissingActionError, "rank 0 never does the forward"),
        (lambda rank: ("1f1b", 1), UsageError, "not a str"),
        (lambda rank: (PLANS["1f1b"], None), UsageError, "not a Stage"),
    ],
)
def test_ranks_whose_plans_or_stages_do_not_fit_learn_it_before_anything_moves(make, error, said):
    def body(group):
        plan, count = make(group.rank)
        with pytest.raises(error, match=said):
            mp.Pipeline(group, mp.Stage(*layer(0)) if count is None else [mp.Stage(*layer(0))] * count, plan)
        return int(group.all_reduce(1))

    assert must(thread_world(body, 4, "simulated")) == [4] * 4


def test_ranks_that_reduce_in_different_ways_learn_it():
    def body(group):
        with pytest.raises(
            UsageError, match=r"rank 0 has gpipe: .*, reduction='sum', and rank 1 has gpipe: .*, reduction='mean'"
        ):
            mp.Pipeline(group, [mp.Stage(*layer(0))], mp.schedule("gpipe", 2, 2), reduction="mean" if group.rank else "sum")
        return int(group.all_reduce(1))

    assert must(thread_world(body, 2, "simulated")) == [2] * 2


def test_a_divided_plan_needs_stages_that_can_be_divided():
    def body(group):
        forward, backward, weight = layer(0)
        stage = mp.Stage(forward, backward, weight if group.rank else None)
        with pytest.raises(UsageError, match="stage 0 has no backward_weight"):
            mp.Pipeline(group, [stage], mp.schedule("zb_h1", 2, 2))

    must(thread_world(body, 2, "simulated"))


def test_an_error_in_a_stage_says_where_and_the_others_learn_who():
    def body(group):
        forward, *back = layer(group.rank)
        calls = []

        def breaks(x):
            calls.append(x)
            if group.rank == 2 and len(calls) == 3:
                raise ZeroDivisionError("no")
            return forward(x)

        mp.Pipeline(group, [mp.Stage(breaks, *back)], PLANS["1f1b"]).step(X, Y, loss=mean_square)

    outcomes = thread_world(body, 4, "simulated")
    assert isinstance(outcomes[2], ZeroDivisionError)
    assert "raised in the forward of microbatch 2 in stage 2, on rank 2" in outcomes[2].__notes__
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank], AbortedError)
        assert outcomes[rank].peer == 2


def test_a_step_that_was_left_by_an_error_frees_what_it_has_saved_and_is_the_last():
    def body(group):
        alive = weakref.WeakSet()
        forward, backward, weight = layer(0, alive)
        calls = []

        def breaks(kept, dy):
            calls.append(None)
            if len(calls) == 2:
                raise ZeroDivisionError("no")
            return backward(kept, dy)

        pipeline = mp.Pipeline(group, [mp.Stage(forward, breaks, weight)], mp.schedule("gpipe", 1, 8))
        with pytest.raises(ZeroDivisionError) as caught:
            pipeline.step(X, Y, loss=mean_square)
        until(lambda: len(alive) == 1, "all to be freed but what the error keeps: that of the pass that raised it")
        with pytest.raises(UsageError, match=r"cannot continue, because an error ended a step \(ZeroDivisionError: no\)"):
            pipeline.step(X, Y, loss=mean_square)
        del caught
        return pipeline.held

    assert must(thread_world(body, 1, "simulated")) == [0]


@pytest.mark.parametrize("at_s", [0.5, 3.5, 7.25])
def test_a_rank_that_dies_in_the_middle_is_named(at_s):
    def body(group):
        forward, *back = layer(group.rank)

        def slow(x):
            group.compute(1)
            return forward(x)

        mp.Pipeline(group, [mp.Stage(slow, *back)], PLANS["1f1b"]).step(X, Y, loss=mean_square)

    done = run(body, 4, faults=Kill(rank=1, at_s=at_s), check=False)
    assert {rank: (type(error), error.peer) for rank, error in done.errors.items()} == dict.fromkeys(
        (0, 2, 3), (PeerLostError, 1)
    )


@pytest.mark.parametrize(
    ("stage", "error", "said"),
    [
        (lambda f, b, w: (lambda x: f(x)[0], b, w), UsageError, r"forward returned a ndarray; expected a tuple \(y, saved\)"),
        (lambda f, b, w: (f, lambda s, dy: dy, w), UsageError, r"backward returned a ndarray"),
        (
            lambda f, b, w: (f, lambda s, dy: ((dy, dy), b(s, dy)[1]), w),
            UsageError,
            "returned a gradient of 2 arrays, and its forward got 1",
        ),
    ],
)
def test_functions_that_return_something_else_are_told_what_is_expected(stage, error, said):
    def body(group):
        mp.Pipeline(group, [mp.Stage(*stage(*layer(group.rank)))], mp.schedule("1f1b", 2, 8)).step(X, Y, loss=mean_square)

    outcomes = thread_world(body, 2, "simulated")
    with pytest.raises(error, match=said):
        must(outcomes)


@pytest.mark.parametrize("value", [1j, "much", None, np.ones(2)])
def test_a_loss_is_a_number(value):
    def body(group):
        mp.Pipeline(group, [mp.Stage(*layer(0))], mp.schedule("1f1b", 1, 8)).step(X, Y, loss=lambda out, _: (value, out))

    with pytest.raises(UsageError, match="expected a number and a gradient"):
        must(thread_world(body, 1, "simulated"))


def test_a_stage_whose_activations_or_gradients_change_their_kind_is_refused():
    def body(group, change):
        calls = []

        def forward(x):
            calls.append(x)
            return ((x,) if change == "tuple" and len(calls) == 2 and group.rank == 0 else x), None

        def backward(saved, dy):
            grads = {
                "w": np.ones(
                    2 if change == "shape" and len(calls) == 2 else 1, "f8" if change == "dtype" and len(calls) == 2 else "f4"
                )
            }
            return dy, {"v" if change == "name" and len(calls) == 2 else "w": grads["w"]}

        mp.Pipeline(group, [mp.Stage(forward, backward)], mp.schedule("1f1b", 2, 8)).step(X, Y, loss=mean_square)

    for change, said in {
        "tuple": "a tuple of 1 arrays",
        "shape": r"has the shape \(",
        "dtype": "is of float",
        "name": "'v', 'w' is not in",
    }.items():
        with pytest.raises(UsageError, match=said):
            must(thread_world(lambda group, change=change: body(group, change), 2, "simulated"))


def test_a_stage_may_give_the_same_array_of_gradients_each_time():
    def body(group):
        gradient = np.zeros(1)

        def backward(x, dy):
            gradient[...] = len(x)
            return dy, {"w": gradient}

        stage = mp.Stage(lambda x: (x, x), backward)
        plan = mp.schedule("1f1b", 2, 8)
        return mp.Pipeline(group, [stage], plan, reduction="sum").step(X, Y, loss=mean_square)[1][0]["w"], gradient

    for total, own in must(thread_world(body, 2, "simulated")):
        assert (total, own) == (BATCH, BATCH // 8)


def test_the_gradient_of_a_number_is_an_array():
    def body(group):
        stage = mp.Stage(lambda x: (x, x), lambda x, dy: (dy, {"scale": (x * dy).sum()}))
        return mp.Pipeline(group, [stage], mp.schedule("gpipe", 1, 8)).step(X, Y, loss=mean_square)[1][0]["scale"]

    (scale,) = must(thread_world(body, 1, "simulated"))
    assert (type(scale), scale.shape, scale.dtype) == (np.ndarray, (), np.float32)


@pytest.mark.parametrize("plan", [*PLANS.values(), V_SHAPED, CROSSED], ids=[*PLANS, "v-shaped", "crossed"])
def test_an_evaluation_is_the_forward_pass_alone(plan):
    def program(group):
        stages = [mp.Stage(*layer(number)) for number in plan.stages_of(group.rank)]
        pipeline = mp.Pipeline(group, stages, plan)
        first, last = group.rank == plan.placement[0], group.rank == plan.placement[-1]
        x, y = X if first else None, Y if last else None
        before = pipeline.step(x, y, loss=mean_square if last else None)[0]
        nothing, outputs = pipeline.eval(x)
        loss, again = pipeline.eval(x, y, loss=mean_square if last else None)
        assert before == loss == pipeline.step(x, y, loss=mean_square if last else None)[0]
        assert (nothing, pipeline.held, outputs is None, again is None) == (None, 0, not last, not last)
        return loss, [each.tobytes() for each in outputs] if last else None

    results = run(program, plan.stages).results
    expected = X
    for w in WEIGHTS:
        expected = np.concatenate([np.tanh(part @ w) for part in np.split(expected, plan.microbatches)])
    assert [loss for loss, _ in results] == [alone(plan.microbatches)[0]] * plan.stages
    assert results[plan.placement[-1]][1] == [part.tobytes() for part in np.split(expected, plan.microbatches)]


def test_an_evaluation_takes_any_metric():
    plan = mp.schedule("1f1b", 2, 2)

    def program(group):
        pipeline = mp.Pipeline(group, [mp.Stage(lambda x: (x + 1, None), lambda _, dy: (dy, {}))], plan)
        metrics = [lambda *_: 0.25, lambda out, y: (out == y).sum(), lambda *_: (np.float32(0.5), None), lambda *_: True]
        x, y = np.arange(4.0), np.array([2.0, 3.0, 0.0, 5.0])
        return [pipeline.eval(x, y, loss=metric)[0] for metric in metrics]

    assert run(program, 2).results == [[0.25, 1.5, 0.5, 1.0]] * 2


@pytest.mark.parametrize("value", [1j, "much", None, np.ones(2)])
def test_the_loss_of_an_evaluation_is_a_number(value):
    def body(group):
        mp.Pipeline(group, [mp.Stage(*layer(0))], mp.schedule("1f1b", 1, 8)).eval(X, Y, loss=lambda *_: value)

    with pytest.raises(UsageError, match=r"loss returned .*; expected a number"):
        must(thread_world(body, 1, "simulated"))


def test_a_step_on_one_rank_and_an_evaluation_on_another_are_refused_on_both():
    plan = mp.schedule("gpipe", 2, 2)

    def program(group):
        pipeline = mp.Pipeline(group, [mp.Stage(*layer(group.rank))], plan)
        with pytest.raises(UsageError, match="every rank must make the same call"):
            pipeline.step(X) if group.rank == 0 else pipeline.eval()
        with pytest.raises(UsageError, match=r"the rank of the first stage needs the batch: eval\(x\)"):
            pipeline.eval()
        return pipeline.eval(X)[1] is not None

    assert run(program, 2).results == [False, True]


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 20_000.0), ("sum", np.inf)])
def test_16_bit_gradients_of_microbatches_are_summed_in_float32(reduction, expected):
    stage = mp.Stage(lambda x: (x, None), lambda _, dy: (None, {"w": np.full(2, 20_000, np.float16)}))

    def program(group):
        pipeline = mp.Pipeline(group, [stage], mp.schedule("gpipe", 1, 4), reduction=reduction)
        _, (gradients,) = pipeline.step(np.ones((4, 1)), loss=lambda y, _: (0.0, y))
        return gradients["w"].dtype.name, gradients["w"].tolist()

    assert run(program, 1).results == [("float16", [expected] * 2)]


def test_a_pipeline_needs_a_group():
    with pytest.raises(UsageError, match="expected a Group"):
        mp.Pipeline(None, [], mp.schedule("1f1b", 1, 1))


def test_a_stage_is_made_of_functions():
    with pytest.raises(UsageError, match="backward is a function of a stage, and 3 cannot be called"):
        mp.Stage(lambda x: x, 3)
