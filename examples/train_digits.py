"""Train a small network to read handwritten digits, data parallel.

Each rank works on its share of every batch; the gradients are averaged over all ranks while the backward pass still runs, so that all ranks
take the same step.

    python examples/train_digits.py                                                  one process
    oneaccord run -n 4 --config examples/oneaccord.toml examples/train_digits.py     four
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import oneaccord as oa
import oneaccord_parallel as mp

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

DATA = Path(__file__).parent / "data" / "digits.csv"
PIXELS, HIDDEN, DIGITS = 64, 64, 10
EPOCHS, BATCH = 30, 64
LEARNING_RATE, MOMENTUM = 0.1, 0.9
WANTED_ACCURACY = 0.95


def start(rng: np.random.Generator) -> dict[str, Floats]:
    """Return the first weights: two layers."""
    return {
        "w1": rng.normal(0.0, np.sqrt(2.0 / PIXELS), (PIXELS, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0.0, np.sqrt(1.0 / HIDDEN), (HIDDEN, DIGITS)).astype(np.float32),
        "b2": np.zeros(DIGITS, np.float32),
    }


def scores(weights: dict[str, Floats], images: Floats) -> tuple[Floats, Floats]:
    """Return the hidden layer (n, HIDDEN) and the scores (n, DIGITS) of ``images`` (n, PIXELS)."""
    hidden = np.maximum(images @ weights["w1"] + weights["b1"], 0.0)
    return hidden, hidden @ weights["w2"] + weights["b2"]


def backward(weights: dict[str, Floats], images: Floats, labels: Labels, step: mp.Step) -> float:
    """Give the mean gradients to ``step``, each as soon as it is there; return the loss, summed over the images."""
    hidden, score = scores(weights, images)
    chance = np.exp(score - score.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    each = np.arange(len(labels))
    loss = -np.log(chance[each, labels]).sum()

    chance[each, labels] -= 1.0  # softmax and cross-entropy together: the gradient of the scores
    chance /= len(labels)
    step.ready("w2", hidden.T @ chance)
    step.ready("b2", chance.sum(axis=0))
    back = (chance @ weights["w2"].T) * (hidden > 0.0)
    step.ready("w1", images.T @ back)
    step.ready("b1", back.sum(axis=0))
    return float(loss)


def load() -> tuple[Floats, Labels, Floats, Labels]:
    """Return images and labels to train on (80 %) and to test with; the same split on every rank."""
    table = np.loadtxt(DATA, delimiter=",", dtype=np.float32)
    table = table[np.random.default_rng(0).permutation(len(table))]
    images, labels = table[:, :-1] / 16.0, table[:, -1].astype(np.int64)
    cut = len(table) * 8 // 10
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def train(group: oa.Group, images: Floats, labels: Labels) -> dict[str, Floats]:
    """Return weights trained by gradient descent with momentum; they are the same on all ranks."""
    weights = mp.broadcast(start(np.random.default_rng(group.rank)), group)  # rank 0's, on all ranks
    sync = mp.GradientSync(group, like=weights)
    sampler = mp.Sampler(len(images), group, max(1, BATCH // group.world_size), seed=1)
    optimizer = mp.SGD(LEARNING_RATE, MOMENTUM)
    state: dict[str, dict[str, Floats]] = {name: {} for name in weights}
    for epoch in range(EPOCHS):
        loss = 0.0
        for mine in sampler.epoch(epoch):
            # Shares differ by one image, or are empty. The weight makes the same step of them as one process would.
            with sync.step(weight=len(mine)) as step:
                if len(mine):
                    loss += backward(weights, images[mine], labels[mine], step)
            for name, gradient in step.gradients.items():
                optimizer(weights[name], gradient, state[name])
        loss = float(group.all_reduce(loss)) / len(images)
        if group.rank == 0:
            show_progress(epoch + 1, loss)
    return weights


def show_progress(epoch: int, loss: float) -> None:
    """Draw the progress bar: one line that changes on a terminal, a line every few epochs elsewhere."""
    last = epoch == EPOCHS
    width = 30
    bar = ("#" * (epoch * width // EPOCHS)).ljust(width, ".")
    line = f"[{bar}] epoch {epoch:2d}/{EPOCHS}  loss {loss:.4f}"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if last else "", flush=True)
    elif last or epoch % 5 == 0:
        print(line, flush=True)


def accuracy(group: oa.Group, weights: dict[str, Floats], images: Floats, labels: Labels) -> float:
    """Return the share of images that the network reads right; each rank looks at its part of them."""
    mine = mp.shard_indices(len(images), group, shuffle=False)
    right = scores(weights, images[mine])[1].argmax(axis=1) == labels[mine]
    return float(group.all_reduce(int(right.sum())) / len(labels))


def same_everywhere(group: oa.Group, weights: dict[str, Floats]) -> bool:
    """Tell whether all ranks hold the very same bits."""
    digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()
    return len(set(group.all_gather_object(digest))) == 1


def main() -> int:
    """Train, test, report on rank 0; return the exit code, the same on every rank."""
    started = time.perf_counter()
    with oa.init() as group:
        train_images, train_labels, test_images, test_labels = load()
        if group.rank == 0:
            print(f"{len(train_images)} images to train on, {len(test_images)} to test with, {group.world_size} rank(s)")
        weights = train(group, train_images, train_labels)
        reached = accuracy(group, weights, test_images, test_labels)
        same = same_everywhere(group, weights)
        if group.rank == 0:
            print(f"test accuracy {reached:.4f} (wanted: at least {WANTED_ACCURACY}), {time.perf_counter() - started:.1f} s")
            print(f"weights on all {group.world_size} rank(s): {'bit-identical' if same else 'DIFFERENT'}")
    return 0 if same and reached >= WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
