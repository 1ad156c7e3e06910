"""Collectives with gradients, and the refusal of tensors that require grad elsewhere. `make test-peers` runs it."""

from __future__ import annotations

import weakref

import pytest

import oneaccord_parallel as mp
from oneaccord.errors import UsageError
from oneaccord_parallel.torch import functional

pytestmark = pytest.mark.peers

COUNTS = (1, 3, 0)


def inputs():
    """This and the results below: for three ranks."""
    import torch

    return [torch.arange(6.0, dtype=torch.float64) * (rank + 1) + rank for rank in range(3)]


CASES = {
    "sum": (functional.all_reduce, lambda xs: [sum(xs)] * 3, (6, 6, 6)),
    "mean": (lambda x, g: functional.all_reduce(x, g, "mean"), lambda xs: [sum(xs) / 3] * 3, (6, 6, 6)),
    "number": (lambda x, g: functional.all_gather(x.sum(), g), lambda xs: [stack([x.sum() for x in xs])] * 3, (6, 6, 6)),
    "gather": (lambda x, g: functional.all_gather(x.reshape(2, 3), g), lambda xs: [join(xs).reshape(6, 3)] * 3, (6, 6, 6)),
    "gather by counts": (lambda x, g: functional.all_gather(x, g, counts=COUNTS), lambda xs: [join(xs)] * 3, COUNTS),
    "gather uneven": (lambda x, g: functional.all_gather(x, g, uneven=True), lambda xs: [join(xs)] * 3, COUNTS),
    "scatter": (functional.reduce_scatter, lambda xs: list(sum(xs).split(2)), (6, 6, 6)),
    "scatter mean": (
        lambda x, g: functional.reduce_scatter(x, g, "mean", counts=(1, 3, 2)),
        lambda xs: list((sum(xs) / 3).split((1, 3, 2))),
        (6, 6, 6),
    ),
    "exchange": (
        functional.all_to_all,
        lambda xs: [join([x[2 * r : 2 * r + 2] for x in xs]) for r in range(3)],
        (6, 6, 6),
    ),
    "exchange by counts": (
        lambda x, g: functional.all_to_all(x, g, send_counts=(1, 3, 2)),
        lambda xs: [join([x.split((1, 3, 2))[r] for x in xs]) for r in range(3)],
        (6, 6, 6),
    ),
    "broadcast": (lambda x, g: functional.broadcast(x, g, 1), lambda xs: [xs[1] * 1] * 3, (6, 6, 6)),
}


def join(tensors):
    import torch

    return torch.cat(tensors)


def stack(tensors):
    import torch

    return torch.stack(tensors)


def losses(results, xs):
    """Losses that differ between the ranks, and whose second derivatives are not constant."""
    return [((rank + 1) * y**3).sum() + (x**2).sum() for rank, (y, x) in enumerate(zip(results, xs, strict=True))]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(world, case):
    import torch

    call, alone, sizes = CASES[case]

    def program(group):
        x = inputs()[group.rank][: sizes[group.rank]].clone().requires_grad_()
        y = call(x, group)
        assert y.grad_fn is not None
        loss = ((group.rank + 1) * y**3).sum() + (x**2).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        return y.detach(), first.detach(), second

    xs = [x[:size].clone().requires_grad_() for x, size in zip(inputs(), sizes, strict=True)]
    results = alone(xs)
    firsts = torch.autograd.grad(sum(losses(results, xs)), xs, create_graph=True)
    seconds = torch.autograd.grad(sum((each**2).sum() for each in firsts), xs)
    for found, *wanted in zip(world(3).run(program).results, results, firsts, seconds, strict=True):
        for mine, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, right.detach())


