"""The layers on GPUs of their own for all ranks, over NCCL, as far as the fakes go: streams, devices, and the values of the host."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.device_worlds import gpus, ranks
from support.fake_gpu import fake_cuda
from support.fake_gpu import fake_cupy as cupy

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord.errors import UsageError
from oneaccord_simulated import run

__all__ = ["gpus"]

pytestmark = pytest.mark.usefixtures("gpus")

SHAPES = {"a": (3, 5), "b": (), "c": (7,), "d": (0, 2), "e": (2, 2, 2)}


def integers(rank, step=0):
    """Small integers, of which no sum is rounded, in whatever order NCCL adds them."""
    rng = np.random.default_rng((rank, step))
    return {name: rng.integers(-8, 9, shape).astype("f4") for name, shape in SHAPES.items()}


def on_gpu(tree):
    return {name: cupy.asarray(value) for name, value in tree.items()}


def on_host(tree):
    return {name: cupy.asnumpy(value) for name, value in tree.items()}


def mean(weights, step=0):
    given = [integers(rank, step) for rank in range(len(weights))]
    return {
        name: sum(w * each[name] for w, each in zip(weights, given, strict=True)) / np.float32(sum(weights)) for name in SHAPES
    }


def same(found, wanted):
    return all(np.array_equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted)


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "float64"}, {"compress": mp.compress.Cast("float16")}], ids=str)
def test_gradients_are_averaged_on_the_stream_on_which_they_are_computed(options):
    weights = [1, 3, 0, 4]

    def program(group):
        params = on_gpu(integers(0))
        sync = mp.GradientSync(group, params, bucket_bytes=64, first_bucket_bytes=16, reproducible=False, **options)
        found = []
        with cupy.cuda.Stream(non_blocking=True):
            for step in range(3):
                halves = [on_gpu({name: value / 2 for name, value in integers(group.rank, step).items()}) for _ in range(2)]
                mine = {}
                # Half of the weight first, in a step that is paused.
                with sync.paused(), sync.step(weight=weights[group.rank] / 2) as s:
                    for name, half in halves[0].items():
                        s.ready(name, half * 2)
                with sync.step(weight=weights[group.rank] / 2) as s:
                    for name, half in halves[1].items():
                        mine[name] = half * 2  # it is there when the stream comes to it
                        s.ready(name, mine[name])
                found.append(on_host({name: value + 0 for name, value in mine.items()}))
        return found

    for found in ranks(program, 4):
        assert all(same(each, mean(weights, step)) for step, each in enumerate(found))


def test_buckets_are_made_anew_when_the_stream_has_read_the_old_ones():
    def program(group):
        sync = mp.GradientSync(group, on_gpu(integers(0)), reproducible=False)  # its memory is of the default stream
        with cupy.cuda.Stream(non_blocking=True) as stream:
            mine = on_gpu(integers(5))
            with sync.step() as step:
                for name, gradient in mine.items():
                    step.ready(name, gradient)
                fake_cuda.enqueue(stream.ptr, lambda: time.sleep(0.1))  # the host is far ahead of the stream when the step ends
            return on_host(mine)

    assert same(ranks(program, 1)[0], integers(5))


def test_the_root_gives_its_arrays_on_gpus_and_on_the_host():
    def program(group):
        tree = {**on_gpu(integers(group.rank)), "on the host": np.full(3, group.rank, "f4"), "rate": 0.5 * group.rank}
        return on_host(mp.broadcast(tree, group, root=2))

    wanted = {**integers(2), "on the host": np.full(3, 2, "f4")}
    for found in ranks(program, 4):
        assert same(found, wanted)
        assert found["rate"] == 1.0


@pytest.mark.parametrize("optimizer", [mp.SGD(0.25, momentum=0.5), mp.Adam(0.1), mp.AdamW(0.1, weight_decay=0.5)], ids=repr)
def test_sharded_training_gives_the_bits_of_the_host(optimizer, tmp_path):
    shapes = {name: shape for name, shape in SHAPES.items() if name != "d"}

    def train(group, give, reproducible=True):
        def tree(rank, step):
            return {name: give(value) for name, value in integers(rank, step).items() if name in shapes}

        found = []
        for make in (mp.Sharded, mp.ShardedOptimizer):
            sharded = make is mp.Sharded
            options = {"reproducible": reproducible}
            store = (
                mp.Sharded(tree(9, 9), group, **options)
                if sharded
                else mp.ShardedOptimizer(optimizer, tree(9, 9), group, **options)
            )
            for step in range(2):
                gradients = tree(group.rank, step)
                with store.step(weight=group.rank) if sharded else store.backward(weight=group.rank):
                    for name, gradient in gradients.items():
                        (store.reduce if sharded else store.ready)(name, gradient)
                norm = store.clip_by_global_norm(2.0)
                store.update(optimizer)
            found.append({name: cupy.asnumpy(value) for name, value in store.full().items()})
            found.append({"norm": np.float64(norm)})
        return found

    right = run(lambda group: train(group, np.asarray), 4).results
    for found, wanted in zip(ranks(lambda group: train(group, cupy.asarray, reproducible=False), 4), right, strict=True):
        assert all(same(each, other) for each, other in zip(found, wanted, strict=True))


def test_checkpoints_of_one_world_are_loaded_on_gpus_and_on_the_host(tmp_path):
    whole = np.arange(24.0).reshape(8, 3)

    def program(group):
        with oa.DeviceMesh(group, (2, 2)) as mesh, cupy.cuda.Stream(non_blocking=True):
            d = mp.distribute(cupy.asarray(whole) * 2, mesh, [mp.Shard(0), mp.Shard(1)])
            tree = {"d": d, "own": mp.PerRank(cupy.full(3, group.rank)), "same": cupy.asarray(whole) + 1}
            mp.save(tree, tmp_path / "now", group)
            with mp.AsyncSaver(tmp_path / "saver", group) as saver:
                saver.save(tree, step=7)
                d.local.fill(-1)  # what was saved is copied by now
            like = {
                "d": mp.distribute(cupy.zeros(whole.shape), mesh, [mp.Replicate(), mp.Shard(0)]),
                "own": mp.PerRank(cupy.zeros(3, int)),
                "same": cupy.zeros(whole.shape),
            }
            found = []
            for path in (tmp_path / "now", tmp_path / "saver" / "7"):
                tree = mp.load(path, like, group)
                assert tree["same"] is like["same"]
                assert tree["same"].device.id == tree["d"].local.device.id == group.rank
                found.append((tree["d"].full().get().tolist(), tree["own"].value.tolist(), tree["same"].tolist()))
            return found

    for rank, found in enumerate(ranks(program, 4)):
        assert found == [((whole * 2).tolist(), [rank] * 3, (whole + 1).tolist())] * 2
    loaded = mp.load(tmp_path / "now")
    assert loaded["d"].tolist() == (whole * 2).tolist()


def test_functions_of_divided_arrays_give_the_values_of_the_host():
    rng = np.random.default_rng(3)
    x, w1, w2, dy = (rng.integers(-3, 4, shape).astype("f4") for shape in [(6, 3), (3, 8), (8, 4), (6, 4)])
    table, ids = rng.integers(-3, 4, (8, 3)).astype("f4"), np.array([[0, 7, 2], [2, 5, 2]])

    def program(group, give):
        first, second = mp.shard_of(give(w1), group, 1), mp.shard_of(give(w2), group, 0)
        h, back1 = mp.column_linear(give(x), first, None, group, reproducible=None)
        y, back2 = mp.row_linear(h, second, None, group, reproducible=None)
        dh, dw2, _ = back2(give(dy))
        dx, dw1, _ = back1(dh)
        e, back = mp.vocab_parallel_embedding(give(ids), mp.shard_of(give(table), group, 0), group, reproducible=None)
        d = mp.distribute(give(x), group, [mp.Shard(0)]).redistribute([mp.Shard(1)])
        found = [y, dx, dw1, dw2, e, back(e * 1), d.local, d.full()]
        n, cache = mp.batch_norm(give(x), None, None, group)
        return [cupy.asnumpy(each) for each in found], [cupy.asnumpy(each) for each in (n, mp.batch_norm_backward(n, cache)[0])]

    right = run(lambda group: program(group, np.asarray), 4).results
    for (found, close), (wanted, near) in zip(ranks(lambda group: program(group, cupy.asarray), 4), right, strict=True):
        assert all(np.array_equal(each, other) for each, other in zip(found, wanted, strict=True))
        for each, other in zip(close, near, strict=True):
            np.testing.assert_allclose(each, other, rtol=1e-6, atol=1e-6)


def test_stages_give_each_other_arrays_of_their_own_gpus():
    rng = np.random.default_rng(4)
    weights, x = rng.integers(-3, 4, (4, 3, 3)).astype("f4"), rng.integers(-3, 4, (8, 3)).astype("f4")

    def program(group, give):
        w = give(weights[group.rank])
        stage = mp.Stage(lambda x: (x @ w, x), lambda x, dy: (dy @ w.T, {"w": x.T @ dy}))
        pipeline = mp.Pipeline(group, [stage], mp.schedule("1f1b", 4, 4))
        loss, (gradient,) = pipeline.step(give(x), None, loss=lambda y, _: (y.sum(), y * 0 + 1))
        return loss, cupy.asnumpy(gradient["w"])

    right = run(lambda group: program(group, np.asarray), 4).results
    found = ranks(lambda group: program(group, cupy.asarray), 4)
    for (loss, gradient), (wanted, other) in zip(found, right, strict=True):
        assert loss == wanted
        assert gradient.tobytes() == other.tobytes()


def test_ids_on_the_host_look_up_rows_on_gpus_and_a_wrong_one_is_named():
    def program(group):
        rows = cupy.asarray(np.arange(6.0).reshape(2, 3)) + 10 * group.rank
        with pytest.raises(UsageError, match="8 is not the number of a row"):
            mp.vocab_parallel_embedding(np.array([1, 8]), rows, group, reproducible=None)
        with pytest.raises(UsageError, match="9 is not the number of a row"):
            mp.vocab_parallel_cross_entropy(cupy.zeros((1, 2)), np.array([9]), group, reproducible=None)
        return mp.vocab_parallel_embedding(np.array([1, 6]), rows, group, reproducible=None)[0].get().tolist()

    assert ranks(program, 4) == [[[3.0, 4.0, 5.0], [30.0, 31.0, 32.0]]] * 4


def test_what_comes_to_a_stage_is_on_the_gpu_of_its_group():
    """The current GPU of the thread may be another one."""

    def program(group):
        came = []
        cupy.cuda.Device(3).use()

        def forward(x):
            came.append(x.data.device_id)
            with cupy.cuda.Device(x.data.device_id):
                return x + 1, None

        def backward(saved, dy):
            came.append(dy.data.device_id)
            with cupy.cuda.Device(dy.data.device_id):
                return dy * 2, {}

        with cupy.cuda.Device(group.rank):
            x = cupy.zeros(4, np.float32)
        pipeline = mp.Pipeline(group, [mp.Stage(forward, backward)], mp.schedule("1f1b", 2, 2))
        pipeline.step(x if group.rank == 0 else None, None, loss=loss if group.rank == 1 else None)
        return came

    def loss(y, _):
        with cupy.cuda.Device(y.data.device_id):
            return 1.0, y * 0

    assert [set(came) for came in ranks(program, 2)] == [{0}, {1}]
