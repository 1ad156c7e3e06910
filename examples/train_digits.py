"""Train a small network to read handwritten digits, data parallel.

Each rank works on its share of every batch; the gradients are added up over all ranks, so that all ranks take the same step.

    python examples/train_digits.py                                                  one process
    manyhands run -n 4 --config examples/manyhands.toml examples/train_digits.py     four
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import manyhands as mh

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

DATA = Path(__file__).parent / "data" / "digits.csv"
PIXELS, HIDDEN, DIGITS = 64, 64, 10
EPOCHS, BATCH = 30, 64
LEARNING_RATE, MOMENTUM = 0.1, 0.9
WANTED_ACCURACY = 0.95


class Network:
    """Two layers whose weights, all together, are one flat array: one message carries them."""

    def __init__(self) -> None:
        shapes = [(PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, DIGITS), (DIGITS,)]
        self.weights: Floats = np.zeros(sum(int(np.prod(shape)) for shape in shapes), np.float32)
        self.shapes = shapes

    def split(self, flat: Floats) -> list[Floats]:
        """Return views of ``flat``, an array laid out as the weights are: first layer, its bias, second layer, its bias."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), self.shapes, strict=True)]

    def start(self, rng: np.random.Generator) -> None:
        """Draw the first weights."""
        first, _, second, _ = self.split(self.weights)
        first[:] = rng.normal(0.0, np.sqrt(2.0 / PIXELS), first.shape)
        second[:] = rng.normal(0.0, np.sqrt(1.0 / HIDDEN), second.shape)

    def scores(self, images: Floats) -> tuple[Floats, Floats]:
        """Return the hidden layer (n, HIDDEN) and the scores (n, DIGITS) of ``images`` (n, PIXELS)."""
        first, first_bias, second, second_bias = self.split(self.weights)
        hidden = np.maximum(images @ first + first_bias, 0.0)
        return hidden, hidden @ second + second_bias

    def gradient(self, images: Floats, labels: Labels, out: Floats) -> float:
        """Write the gradient, summed over the images, into ``out``; return the loss, summed likewise."""
        hidden, scores = self.scores(images)
        chance = np.exp(scores - scores.max(axis=1, keepdims=True))
        chance /= chance.sum(axis=1, keepdims=True)
        each = np.arange(len(labels))
        loss = -np.log(chance[each, labels]).sum()

        chance[each, labels] -= 1.0  # softmax and cross-entropy together: the gradient of the scores
        first, first_bias, second, second_bias = self.split(out)
        second[:] = hidden.T @ chance
        second_bias[:] = chance.sum(axis=0)
        back = (chance @ self.split(self.weights)[2].T) * (hidden > 0.0)
        first[:] = images.T @ back
        first_bias[:] = back.sum(axis=0)
        return float(loss)


def load() -> tuple[Floats, Labels, Floats, Labels]:
    """Return images and labels to train on (80 %) and to test with; the same split on every rank."""
    table = np.loadtxt(DATA, delimiter=",", dtype=np.float32)
    table = table[np.random.default_rng(0).permutation(len(table))]
    images, labels = table[:, :-1] / 16.0, table[:, -1].astype(np.int64)
    cut = len(table) * 8 // 10
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def train(group: mh.Group, network: Network, images: Floats, labels: Labels) -> None:
    """Train ``network`` by gradient descent with momentum; its weights stay the same on all ranks."""
    network.start(np.random.default_rng(group.rank))  # each rank draws its own,
    group.broadcast(network.weights, root=0, out=network.weights)  # and all take those of rank 0

    velocity = np.zeros_like(network.weights)
    order = np.random.default_rng(1)  # the same on every rank: all see the same batches
    sums = np.empty(network.weights.size + 2, np.float32)  # the gradient, the loss and the number of images
    for epoch in range(1, EPOCHS + 1):
        total_loss = 0.0
        shuffled = order.permutation(len(images))
        for start in range(0, len(images), BATCH):
            mine = shuffled[start : start + BATCH][group.rank :: group.world_size]
            sums[-2] = network.gradient(images[mine], labels[mine], out=sums[:-2])
            sums[-1] = len(mine)
            # Shares may differ by one image, or be empty. Sums over all ranks, divided by the number of images over all
            # ranks, make the same step as one process would.
            group.all_reduce(sums, op="sum", out=sums)
            velocity *= MOMENTUM
            velocity -= LEARNING_RATE * sums[:-2] / sums[-1]
            network.weights += velocity
            total_loss += float(sums[-2])
        if group.rank == 0:
            show_progress(epoch, total_loss / len(images))


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


def accuracy(group: mh.Group, network: Network, images: Floats, labels: Labels) -> float:
    """Return the share of images that the network reads right; each rank looks at its part of them."""
    mine = slice(group.rank, None, group.world_size)
    right = network.scores(images[mine])[1].argmax(axis=1) == labels[mine]
    return float(group.all_reduce(int(right.sum())) / len(labels))


def same_everywhere(group: mh.Group, weights: Floats) -> bool:
    """Tell whether all ranks hold the very same bits."""
    digest = np.frombuffer(hashlib.sha256(weights.tobytes()).digest(), np.uint8)
    digests = group.all_gather(digest).reshape(group.world_size, digest.size)
    return bool((digests == digests[0]).all())


def main() -> int:
    """Train, test, report on rank 0; return the exit code, the same on every rank."""
    started = time.perf_counter()
    with mh.init() as group:
        train_images, train_labels, test_images, test_labels = load()
        if group.rank == 0:
            print(f"{len(train_images)} images to train on, {len(test_images)} to test with, {group.world_size} rank(s)")
        network = Network()
        train(group, network, train_images, train_labels)
        reached = accuracy(group, network, test_images, test_labels)
        same = same_everywhere(group, network.weights)
        if group.rank == 0:
            print(f"test accuracy {reached:.4f} (wanted: at least {WANTED_ACCURACY}), {time.perf_counter() - started:.1f} s")
            print(f"weights on all {group.world_size} rank(s): {'bit-identical' if same else 'DIFFERENT'}")
    return 0 if same and reached >= WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
