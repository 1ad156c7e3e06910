"""Gradients of JAX, outside and inside of ``jax.jit``. `make test-peers` runs it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from support.gradient_oracles import mean, same_bits
from support.peer_worlds import run_ranks

import oneaccord_parallel as mp

pytestmark = pytest.mark.peers


def test_trees_of_jax_arrays_come_back_as_new_ones_with_the_bits_of_one_process(world):
    def values(rank):
        return np.random.default_rng(rank).standard_normal((3, 7)).astype("f4")

    def program(group):
        import jax
        import jax.numpy as jnp

        params = {"w": [jnp.full((3, 7), group.rank, "float32")], "b": jnp.zeros(2, "bfloat16")}
        params, sync = mp.jax.data_parallel(params, group)
        assert float(params["w"][0].sum()) == 0
        mine = {"w": [jnp.asarray(values(group.rank))], "b": jnp.full(2, group.rank, "bfloat16")}
        found = sync(mine, weight=group.rank + 1)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
        assert same_bits(mine["w"][0], values(group.rank))
        with sync.step(weight=group.rank + 1) as step:
            step.ready("w.0", mine["w"][0])
        assert same_bits(step.gradients["w.0"], found["w"][0])
        assert set(step.gradients) == {"w.0"}
        return np.asarray(found["w"][0]), found["b"].astype("float32").tolist()

    for w, b in world(3).run(program).results:
        assert same_bits(w, mean([values(rank) for rank in range(3)], [1, 2, 3]))
        assert b == [1.3359375] * 2  # 8 / 6 in bfloat16


COMPILED = """
import jax, jax.numpy as jnp
import oneaccord_parallel as mp

def loss(params, x):
    return jnp.square(x @ params["w"] + params["b"]).mean()

with oa.init(timeout_s=30) as group:
    params = {"w": jnp.full((300, 400), group.rank + 1.0), "b": jnp.zeros(400), "unused": jnp.ones(3)}
    params, sync = mp.jax.data_parallel(params, group, bucket_bytes=100_000)

    @jax.jit
    def compiled(params, x, n):
        gradients = sync(jax.grad(loss)(params, x), weight=n)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), gradients

    one = other = params
    for step in range(5):
        x = jax.random.normal(jax.random.key(10 * step + group.rank), (16 + group.rank, 300))
        one, inside = compiled(one, x, 16 + group.rank)
        outside = sync(jax.jit(jax.grad(loss))(other, x), weight=16 + group.rank)
        other = jax.tree.map(lambda p, g: p - 0.1 * g, other, outside)
        for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside)):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert np.array_equal(group.broadcast(np.asarray(inside["w"])), inside["w"])
    assert float(jnp.abs(inside["unused"]).sum()) == 0

    # A loop inside of the compiled function: one step each time, in order.
    @jax.jit
    def total(value):
        return jax.lax.fori_loop(0, 4, lambda i, tree: jax.tree.map(lambda leaf: leaf * (i + 1), sync(tree)), value)

    ones = jax.tree.map(lambda leaf: jnp.full_like(leaf, 2.0 * group.rank + 1), params)
    assert float(total(ones)["b"][0]) == 2 * 1 * 2 * 3 * 4

    @jax.jit
    def bad(tree):
        return sync(tree, weight=-1.0 * tree["b"][0])

    try:
        jax.block_until_ready(bad(ones))
    except Exception as error:
        assert "a finite number that is not negative" in str(error), error
    else:
        raise AssertionError
print("all is well")
"""


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_inside_of_jit_each_run_is_a_step(tmp_path, backend):
    done = run_ranks(tmp_path, backend, COMPILED, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == 2


BACKGROUND = """
import jax, jax.numpy as jnp
import oneaccord_parallel as mp

with oa.init(timeout_s=30) as group:
    params, sync = mp.jax.data_parallel(jnp.full((400, 400), 0.01), group)
    assert mp.jax.data_parallel(jnp.ones(2), group)[1].group is sync.group
    x = jnp.ones((200, 400)) * (1 + group.rank)

    @jax.jit
    def step(params, x):
        return params - 0.1 * sync(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(params))

    for number in range(100):
        params = step(params, x)  # goes on in the background
        assert group.all_reduce(np.float64(number), "mean") == number
    assert float(sync(jnp.full((400, 400), 2.0 * group.rank))[0, 0]) == 1  # comes after those steps
    params = step(params, x)  # the last one is not waited for
print("all is well")
"""


def test_a_compiled_step_goes_on_beside_calls_of_the_group(tmp_path):
    for backend in ("tcp", "shm"):
        done = run_ranks(tmp_path, backend, BACKGROUND, 2)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("all is well") == 2


def test_a_group_is_made_once_replaced_where_it_was_closed_and_given_back(world):
    groups = []

    def program(group):
        import jax.numpy as jnp

        params = {"w": jnp.ones(2)}
        first, second = (mp.jax.data_parallel(params, group)[1] for _ in range(2))
        assert first.group is second.group
        if group.rank != 1:
            first.group.close()
        third, fourth = (mp.jax.data_parallel(params, group)[1] for _ in range(2))
        assert third.group is fourth.group
        assert third.group is not first.group
        assert not first.group.is_usable
        groups.extend([weakref.ref(group), weakref.ref(third.group)])
        return third({"w": jnp.full(2, float(group.rank))})["w"].tolist()

    assert world(3).run(program).results == [[1.0, 1.0]] * 3
    gc.collect()
    assert [each() for each in groups] == [None] * 6
