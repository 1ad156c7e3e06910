"""A transformer block on several ranks, written by hand with the layers: loss and all gradients are those of one process."""

from __future__ import annotations

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord_simulated import run

TOKENS, BATCH, WIDTH, HEADS, SIZE, HIDDEN, WORDS = 5, 2, 6, 3, 2, 7, 11
SHAPES = {
    "table": (WORDS, WIDTH),
    "gain1": (WIDTH,),
    "qkv": (WIDTH, 3, HEADS, SIZE),
    "qkv_bias": (3, HEADS, SIZE),
    "out": (HEADS, SIZE, WIDTH),
    "out_bias": (WIDTH,),
    "gain2": (WIDTH,),
    "up": (WIDTH, HIDDEN),
    "up_bias": (HIDDEN,),
    "down": (HIDDEN, WIDTH),
    "down_bias": (WIDTH,),
}
AXES = {"table": 0, "qkv": 2, "qkv_bias": 1, "out": 0, "up": 1, "up_bias": 0, "down": 0}
"""The axis along which each parameter is divided; all ranks have the others whole."""
IDS, TARGETS = np.random.default_rng(1).integers(0, WORDS, (2, TOKENS, BATCH))


def parameters(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def norm(x, gain):
    """Normalize the last axis (RMSNorm) and multiply with a gain."""
    scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    n = x * scale

    def vjp(dy):
        dn = dy * gain
        return scale * (dn - n * (dn * n).mean(-1, keepdims=True)), (dy * n).sum((0, 1))

    return n * gain, vjp


def attention(qkv):
    """Causal attention of some heads, of shape ``(tokens, batch, 3, heads, size)``."""
    q, k, v = np.moveaxis(qkv, 2, 0)
    scores = np.einsum("tbhs,ubhs->bhtu", q, k) / np.sqrt(SIZE) + np.triu(np.full((TOKENS, TOKENS), -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)

    def vjp(dy):
        dweights = np.einsum("tbhs,ubhs->bhtu", dy, v)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) / np.sqrt(SIZE)
        dq, dk = np.einsum("bhtu,ubhs->tbhs", dscores, k), np.einsum("bhtu,tbhs->ubhs", dscores, q)
        return np.stack([dq, dk, np.einsum("bhtu,tbhs->ubhs", weights, dy)], 2)

    return np.einsum("bhtu,ubhs->tbhs", weights, v), vjp


def train(group, whole, sequence):
    """Return the loss and the gradients, joined."""
    p = {name: mp.shard_of(each, group, AXES[name]) if name in AXES else each for name, each in whole.items()}
    options = {"sequence_axis": 0} if sequence else {}
    if sequence:  # each rank normalizes its tokens: the gradients of the gains are summed
        (p["gain1"], of_gain1), (p["gain2"], of_gain2) = (mp.copy_to(p[name], group) for name in ("gain1", "gain2"))
    else:
        of_gain1 = of_gain2 = np.asarray
    heads = p["out"].shape[0]

    x, of_table = mp.vocab_parallel_embedding(IDS, p["table"], group, **options)
    n1, of_norm1 = norm(x, p["gain1"])
    qkv, of_qkv = mp.column_linear(n1, p["qkv"].reshape(WIDTH, -1), p["qkv_bias"].reshape(-1), group, **options)
    mixed, of_attention = attention(qkv.reshape(TOKENS, BATCH, 3, heads, SIZE))
    mixed = mixed.reshape(TOKENS, BATCH, heads * SIZE)
    y, of_out = mp.row_linear(mixed, p["out"].reshape(-1, WIDTH), p["out_bias"], group, **options)
    x = x + y
    n2, of_norm2 = norm(x, p["gain2"])
    before, of_up = mp.column_linear(n2, p["up"], p["up_bias"], group, **options)
    y, of_down = mp.row_linear(np.tanh(before), p["down"], p["down_bias"], group, **options)
    logits, of_logits = mp.column_linear(x + y, p["table"].T, None, group, **options)
    loss, of_loss = mp.vocab_parallel_cross_entropy(logits, TARGETS, group)

    d = {}
    dx, dtable, _ = of_logits(of_loss())
    dhidden, d["down"], d["down_bias"] = of_down(dx)
    dn2, d["up"], d["up_bias"] = of_up(dhidden * (1 - np.tanh(before) ** 2))
    dn2, dgain2 = of_norm2(dn2)
    dx = dx + dn2
    dmixed, d["out"], d["out_bias"] = of_out(dx)
    dqkv = of_attention(dmixed.reshape(TOKENS, BATCH, heads, SIZE))
    dn1, d["qkv"], d["qkv_bias"] = of_qkv(dqkv.reshape(TOKENS, BATCH, -1))
    dn1, dgain1 = of_norm1(dn1)
    d["gain1"], d["gain2"] = of_gain1(dgain1), of_gain2(dgain2)
    d["table"] = of_table(dx + dn1) + dtable.T
    d = {name: each.reshape(p[name].shape) for name, each in d.items()}
    return loss, {name: mp.gather_from(each, group, AXES[name])[0] if name in AXES else each for name, each in d.items()}


def test_the_gradients_of_a_block_are_those_of_finite_differences():
    given, direction, h = parameters(2), parameters(3), 1e-5

    def program(group):
        def moved(by):
            return train(group, {name: each + by * direction[name] for name, each in given.items()}, sequence=True)[0]

        _, gradients = train(group, given, sequence=True)
        return sum((each * direction[name]).sum() for name, each in gradients.items()), (moved(h) - moved(-h)) / (2 * h)

    exact, measured = run(program, 1).results[0]
    assert measured == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_block_on_several_ranks_equals_one_process(world, sequence):
    """Also where a rank has no head or no token at all."""
    given = parameters(2)
    loss, gradients = run(lambda group: train(group, given, sequence=False), 1).results[0]
    for found, found_gradients in run(lambda group: train(group, given, sequence), world).results:
        assert found == pytest.approx(loss, rel=1e-13)
        assert found_gradients.keys() == gradients.keys() == SHAPES.keys()
        for name, each in gradients.items():
            np.testing.assert_allclose(found_gradients[name], each, rtol=1e-10, atol=1e-12, err_msg=name)
