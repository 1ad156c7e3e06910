"""Train a small network to read handwritten digits, data parallel, with a backward pass by hand.

Each rank works on its share of every batch. The gradients are averaged over all ranks while the backward pass still runs, so all ranks
take the same step: that of one process which works on the whole batch.

    oneaccord run -n 4 examples/gallery/digits.py
"""

import sys

import numpy as np
from digits_data import BATCH, Floats, Labels, load

import oneaccord as oa
import oneaccord_parallel as mp


def start(hidden: int = 64) -> dict[str, Floats]:
    """Return the first weights: two layers."""
    rng = np.random.default_rng(0)
    w1, w2 = rng.normal(0.0, 0.18, (64, hidden)), rng.normal(0.0, 0.12, (hidden, 10))
    weights = {"w1": w1, "b1": np.zeros(hidden), "w2": w2, "b2": np.zeros(10)}
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


def scores(weights: dict[str, Floats], images: Floats) -> tuple[Floats, Floats]:
    """Return the hidden layer and the scores of the ten digits."""
    hidden = np.maximum(images @ weights["w1"] + weights["b1"], 0.0)
    return hidden, hidden @ weights["w2"] + weights["b2"]


def backward(weights: dict[str, Floats], images: Floats, labels: Labels, step: mp.Step) -> float:
    """Give the mean gradients to ``step``, each as soon as it is there; return the sum of the losses."""
    hidden, score = scores(weights, images)
    chance = np.exp(score - score.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    right = chance[np.arange(len(labels)), labels]
    error = (chance - np.eye(10, dtype=np.float32)[labels]) / max(1, len(labels))  # the gradient of the scores
    step.ready("w2", hidden.T @ error)  # is sent from here on
    step.ready("b2", error.sum(axis=0))
    error = (error @ weights["w2"].T) * (hidden > 0.0)
    step.ready("w1", images.T @ error)
    step.ready("b1", error.sum(axis=0))
    return float(-np.log(right).sum())


def main(group: oa.Group, epochs: int = 30) -> tuple[float, list[float]]:
    """Return the accuracy on images that were not trained on, and the loss of each epoch; the same on all ranks."""
    images, labels, test_images, test_labels = load()
    weights = mp.broadcast(start(), group)
    sync, sgd = mp.GradientSync(group, like=weights), mp.SGD(0.1, momentum=0.9)
    state: dict[str, dict[str, Floats]] = {name: {} for name in weights}
    losses = []
    for epoch in range(epochs):
        loss = 0.0
        for mine in mp.Sampler(len(images), group, max(1, BATCH // group.world_size)).epoch(epoch):
            with sync.step(weight=len(mine)) as step:  # the last shares of an epoch may be smaller, or empty
                loss += backward(weights, images[mine], labels[mine], step)
            for name, gradient in step.gradients.items():
                sgd(weights[name], gradient, state[name])
        losses.append(float(group.all_reduce(loss)) / len(images))
        if group.rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1:2}: loss {losses[-1]:.4f}", flush=True)
    return float((scores(weights, test_images)[1].argmax(axis=1) == test_labels).mean()), losses


if __name__ == "__main__":
    with oa.init() as group:
        accuracy, _ = main(group)
        if group.rank == 0:
            print(f"accuracy {accuracy:.1%} on images that were not trained on")
    sys.exit(0 if accuracy > 0.95 else 1)
