"""Train the network of digits.py in parts: save, stop, and continue later, on another number of ranks.

The state of a training is one tree: weights, the moments of Adam, the position in the data. A thread writes it while the training
continues. Any number of ranks can load it, even in the middle of an epoch, and the training goes the way of one that was never stopped.

    oneaccord run -n 4 examples/gallery/checkpoint.py --folder ckpt --steps 100
    oneaccord run -n 2 examples/gallery/checkpoint.py --folder ckpt --steps 200
"""

import argparse
from itertools import chain, count, islice
from typing import Any

from digits import backward, start
from digits_data import BATCH, Floats, load

import oneaccord as oa
import oneaccord_parallel as mp


def main(group: oa.Group, folder: str, steps: int) -> tuple[dict[str, Floats], int, list[float]]:
    """Train up to a step; return the weights, the step at which this run began, and the loss of each step since then."""
    images, labels, _, _ = load()
    adam, sampler = mp.Adam(2e-3), mp.Sampler(len(images), group, max(1, BATCH // group.world_size))
    weights = start()
    moments: dict[str, dict[str, Any]] = {name: {} for name in weights}
    for name, weight in weights.items():
        adam.prepare(weight, moments[name])  # so that there is something to load into

    def state() -> dict[str, Any]:
        return {"weights": weights, "moments": moments, "sampler": sampler.state()}

    first, losses = 0, []
    found = mp.latest(folder, group)
    if found is not None and found.step is not None:
        first = found.step
        sampler.load_state(mp.load(found, like=state(), group=group)["sampler"])  # arrays are overwritten in place

    sync = mp.GradientSync(group, like=weights)
    batches = chain.from_iterable(sampler.epoch(epoch) for epoch in count(sampler.epoch_number))
    with mp.AsyncSaver(folder, group, keep=2) as saver:
        for done, mine in enumerate(islice(batches, max(0, steps - first)), first + 1):
            with sync.step(weight=len(mine)) as step:
                loss = backward(weights, images[mine], labels[mine], step)
            for name, gradient in step.gradients.items():
                adam(weights[name], gradient, moments[name])
            loss, samples = group.all_reduce([loss, float(len(mine))]).tolist()
            losses.append(loss / samples)
            if done % 50 == 0 or done == steps:
                saver.save(state(), step=done)
    return weights, first, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, save, and continue.")
    parser.add_argument("--folder", required=True, help="save here, and continue from what is here")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    options = parser.parse_args()
    with oa.init() as group:
        _, first, losses = main(group, options.folder, options.steps)
        if group.rank == 0:
            print(f"from step {first} to {options.steps} on {group.world_size} ranks: the last loss is {losses[-1]:.5f}")