@pytest.mark.parametrize(
    ("call", "first", "second"),
    [
        (functional.all_reduce, (8, 8), (8, 8)),
        (functional.all_gather, (4, 4), (4, 4)),
        (functional.reduce_scatter, (4, 4), (4, 4)),
        (lambda x, g, **options: functional.reduce_scatter(x, g, "mean", **options), (1, 1), (1, 1)),
        (functional.broadcast, (4, 0), (4, 0)),
    ],
)
def test_options_are_those_of_the_backward_pass_as_well(world, call, first, second):
    def program(group):
        import torch

        x = torch.arange(4.0, requires_grad=True)
        y = call(x, group, reproducible=False, timeout_s=9)
        (once,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        return once.tolist(), torch.autograd.grad(once.sum(), x)[0].tolist()

    wanted = [([one * i for i in range(4)], [two] * 4) for one, two in zip(first, second, strict=True)]
    assert world(2).run(program).results == wanted


def test_a_result_does_not_keep_what_it_was_made_of(world):
    def program(group):
        import torch

        leaf = torch.zeros(4, requires_grad=True)
        kept = {}
        for call in (functional.all_reduce, functional.all_gather, functional.reduce_scatter, functional.broadcast):
            x = leaf * 1
            there = weakref.ref(x)
            y = call(x, group)
            del x
            kept[call.__name__] = there() is not None
            y.sum().backward()
        return kept

    for kept in world(2).run(program).results:
        assert kept == dict.fromkeys(["all_reduce", "all_gather", "reduce_scatter", "broadcast"], False)


def test_what_has_no_gradient_is_refused(world):
    def program(group):
        import torch

        x = torch.ones(2, requires_grad=True)
        for call in (functional.all_reduce, functional.reduce_scatter):
            with pytest.raises(UsageError, match="op='sum' and op='mean', not for 'max'"):
                call(x, group, "max")
        assert mp.torch.functional is functional
        assert not functional.all_reduce(x.detach(), group).requires_grad

    world(2).run(program)


def test_the_collectives_of_a_group_refuse_tensors_that_require_grad(world):
    def program(group):
        import torch

        x, plain, peer = torch.ones(4, requires_grad=True), torch.ones(4), (group.rank + 1) % 2
        calls = [
            group.all_reduce, group.all_gather, group.reduce_scatter, group.broadcast, group.reduce, group.gather, group.all_to_all,
            group.scan, group.exscan, group.all_reduce_async, group.all_gather_async, group.reduce_scatter_async, group.broadcast_async,
            group.all_to_all_async,
            lambda x: group.scatter(x, group.rank), lambda x: group.all_gather(x, uneven=True), lambda x: group.send(x, peer),
            lambda x: group.send_async(x, peer), lambda x: group.sendrecv(x, peer, peer), lambda x: group.recv(peer, out=x),
            lambda x: group.all_reduce(plain, out=x), lambda x: group.all_reduce_async(plain, out=x),
        ]  # fmt: skip
        for tensor in (x, x * 2):
            for call in calls:
                with pytest.raises(UsageError, match=r"requires a gradient.*x\.detach\(\).*mp\.torch\.functional"):
                    call(tensor)
        with torch.no_grad():
            assert group.all_reduce(x).tolist() == [2.0] * 4
            assert group.all_gather_async(x, uneven=True).wait().tolist() == [1.0] * 8
            group.broadcast(x, out=x)
        assert group.all_reduce(x.detach(), out=x.detach()).tolist() == [2.0] * 4
        assert x.requires_grad

    world(2).run(program)


def test_layers_without_autograd_refuse_what_would_lose_its_gradient(world):
    def program(group):
        import torch

        import oneaccord as oa

        mesh, ids = oa.DeviceMesh(group, (2,), ("tp",)), torch.tensor([0, 1])
        leaf = torch.ones(2, 2, requires_grad=True)
        layers = [
            mp.copy_to, mp.reduce_from, mp.gather_from, mp.scatter_to, mp.gather_sequence, mp.reduce_scatter_sequence,
            lambda x, group: mp.column_linear(x, torch.ones(2, 2), None, group),
            lambda x, group: mp.row_linear(torch.ones(2, 2), x, None, group),
            lambda x, group: mp.vocab_parallel_embedding(ids, x, group),
            lambda x, group: mp.vocab_parallel_cross_entropy(x, ids, group),
            lambda x, group: mp.batch_norm(x, None, None, group),
        ]  # fmt: skip
        arrays = [
            mp.shard_of,
            lambda x, group: mp.distribute(x, mesh, [mp.Shard(0)]),
            lambda x, group: mp.from_local(x, mesh, [mp.Shard(0)]),
        ]
        for call in layers:
            with pytest.raises(UsageError, match="requires a gradient"):
                call(leaf, group)
        for call in (*layers, *arrays):
            with pytest.raises(UsageError, match="requires a gradient"):
                call(leaf * 2, group)
            with torch.no_grad():
                call(leaf * 2, group)
        for call in arrays:  # a parameter, before the first step
            call(leaf, group)

    world(2).run(program)
