"""Layers whose weights are divided, for torch (with its autograd) and JAX. `make test-peers` runs them."""

from __future__ import annotations

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord.errors import UnsupportedError, UsageError
from oneaccord_parallel import torch as tp
from oneaccord_simulated import run

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("sequence_axis", [None, 0])
def test_autograd_of_torch_gives_the_gradients_of_one_process(sequence_axis):
    import torch

    torch.manual_seed(0)
    weights = [torch.randn(*shape, dtype=torch.float64) for shape in [(5, 3), (3, 7), (7,), (7, 3), (3, 5)]]
    axes = (0, 1, 0, 0, 1)
    ids, targets = torch.tensor([[1, 4], [1, 0], [3, 3]]), torch.tensor([[4, 0], [-100, 1], [2, 2]])

    def one_process():
        table, w1, b1, w2, w3 = leaves = [each.clone().requires_grad_() for each in weights]
        logits = torch.relu(table[ids] @ w1 + b1) @ w2 @ w3
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 5), targets.reshape(-1))
        loss.backward()
        return loss.detach(), [each.grad for each in leaves]

    def program(group):
        leaves = [mp.shard_of(each, group, axis).requires_grad_() for each, axis in zip(weights, axes, strict=True)]
        table, w1, b1, w2, w3 = leaves
        x = tp.vocab_parallel_embedding(ids, table, group, sequence_axis=sequence_axis)
        hidden = torch.relu(tp.column_linear(x, w1, b1, group, sequence_axis=sequence_axis))
        y = tp.row_linear(hidden, w2, None, group, sequence_axis=sequence_axis)
        logits = tp.column_linear(y, w3, None, group, sequence_axis=sequence_axis)
        loss = tp.vocab_parallel_cross_entropy(logits, targets, group)
        loss.backward()
        return loss.detach(), [mp.gather_from(each.grad, group, axis)[0] for each, axis in zip(leaves, axes, strict=True)]

    loss, gradients = one_process()
    for found, found_gradients in run(program, 3).results:
        torch.testing.assert_close(found, loss)
        for mine, right in zip(found_gradients, gradients, strict=True):
            torch.testing.assert_close(mine, right)


def test_the_pairs_have_their_gradients_in_torch():
    import torch

    def program(group):
        x = torch.full((2, 2), 1.0 + group.rank, requires_grad=True)
        y = tp.reduce_scatter_sequence(tp.gather_sequence(tp.copy_to(x, group), group), group)
        z = tp.gather_from(tp.scatter_to(tp.reduce_from(y, group), group), group)
        z.sum().backward()
        return z.tolist(), x.grad.tolist()

    # Each element is added on both ranks, then over both ranks: of rank 0 and 1 for each row.
    for z, gradient in run(program, 2).results:
        assert z == [[6.0, 6.0]] * 2
        assert gradient == [[4.0, 4.0]] * 2


def test_autograd_keeps_what_a_layer_needs():
    """What is saved goes through torch's hooks, as for the recomputation of activations, and a change of it is found."""
    import torch

    def program(group):
        x, w = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
            y = tp.column_linear(x, w, None, group)
        assert seen == [(2, 3), (3, 4)]
        y.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            y.sum().backward()
        y = tp.column_linear(x, w, None, group)
        with torch.no_grad():
            w.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run(program, 2)


def test_activations_that_are_computed_again_give_the_same_gradients():
    import torch
    from torch.utils.checkpoint import checkpoint

    def program(group):
        torch.manual_seed(group.rank)
        w1, w2 = torch.randn(3, 2), torch.randn(2, 3)
        x = torch.arange(12.0).reshape(4, 3)

        def layers(x, w1, w2):
            return tp.row_linear(torch.relu(tp.column_linear(x, w1, None, group)), w2, None, group)

        found = []
        for again in (False, True):
            leaves = [each.clone().requires_grad_() for each in (x, w1, w2)]
            y = checkpoint(layers, *leaves, use_reentrant=False) if again else layers(*leaves)
            y.square().sum().backward()
            found.append([each.grad for each in leaves])
        return all(torch.equal(*each) for each in zip(*found, strict=True))

    assert run(program, 2).results == [True, True]


@pytest.mark.parametrize("with_bias", [False, True])
def test_under_autocast_gradients_are_nearly_those_without(with_bias):
    import torch

    torch.manual_seed(1)
    weights = [torch.randn(*shape) for shape in [(6, 4), (4, 8), (8,), (8, 3), (3,)]]

    def program(group):
        found = []
        for enabled in (False, True):
            x, w1, b1, w2, b2 = [each.clone().requires_grad_() for each in weights]
            parts = [mp.shard_of(each, group, axis).requires_grad_() for each, axis in [(w1, 1), (b1, 0), (w2, 0)]]
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                hidden = torch.tanh(tp.column_linear(x, parts[0], parts[1] if with_bias else None, group))
                y = tp.row_linear(hidden, parts[2], b2 if with_bias else None, group)
            y.float().square().mean().backward()
            found.append([x.grad, parts[0].grad, parts[2].grad])
        assert all(each.dtype == torch.float32 for each in found[1])
        for exact, near in zip(*found, strict=True):
            torch.testing.assert_close(near, exact, rtol=0, atol=0.05 * exact.abs().max().item())

    run(program, 2)


