"""Checkpoints beside the package safetensors, and with the arrays of torch and JAX. Needs these; ``make test-peers`` runs it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import oneaccord_parallel as mp
from oneaccord.errors import LayoutError
from oneaccord_simulated import run

pytestmark = pytest.mark.peers

TORCH_DTYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()


def random_bytes(count, is_bool=False):
    return np.random.default_rng(0).integers(0, 2 if is_bool else 256, count, np.uint8)


def same(one, other):
    import torch

    one, other = (each.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return bool((one == other).all())


def torch_array(name, *shape):
    import torch

    dtype = getattr(torch, name)
    return torch.from_numpy(random_bytes(math.prod(shape) * dtype.itemsize, name == "bool")).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_tensors_keep_their_bits_and_are_loaded_in_place(tmp_path, name):
    import torch

    whole = torch_array(name, 6, 4)

    def program(group):
        tree = {
            "all": whole,
            "t": whole.T,
            "zero": whole[0, 0],
            "s": mp.ShardedArray.of_range((6, 4), 12 * group.rank, whole.reshape(-1)[12 * group.rank :][:12]),
        }
        mp.save(tree, tmp_path, group)
        into = torch.zeros_like(whole)
        flat = torch.zeros_like(whole.reshape(-1))
        like = {
            "all": into,
            "t": torch.zeros_like(whole.T),
            "zero": torch.zeros_like(whole[0, 0]),
            "s": mp.ShardedArray.of_range((6, 4), 0, flat),
        }
        found = mp.load(tmp_path, like, group)
        assert found["all"] is into
        assert same(into, whole)
        assert same(found["t"], whole.T)
        assert same(found["zero"], whole[0, 0])
        assert same(flat, whole)

    run(program, 2)


def test_views_that_torch_computes_are_saved_and_loaded_as_what_they_mean(tmp_path):
    import torch

    x = torch.tensor([1 + 2j, 3 - 4j])
    mp.save({"c": x.conj(), "p": torch.nn.Parameter(torch.ones(2))}, tmp_path)
    assert mp.load(tmp_path)["c"].tolist() == [1 - 2j, 3 + 4j]
    store, parameter = torch.zeros(2, dtype=torch.complex64), torch.nn.Parameter(torch.zeros(2))
    found = mp.load(tmp_path, {"c": store.conj(), "p": parameter})
    assert store.tolist() == x.tolist()
    assert found["p"] is parameter
    assert parameter.tolist() == [1, 1]
    expanded = torch.zeros(1).expand(2)
    assert mp.load(tmp_path, {"c": store, "p": expanded})["p"].tolist() == [1, 1]
    assert expanded.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["sparse", "meta", "lazy"])
def test_odd_tensors_are_refused_on_every_rank(tmp_path, kind):
    import torch

    make, said = {
        "sparse": (lambda: torch.ones(3).to_sparse(), r"layout torch.sparse_coo: use x.to_dense\(\)"),
        "meta": (lambda: torch.empty(3, device="meta"), "on the device meta, where it holds no data"),
        "lazy": (lambda: torch.nn.LazyLinear(3).weight, "not initialised yet: run a batch through the module first"),
    }[kind]

    def program(group):
        mp.save({"x": torch.full((3,), 7.0)}, tmp_path, group)
        odd = make() if group.rank else torch.zeros(3)
        with pytest.raises(LayoutError, match=f"leaf 'x': an array cannot be loaded into a value that is .*{said}"):
            mp.load(tmp_path, {"x": odd}, group)
        if kind != "lazy":  # whose shape is not known
            with pytest.raises(LayoutError, match=f"leaf 'x': an array cannot be loaded into a value that is .*{said}"):
                mp.load(tmp_path, {"x": mp.ShardedArray((3,), [((0,), make())])}, group)
        with pytest.raises(LayoutError, match=f"leaf 'x': a checkpoint cannot hold what is .*{said}"):
            mp.save({"x": odd}, tmp_path, group)
        return mp.load(tmp_path, group=group)["x"].tolist()

    assert run(program, 2).results == [[7.0] * 3] * 2


def test_a_training_in_torch_goes_on_where_it_was(tmp_path):
    import torch

    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def steps(model, optimizer, count):
        for number in range(count):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()

    def state(model, optimizer):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    one = make()
    steps(*one, 3)
    mp.save(state(*one), tmp_path)
    two = make()
    steps(*two, 1)  # so that the optimizer has its state
    found = mp.load(tmp_path, state(*two))
    two[0].load_state_dict(found["model"])
    two[1].load_state_dict(found["optimizer"])
    for each in (one, two):
        steps(*each, 2)
    assert all(same(a, b) for a, b in zip(one[0].state_dict().values(), two[0].state_dict().values(), strict=True))


def test_a_background_save_stages_tensors(tmp_path):
    import torch

    trees = [{name: torch_array(name, 5, 3).T for name in TORCH_DTYPES}]

    def program(group):
        with mp.AsyncSaver(tmp_path, group) as saver:
            mine = {name: tensor.clone() for name, tensor in trees[0].items()}
            saver.save(mine, step=1)
            for tensor in mine.values():
                tensor.zero_()

    run(program, 2)
    into = {name: torch.zeros_like(tensor) for name, tensor in trees[0].items()}
    mp.load(tmp_path / "1", into)
    assert all(same(into[name], trees[0][name]) for name in TORCH_DTYPES)


def test_jax_arrays_come_back_as_new_ones(tmp_path):
    import jax
    import jax.numpy as jnp

    x, half = jnp.arange(12.0, dtype="float32").reshape(3, 4), jnp.arange(4, dtype="bfloat16")

    def program(group):
        rows = slice(2 * group.rank, 2 * group.rank + 2)
        mp.save({"x": x.T, "h": half, "s": mp.ShardedArray((4, 3), [((rows.start, 0), x.T[rows])])}, tmp_path, group)
        like = {
            "x": jnp.zeros((4, 3)),
            "h": jnp.zeros(4, "bfloat16"),
            "s": mp.ShardedArray((4, 3), [((0, 1), jnp.zeros((4, 2)))]),
        }
        found = mp.load(tmp_path, like, group)
        assert not like["x"].any()
        return found

    for found in run(program, 2).results:
        assert isinstance(found["x"], jax.Array)
        assert (found["x"] == x.T).all()
        assert found["h"].dtype == jnp.bfloat16
        assert (found["h"] == half).all()
        ((box, piece),) = found["s"].pieces
        assert (box.offset, box.shape) == ((0, 1), (4, 2))
        assert isinstance(piece, jax.Array)
        assert (piece == x.T[:, 1:]).all()


def test_the_package_reads_our_files_and_we_read_its(tmp_path):
    import safetensors
    import torch
    from safetensors.torch import load_file, save_file

    plain = [name for name in TORCH_DTYPES if name not in ("complex128", "float8_e4m3fnuz", "float8_e5m2fnuz")]
    tree = {name: torch_array(name, 5, 3) for name in plain}
    mp.save({**tree, "c": torch_array("complex128", 5), "t": tree["float32"].T, "__metadata__": tree["int8"]}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("data-*")
    found = load_file(file)
    assert all(found[name].dtype == tree[name].dtype for name in plain)
    assert all(same(found[name], tree[name]) for name in plain)
    assert same(found["t"], tree["float32"].T)
    assert found["c"].shape == (5, 2)
    assert found["c"].dtype == torch.float64
    assert same(found["__metadata__@"], tree["int8"])
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata()["oneaccord"] in file.name

    save_file(tree, tmp_path / "theirs.safetensors", {"some": "text"})
    into = {name: torch.zeros_like(tensor) for name, tensor in tree.items()}
    mp.load(tmp_path / "theirs.safetensors", into)
    assert all(same(into[name], tree[name]) for name in plain)


def test_the_package_reads_the_parts_of_divided_arrays(tmp_path):
    from safetensors.numpy import load_file

    whole = np.arange(35.0).reshape(5, 7)
    run(
        lambda group: mp.save(
            {"w": mp.ShardedArray.of_range((5, 7), 18 * group.rank, whole.reshape(-1)[18 * group.rank :][:18])}, tmp_path, group
        ),
        2,
    )
    parts = {}
    for file in tmp_path.glob("data-*"):
        parts |= load_file(file)
    assert sorted(parts) == ["w@0,0", "w@2,0", "w@2,4", "w@3,0"]
    for name, part in parts.items():
        row, column = map(int, name[2:].split(","))
        assert (whole[row : row + part.shape[0], column : column + part.shape[1]] == part).all()


def test_an_optimizer_of_torch_goes_on_in_a_fresh_process(tmp_path):
    import torch

    def program(group):
        def make():
            torch.manual_seed(0)
            net = torch.nn.Linear(4, 3)
            return net, torch.optim.Adam(net.parameters(), 0.05)

        def steps(net, optimizer, numbers):
            for number in numbers:
                optimizer.zero_grad()
                net(torch.full((2, 4), 1.0 + number)).square().mean().backward()
                optimizer.step()

        net, optimizer = make()
        steps(net, optimizer, range(3))
        mp.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved", group)
        steps(net, optimizer, range(3, 5))
        fresh, fresh_optimizer = make()
        like = {"net": fresh.state_dict(), "optimizer": fresh_optimizer.state_dict()}
        assert like["optimizer"]["state"] == {}
        tree = mp.load(tmp_path / "saved", like, group)
        assert list(tree["optimizer"]["state"]) == [0, 1]
        fresh_optimizer.load_state_dict(tree["optimizer"])
        steps(fresh, fresh_optimizer, range(3, 5))
        return all(torch.equal(one, other) for one, other in zip(net.parameters(), fresh.parameters(), strict=True))

    assert run(program, 2).results == [True, True]
