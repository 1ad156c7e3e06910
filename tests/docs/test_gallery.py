"""The programs of examples/gallery: on every number of ranks and backend, each finds what an independent calculation finds."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.scripts import module_of
from support.worlds import must, thread_world

import oneaccord as oa
import oneaccord_parallel as mp
from oneaccord_simulated.running import Simulation

GALLERY = Path(__file__).resolve().parents[2] / "examples" / "gallery"
SIZES = (1, 2, 3)


@pytest.fixture(params=["simulated", "shm", "tcp"])
def on(request):
    """Run a function on so many ranks of a backend; return what each rank returned."""

    def run(size, function):
        return must(thread_world(function, size, request.param, timeout_s=60))

    run.backend = request.param
    return run


def program(name):
    """Return a program of the gallery as a module, under its own name while it imports others of the gallery."""
    sys.path.insert(0, str(GALLERY))
    try:
        return module_of(GALLERY / f"{name}.py")
    finally:
        sys.path.remove(str(GALLERY))


def alike(results):
    """Return the result that all ranks have, bit for bit."""
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    return results[0]


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_of_the_gallery_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80


def test_monte_carlo_has_the_same_bits_on_any_world(on):
    darts = [np.random.default_rng(block).random((2, 500)) for block in range(7)]
    expected = [4 * sum(abs(complex(x, y)) < 1 for x, y in pairs.T) / 500 for pairs in darts]
    for size in SIZES:
        assert alike(on(size, lambda group: program("monte_carlo").main(group, 7, 500))).tolist() == expected


def test_heat_has_the_same_bits_on_any_mesh(on):
    plate = expected = program("heat").start(13)  # divided unevenly
    up, down = [0, *range(12)], [*range(1, 13), 12]
    for _ in range(9):
        around = expected[up] + expected[down] + expected[:, up] + expected[:, down]
        expected = expected + 0.2 * (around - 4.0 * expected)
    for size in (*SIZES, 4):
        np.testing.assert_array_equal(alike(on(size, lambda group: program("heat").main(group, plate, 9))), expected)


def test_fft_solves_the_equation_of_poisson(on):
    x = np.linspace(0, 2 * np.pi, 30, endpoint=False)
    f = np.cos(2 * x)[:, None] + np.sin(x[:, None] - 3 * x)
    expected = -np.cos(2 * x)[:, None] / 4 - np.sin(x[:, None] - 3 * x) / 10
    for size in (*SIZES, 4):
        parts = on(size, lambda group: program("fft").main(group, np.array_split(f, group.world_size)[group.rank]))
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=1e-14)


def test_fft_transposes_a_divided_matrix(on):
    whole = np.arange(49).reshape(7, 7)
    for size in SIZES:
        parts = on(size, lambda group: program("fft").transpose(np.array_split(whole, group.world_size)[group.rank], group))
        np.testing.assert_array_equal(np.concatenate(parts), whole.T)


def test_kmeans_finds_the_clusters_of_one_process(on, tmp_path):
    path = program("kmeans").write(tmp_path / "points.npy", 700)
    points = np.load(path)
    expected = points[::140][:5]
    for _ in range(200):
        nearest = np.array([np.argmin([np.hypot(*(point - centre)) for centre in expected]) for point in points])
        moved = np.array([points[nearest == number].mean(axis=0) for number in range(5)])
        if np.abs(moved - expected).max() < 1e-9:
            break
        expected = moved
    for size in SIZES:
        centres, counts = on(size, lambda group: program("kmeans").main(group, path, chunk=64))[-1]
        np.testing.assert_allclose(centres, moved, rtol=0, atol=1e-12)
        assert counts.tolist() == np.bincount(nearest).tolist()


def test_sample_sort_sorts_uneven_and_empty_parts_and_many_equal_numbers(on):
    everything = np.random.default_rng(5).integers(0, 40, 600)
    for size in SIZES:
        for ends in ([200, 450], [0, 600], [1, 2]):
            parts = np.split(everything, ends[: size - 1])
            results = on(size, lambda group, parts=parts: program("sample_sort").main(group, parts[group.rank], 8))
            np.testing.assert_array_equal(np.concatenate(results), np.sort(everything))


def test_sample_sort_gives_each_rank_about_as_many_numbers(on):
    module = program("sample_sort")
    lengths = on(3, lambda group: len(module.main(group, module.numbers(group, 5000))))
    assert sum(lengths) == 15000
    assert max(lengths) < 6000


def test_conjugate_gradient_solves_the_system(on):
    module = program("conjugate_gradient")
    side = 7
    dense = 4.0 * np.eye(side * side)
    for one in range(side * side):
        for other in range(side * side):
            if sum(abs(a - b) for a, b in zip(divmod(one, side), divmod(other, side), strict=True)) == 1:
                dense[one, other] = -1.0
    b = np.random.default_rng(1).normal(size=side * side)

    def solve(group):
        cuts = [len(b) * rank // group.world_size for rank in range(group.world_size + 1)]
        first, last = cuts[group.rank : group.rank + 2]
        matrix = module.Matrix(group, *module.laplacian(side, first, last))
        np.testing.assert_allclose(matrix @ b[first:last], (dense @ b)[first:last], rtol=0, atol=1e-13)
        return module.main(group, matrix, b[first:last])

    for size in SIZES:
        results = on(size, solve)
        np.testing.assert_allclose(np.concatenate([x for x, _ in results]), np.linalg.solve(dense, b), rtol=0, atol=1e-8)
        norms = alike([norms for _, norms in results])
        assert norms[-1] <= 1e-10 * norms[0] < norms[-2]


def test_nbody_has_the_path_of_one_process_and_keeps_its_energy(on):
    module = program("nbody")
    x, v, masses = module.disc(11)
    eps2, expected, energies = module.SOFTENING**2, [], []

    def pull():
        total = np.zeros_like(x)
        for one in range(11):
            for other in range(11):
                apart = x[other] - x[one]
                total[one] += masses[other] * apart / (apart @ apart + eps2) ** 1.5
        return total

    for _ in range(6):
        pairs = [(one, other) for one in range(11) for other in range(one)]
        potential = sum(masses[i] * masses[j] / np.sqrt((x[i] - x[j]) @ (x[i] - x[j]) + eps2) for i, j in pairs)
        expected.append(x)
        energies.append((masses * (v**2).sum(axis=1)).sum() / 2 - potential)
        v = v + 0.005 * pull()
        x = x + 0.01 * v
        v = v + 0.005 * pull()
    for size in SIZES:
        results = on(size, lambda group: module.main(group, bodies=11, steps=6))
        np.testing.assert_allclose(results[0][0], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(alike([found for _, found in results]), energies, rtol=1e-12)


def test_sweep_has_the_same_results_on_any_pool(monkeypatch):
    monkeypatch.syspath_prepend(GALLERY)  # where ranks look for modules as well
    module = program("sweep")
    infections, recoveries = np.array([0.5, 0.9]), np.array([0.1, 0.2, 0.25])
    with ThreadPoolExecutor(1) as pool:
        alone = module.main(pool, infections, recoveries)
    for size, backend in ((1, "tcp"), (2, "shm"), (3, "tcp")):
        with oa.Ranks(size, backend=backend) as ranks:
            np.testing.assert_array_equal(module.main(ranks, infections, recoveries), alone)
    ratio = infections[:, None] / recoveries
    np.testing.assert_allclose(1 - np.exp(-ratio * alone[..., 1]), alone[..., 1], rtol=0, atol=1e-3)  # the final size
    peak = 1 - (1 + np.log(ratio)) / ratio
    np.testing.assert_allclose(alone[..., 0], peak, rtol=0, atol=1e-3)


def test_pagerank_solves_the_linear_system(on):
    module = program("pagerank")
    pages = 60
    follow = np.full((pages, pages), 1 / pages)
    for page in range(pages):
        targets = module.links(page, pages)
        if len(targets):
            follow[:, page] = np.bincount(targets, minlength=pages) / len(targets)
    expected = np.linalg.solve(np.eye(pages) - 0.85 * follow, np.full(pages, 0.15 / pages))
    for size in SIZES:
        results = on(size, lambda group: module.main(group, pages))
        np.testing.assert_allclose(alike([score for score, _ in results]), expected, rtol=0, atol=1e-9)
        changes = alike([changes for _, changes in results])
        assert changes[-1] <= 1e-10 < changes[-2]


def softmax(score):
    return np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)


def batches(images, epochs, batch=60):
    """The batches of one process."""
    alone = type("Alone", (), {"rank": 0, "world_size": 1})
    for epoch in range(epochs):
        yield from mp.Sampler(len(images), alone, batch).epoch(epoch)


def losses_of_digits(update, epochs):
    """Train the network of digits.py in float64 on whole batches; return the mean loss of each batch, and how large each one was."""
    images, labels, _, _ = program("digits_data").load()
    weights = {name: weight.astype(float) for name, weight in program("digits").start().items()}
    losses, sizes = [], []
    for mine in batches(images, epochs):
        x, y = images[mine].astype(float), np.eye(10)[labels[mine]]
        inner = x @ weights["w1"] + weights["b1"]
        chance = softmax(np.maximum(inner, 0) @ weights["w2"] + weights["b2"])
        losses.append(-(y * np.log(chance)).sum(axis=1).mean())
        sizes.append(len(mine))
        outer = (chance - y) / len(x)
        hidden = np.where(inner > 0, outer @ weights["w2"].T, 0)
        gradients = {"w1": x.T @ hidden, "b1": hidden.sum(0), "w2": np.maximum(inner, 0).T @ outer, "b2": outer.sum(0)}
        for name, gradient in gradients.items():
            update(name, weights[name], gradient)
    return np.array(losses), np.array(sizes)


def adam(lr):
    """Adam as in the paper of Kingma and Ba, step by step."""
    moments = {}

    def update(name, weight, gradient):
        t, m, v = moments.get(name, (0, 0, 0))
        moments[name] = t, m, v = t + 1, 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        weight -= lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return update


def test_digits_learn_what_one_process_learns(on):
    speeds = {}

    def momentum(name, weight, gradient):
        speeds[name] = 0.9 * speeds.get(name, 0) + gradient
        weight -= 0.1 * speeds[name]

    losses, sizes = losses_of_digits(momentum, 2)
    per_epoch = [np.average(part, weights=size) for part, size in zip(np.split(losses, 2), np.split(sizes, 2), strict=True)]
    for size in SIZES:
        found = alike([losses for _, losses in on(size, lambda group: program("digits").main(group, epochs=2))])
        np.testing.assert_allclose(found, per_epoch, rtol=2e-4)


def test_a_checkpoint_continues_on_other_ranks_and_backends(on, tmp_path):
    module = program("checkpoint")
    losses, _ = losses_of_digits(adam(2e-3), 2)
    found = []
    for size, steps in ((2, 20), (3, 27), (1, 40)):  # the first epoch ends at step 24
        results = on(size, lambda group, steps=steps: module.main(group, str(tmp_path), steps))
        assert {first for _, first, _ in results} == {len(found)}
        found += alike([losses for _, _, losses in results])
    np.testing.assert_allclose(found, losses[:40], rtol=2e-3)


def test_sharded_learns_what_one_process_learns_in_less_memory(on):
    module = program("sharded")
    images, labels, _, _ = program("digits_data").load()
    layers = [{name: each.astype(float) for name, each in layer.items()} for layer in module.start([64, 20, 20, 10]).values()]
    update, losses = adam(1e-3), []
    for mine in batches(images, 1):
        activations = [images[mine].astype(float)]
        for layer in layers:
            activations.append(np.maximum(activations[-1], 0) @ layer["w"] + layer["b"])
        y, chance = np.eye(10)[labels[mine]], softmax(activations[-1])
        losses.append(-(y * np.log(chance)).sum())
        error = (chance - y) / len(mine)
        for number in (2, 1, 0):
            into = np.maximum(activations[number], 0)
            gradients = {"w": into.T @ error, "b": error.sum(0)}
            error = np.where(activations[number] > 0, error @ layers[number]["w"].T, 0)
            for name, gradient in gradients.items():
                update((number, name), layers[number][name], gradient)
    peaks = []
    for size in SIZES:
        results = on(size, lambda group: module.main(group, epochs=1, width=20, depth=2))
        found, peak, _ = results[-1]
        np.testing.assert_allclose(found, [sum(losses) / len(images)], rtol=2e-4)
        peaks.append(peak)
    assert peaks == sorted(set(peaks), reverse=True)


def test_pipeline_learns_what_one_process_learns(on):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 16))
    target = np.sin(x) + x[:, ::-1]
    weights = rng.normal(0.0, 0.1, (5, 16, 16))
    losses = []
    for _ in range(4):
        states = [x]
        for w in weights:
            states.append(states[-1] + np.tanh(states[-1] @ w))
        losses.append(((states[-1] - target) ** 2).mean())
        error = 2 * (states[-1] - target) / target.size
        gradients = np.zeros_like(weights)
        for number in reversed(range(5)):
            inner = error / np.cosh(states[number] @ weights[number]) ** 2
            gradients[number] = states[number].T @ inner
            error = error + inner @ weights[number].T
        weights = weights - 0.5 * gradients
    for size in SIZES:
        results = on(size, lambda group: program("pipeline").main(group, 4, 5, 4))
        np.testing.assert_allclose(alike([losses for losses, _ in results]), losses, rtol=1e-12)
        np.testing.assert_allclose(np.concatenate([mine for _, mine in results]), weights, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_elastic_trains_in_a_simulated_world_in_which_nobody_dies(size, capsys):
    done = Simulation(size).execute(lambda _: program("elastic").main(2))
    assert not done.errors
    assert set(done.results) == {done.results[0]}
    assert 0.8 < done.results[0] <= 1.0
    assert "48 steps, accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_elastic_ends_as_if_no_rank_had_been_killed(run_python, backend):
    command = ["-m", "oneaccord", "run", "-n", "3", "--no-prefix", "--backend", backend]
    script = [GALLERY / "elastic.py", "--epochs", "1"]
    calm = run_python(*command, *script)
    killed = run_python(*command, "--max-restarts", "1", *script, "--kill-at", "9")
    assert (calm.returncode, killed.returncode) == (0, 0), killed.stderr
    assert "killed by SIGKILL" in killed.stderr
    assert killed.stdout == "generation 1: 3 ranks continue after step 9\n" + calm.stdout


@pytest.mark.peers
@pytest.mark.parametrize("backend", ["simulated", "shm", "tcp"])
def test_torch_ddp_has_the_losses_of_one_process(run_python, backend):
    found = []
    for size in SIZES:
        answer = run_python(
            *["-m", "oneaccord", "run", "-n", str(size), "--no-prefix", "--backend", backend, GALLERY / "torch_ddp.py"]
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        found.append([float(line.split()[3]) for line in answer.stdout.splitlines() if line.startswith("epoch")])
    assert len(found[0]) == 10
    assert found[0][-1] < 0.1
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=0, atol=2e-3)
