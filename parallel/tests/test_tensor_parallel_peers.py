"""Layers whose weights are divided, for torch (with its autograd) and JAX. `make test-peers` runs them."""

from __future__ import annotations

import numpy as np
import pytest

import manyhands_parallel as mp
from manyhands_parallel import torch as tp
from manyhands_simulated import run

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


def test_a_second_derivative_is_refused():
    import torch

    def program(group):
        x = torch.ones(2, requires_grad=True)
        (gradient,) = torch.autograd.grad((tp.copy_to(x, group) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            gradient.sum().backward()

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
