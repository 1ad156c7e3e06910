"""Train the network of train_digits.py, and go on when ranks die: with new ones in their place, or with those that are left.

    oneaccord run -n 4 --max-restarts 10 examples/train_digits_elastic.py

Kill any of the processes meanwhile. What differs from train_digits.py is marked.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from train_digits import (
    BATCH,
    EPOCHS,
    LEARNING_RATE,
    MOMENTUM,
    WANTED_ACCURACY,
    accuracy,
    backward,
    load,
    same_everywhere,
    start,
)

import oneaccord as oa
import oneaccord_parallel as mp


def first() -> dict[str, Any]:  # <- all that the next step depends on
    """Return what training begins with."""
    weights = start(np.random.default_rng(0))
    return {"epoch": 0, "batch": 0, "weights": weights, "momentum": {name: {} for name in weights}}


@oa.elastic(state=first)  # <- calls it again, with another group, where a rank has died
def train(group: oa.Group, generation: int, state: oa.ElasticState) -> float:
    """Train from where the state is to the end; return the accuracy."""
    images, labels, test_images, test_labels = load()
    weights = state["weights"]
    sync = mp.GradientSync(group, like=weights)
    sampler = mp.Sampler(len(images), group, max(1, BATCH // group.world_size), seed=1)
    optimizer = mp.SGD(LEARNING_RATE, MOMENTUM)
    if generation and group.rank == 0:
        print(f"generation {generation}: {group.world_size} ranks go on from epoch {state['epoch']}", flush=True)
    while state["epoch"] < EPOCHS:
        for mine in list(sampler.epoch(state["epoch"]))[state["batch"] :]:
            with sync.step(weight=len(mine)) as step:
                if len(mine):
                    backward(weights, images[mine], labels[mine], step)
            for name, gradient in step.gradients.items():
                optimizer(weights[name], gradient, state["momentum"][name])
            state["batch"] += 1
            state.commit()  # <- from here on all go on after a failure
        state["epoch"], state["batch"] = state["epoch"] + 1, 0
    reached = accuracy(group, weights, test_images, test_labels)
    same = same_everywhere(group, weights)
    if group.rank == 0:
        print(f"test accuracy {reached:.4f} (wanted: at least {WANTED_ACCURACY})")
        print(f"weights on all {group.world_size} rank(s): {'bit-identical' if same else 'DIFFERENT'}")
    return reached if same else 0.0


if __name__ == "__main__":
    sys.exit(0 if train() >= WANTED_ACCURACY else 1)
