"""Train the network of digits.py, and continue when ranks die: with replacements, or with the ranks that are left.

The function is called again, with a new group, after each failure. Its state holds all that the next step depends on, and `commit`
marks a step as done. No disk is involved. With --kill-at, one rank kills itself after so many steps; the weights at the end are those
of a run in which nobody dies.

    oneaccord run -n 4 --max-restarts 1 examples/gallery/elastic.py --kill-at 100
"""

import argparse
import os
import signal
from typing import Any

from digits import backward, scores, start
from digits_data import BATCH, load

import oneaccord as oa
import oneaccord_parallel as mp


def first() -> dict[str, Any]:
    """Return what training begins with."""
    weights = start()
    return {"step": 0, "epoch": 0, "batch": 0, "weights": weights, "momentum": {name: {} for name in weights}}


@oa.elastic(state=first)
def main(group: oa.Group, generation: int, state: oa.ElasticState, epochs: int = 10, kill_at: int = -1) -> float:
    """Train from where the state is to the end; return the accuracy."""
    images, labels, test_images, test_labels = load()
    weights = state["weights"]
    sync, sgd = mp.GradientSync(group, like=weights), mp.SGD(0.1, momentum=0.9)
    if generation and group.rank == 0:
        print(f"generation {generation}: {group.world_size} ranks continue after step {state['step']}", flush=True)
    while state["epoch"] < epochs:
        sampler = mp.Sampler(len(images), group, max(1, BATCH // group.world_size))
        for mine in list(sampler.epoch(state["epoch"]))[state["batch"] :]:
            with sync.step(weight=len(mine)) as step:
                backward(weights, images[mine], labels[mine], step)
            for name, gradient in step.gradients.items():
                sgd(weights[name], gradient, state["momentum"][name])
            state["step"], state["batch"] = state["step"] + 1, state["batch"] + 1
            state.commit()  # after a failure, all continue from here
            if state["step"] == kill_at and generation == 0 and group.rank == group.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        state["epoch"], state["batch"] = state["epoch"] + 1, 0
    accuracy = float((scores(weights, test_images)[1].argmax(axis=1) == test_labels).mean())
    if group.rank == 0:
        total = sum(float(abs(weight).sum()) for weight in weights.values())
        print(f"{state['step']} steps, accuracy {accuracy:.1%}, sum of all weights {total:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, and continue when ranks die.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--kill-at", type=int, default=-1, metavar="STEP", help="after this step, the last rank kills itself")
    options = parser.parse_args()
    main(options.epochs, options.kill_at)