def test_arrays_of_jax_stay_arrays_of_jax():
    import jax
    import jax.numpy as jnp

    x, w, b = (np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape) for shape in [(2, 3), (3, 4), (4,)])
    ids, table = np.array([3, 0, 3]), w.T.copy()

    def program(group):
        u, c = (mp.shard_of(jnp.asarray(each), group, -1) for each in (w, b))
        y, vjp = mp.column_linear(jnp.asarray(x), u, c, group, gather_output=True)
        dx, du, dc = vjp(jnp.ones_like(y))
        rows, of_table = mp.vocab_parallel_embedding(jnp.asarray(ids), mp.shard_of(jnp.asarray(table), group), group)
        loss, of_logits = mp.vocab_parallel_cross_entropy(mp.shard_of(y, group, 1), jnp.asarray([0, 2]), group)
        found = [y, dx, mp.gather_from(du, group)[0], mp.gather_from(dc, group)[0], rows]
        found += [mp.gather_from(of_table(rows), group, 0)[0], loss, mp.gather_from(of_logits(), group)[0]]
        assert all(isinstance(each, jax.Array) for each in found)
        return [np.asarray(each) for each in found]

    def nll(y):
        return -jax.nn.log_softmax(y)[jnp.arange(2), jnp.asarray([0, 2])].mean()

    y, dy, gradient = x @ w + b, np.ones((2, 4), np.float32), np.zeros_like(table)
    np.add.at(gradient, ids, table[ids])
    right = [y, dy @ w.T, x.T @ dy, dy.sum(0), table[ids], gradient, nll(y), jax.grad(nll)(jnp.asarray(y))]
    for found in run(program, 3).results:
        for mine, its in zip(found, right, strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-6, atol=1e-7)


def test_arrays_of_two_libraries_are_refused():
    import torch

    def program(group):
        with pytest.raises(UsageError, match="of one library"):
            mp.column_linear(np.ones((2, 2)), torch.ones(2, 2), None, group)

    run(program, 2)


def test_a_second_derivative_is_refused_and_never_dropped():
    import torch

    def program(group):
        def leaf(*shape):
            return torch.full(shape, 1.0 + group.rank, dtype=torch.float64, requires_grad=True)

        norm = mp.torch.SyncBatchNorm(2, group, dtype=torch.float64)
        ids = torch.tensor([0, 1])
        curved = {  # their gradient is a function of what was saved
            "column_linear": (lambda x, w: tp.column_linear(x, w, None, group), (3, 2), (2, 2)),
            "row_linear": (lambda x, w: tp.row_linear(x, w, None, group), (3, 2), (2, 2)),
            "vocab_parallel_cross_entropy": (lambda z: tp.vocab_parallel_cross_entropy(z, ids, group), (2, 2)),
            "SyncBatchNorm": (norm, (3, 2)),
        }
        flat = {  # only a gradient with a graph makes a second one
            "copy_to": (lambda x: tp.copy_to(x, group), (2, 2)),
            "reduce_from": (lambda x: tp.reduce_from(x, group), (2, 2)),
            "gather_from": (lambda x: tp.gather_from(x, group), (2, 2)),
            "scatter_to": (lambda x: tp.scatter_to(x, group), (2, 2)),
            "gather_sequence": (lambda x: tp.gather_sequence(x, group), (2, 2)),
            "reduce_scatter_sequence": (lambda x: tp.reduce_scatter_sequence(x, group), (2, 2)),
            "vocab_parallel_embedding": (lambda table: tp.vocab_parallel_embedding(ids, table, group), (2, 2)),
        }
        for name, (call, *shapes) in (curved | flat).items():
            inputs = [leaf(*shape) for shape in shapes]
            y = call(*inputs)
            gradients = torch.autograd.grad(y.sum(), inputs, create_graph=True)
            assert [each.shape for each in gradients] == [each.shape for each in inputs]
            if name in curved:
                with pytest.raises(UnsupportedError, match=f"{name} has no second derivative"):
                    (y.mean() + sum(each.square().sum() for each in gradients)).backward()
            else:
                assert not any(each.requires_grad for each in gradients)
                (y.mean() + sum(each.square().sum() for each in gradients)).backward()
            inputs = [leaf(*shape) for shape in shapes]
            gradients = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True)
            with pytest.raises(UnsupportedError, match=f"{name} has no second derivative"):
                gradients[0].sum().backward()

    run(program, 2)
