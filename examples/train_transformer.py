"""Train a small transformer to write like Python's reference manual: data, pipeline and tensor parallel at once, by hand in NumPy.

The ranks lie on a mesh of three axes. Along "dp" each has its share of a batch, along "pp" some of the layers, and along "tp" some of the
heads and columns of a layer. PLACEMENTS says so for each array; the rest follows from it.

    python examples/train_transformer.py                                                    one process
    oneaccord run -n 4 examples/train_transformer.py --pp 2 --tp 2                           four
    oneaccord run -n 8 --backend simulated examples/train_transformer.py --pp 2 --tp 2       eight, in a simulated world

The losses are those of one process up to rounding: within 1e-12 in float64 over all 300 steps. In float32 they are within 1e-3 for 50 steps;
then it shows that Adam gives gradients that are all rounding the same weight as others. A checkpoint goes on with any other mesh, and in
train_transformer_torch.py too:

    oneaccord run -n 4 examples/train_transformer.py --pp 2 --tp 2 --checkpoint here --steps 150
    oneaccord run -n 2 examples/train_transformer.py --checkpoint here --steps 300 --plot losses.png
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, count, islice
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt

import oneaccord as oa
import oneaccord_parallel as mp

Array = Any  # of NumPy, or in train_transformer_torch.py of torch
Gradients = dict[str, Array]
Vjp = Callable[[Array], tuple[Array, Gradients]]  # from the gradient of a result to those of its input and of its weights

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
VOCABULARY, CONTEXT = len(CHARACTERS), 64
LAYERS, HEADS, WIDTH = 4, 4, 64
BATCH, MICROBATCHES = 32, 4
LEARNING_RATE, LARGEST_GRADIENT = 3e-3, 1.0
WANTED_LOSS = 2.2  # after 300 steps; that of guessing is log(96) = 4.56

SHAPES: dict[str, tuple[int, ...]] = {
    "tokens": (VOCABULARY, WIDTH),
    "positions": (CONTEXT, WIDTH),
    "norm1": (LAYERS, WIDTH),
    "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),  # queries, keys and values
    "out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH),
    "norm2": (LAYERS, WIDTH),
    "up": (LAYERS, WIDTH, 4 * WIDTH),
    "down": (LAYERS, 4 * WIDTH, WIDTH),
    "norm": (WIDTH,),
    "head": (WIDTH, VOCABULARY),
}


def placements(stages: int) -> dict[str, list[mp.Placement]]:
    """Return how each array lies along "dp", "pp" and "tp": layers on the stages in turn, what precedes them on the first, the rest on the last."""

    def on_stage(stage: int, name: str) -> mp.Shard:
        return mp.Shard(0, [SHAPES[name][0] if each == stage else 0 for each in range(stages)])

    whole, layers = mp.Replicate(), mp.Shard(0)
    return {
        "tokens": [whole, on_stage(0, "tokens"), mp.Shard(0)],
        "positions": [whole, on_stage(0, "positions"), whole],
        "norm1": [whole, layers, whole],
        "qkv": [whole, layers, mp.Shard(3)],
        "out": [whole, layers, mp.Shard(1)],
        "norm2": [whole, layers, whole],
        "up": [whole, layers, mp.Shard(2)],
        "down": [whole, layers, mp.Shard(1)],
        "norm": [whole, on_stage(stages - 1, "norm"), whole],
        "head": [whole, on_stage(stages - 1, "head"), mp.Shard(1)],
    }


def start(dtype: str) -> Gradients:
    """Return the first weights, whole and the same on every rank."""
    rng = np.random.default_rng(0)
    return {
        name: np.ones(shape, dtype) if "norm" in name else rng.normal(0.0, 0.08, shape).astype(dtype)
        for name, shape in SHAPES.items()
    }


def normalize(x: Array, gain: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """RMSNorm over the last axis (Zhang and Sennrich 2019)."""
    scale = 1.0 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    unit = x * scale

    def vjp(dy: Array) -> tuple[Array, Array]:
        d_unit = dy * gain
        dx = scale * (d_unit - unit * (d_unit * unit).mean(axis=-1, keepdims=True))
        return dx, (dy * unit).sum(axis=(0, 1))

    return unit * gain, vjp


def attend(qkv: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Causal attention of each head: from (batch, time, 3, heads, k) to (batch, time, heads, k)."""
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    root = np.sqrt(q.shape[-1]).astype(q.dtype)
    time = q.shape[2]
    score = np.where(np.tri(time, dtype=bool), q @ k.swapaxes(2, 3) / root, -np.inf)
    share = np.exp(score - score.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)

    def vjp(dy: Array) -> Array:
        dy = dy.swapaxes(1, 2)
        d_share = dy @ v.swapaxes(2, 3)
        d_score = share * (d_share - (d_share * share).sum(axis=-1, keepdims=True)) / root
        parts = d_score @ k, d_score.swapaxes(2, 3) @ q, share.swapaxes(2, 3) @ dy
        return np.stack(parts).transpose(1, 3, 0, 2, 4)

    return (share @ v).swapaxes(1, 2), vjp


def block(x: Array, w: Gradients, tp: oa.Group) -> tuple[Array, Vjp]:
    """One layer: attention, and two linear layers with a ReLU between them; each adds to what comes in. The ranks of ``tp`` share it."""
    batch, time, width = x.shape
    heads = w["qkv"].shape[-2:]
    normal1, to_x1 = normalize(x, w["norm1"])
    qkv, to_normal1 = mp.column_linear(normal1, w["qkv"].reshape(width, -1), None, tp)
    attended, to_qkv = attend(qkv.reshape(batch, time, 3, *heads))
    added, to_attended = mp.row_linear(attended.reshape(batch, time, -1), w["out"].reshape(-1, width), None, tp)
    x = x + added
    normal2, to_x2 = normalize(x, w["norm2"])
    hidden, to_normal2 = mp.column_linear(normal2, w["up"], None, tp)
    added, to_hidden = mp.row_linear(np.maximum(hidden, 0.0), w["down"], None, tp)

    def vjp(dy: Array) -> tuple[Array, Gradients]:
        found: Gradients = {}
        d_hidden, found["down"], _ = to_hidden(dy)
        d_normal2, found["up"], _ = to_normal2(d_hidden * (hidden > 0.0))
        dx, found["norm2"] = to_x2(d_normal2)
        dy = dy + dx
        d_attended, d_out, _ = to_attended(dy)
        d_qkv = to_qkv(d_attended.reshape(batch, time, *heads))
        d_normal1, d_weight, _ = to_normal1(d_qkv.reshape(batch, time, -1))
        dx, found["norm1"] = to_x1(d_normal1)
        found["qkv"], found["out"] = d_weight.reshape(w["qkv"].shape), d_out.reshape(w["out"].shape)
        return dy + dx, found

    return x + added, vjp


class Model:
    """What one rank has of the model: some of its layers, and of these some of the heads and columns."""

    def __init__(self, weights: Gradients, tp: oa.Group) -> None:
        self.weights = weights
        self.tp = tp
        # An array that belongs to another stage is empty here.
        self.first, self.last = len(weights["positions"]) > 0, len(weights["norm"]) > 0

    def forward(self, x: Array) -> tuple[Array, list[tuple[Any, Vjp]]]:
        """Return the activation, or on the last stage this rank's logits; and what makes the gradients."""
        back: list[tuple[Any, Vjp]] = []
        if self.first:
            x, vjp = self._embed(x)
            back.append((..., vjp))
        for layer in range(len(self.weights["norm1"])):
            own = {name: self.weights[name][layer] for name in ("norm1", "qkv", "out", "norm2", "up", "down")}
            x, vjp = block(x, own, self.tp)
            back.append((layer, vjp))
        if self.last:
            x, vjp = self._classify(x)
            back.append((..., vjp))
        return x, back

    def backward(self, back: list[tuple[Any, Vjp]], dy: Array) -> tuple[Array, Gradients]:
        """Return the gradient of the input, and those of all weights."""
        gradients = {name: np.zeros_like(weight) for name, weight in self.weights.items()}
        for place, vjp in reversed(back):
            dy, found = vjp(dy)
            for name, gradient in found.items():
                gradients[name][place] = gradient
        return dy, gradients

    def loss(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        """Return the mean cross-entropy, and the gradient of the logits."""
        value, vjp = mp.vocab_parallel_cross_entropy(logits, targets, self.tp)
        return value, vjp()

    def stage(self) -> mp.Stage:
        """Return the two functions that a pipeline calls."""
        return mp.Stage(self.forward, self.backward)

    def _embed(self, ids: Array) -> tuple[Array, Vjp]:
        x, to_tokens = mp.vocab_parallel_embedding(ids, self.weights["tokens"], self.tp)
        time = ids.shape[1]

        def vjp(dy: Array) -> tuple[None, Gradients]:
            positions = np.zeros_like(self.weights["positions"])
            positions[:time] = dy.sum(axis=0)
            return None, {"tokens": to_tokens(dy), "positions": positions}

        return x + self.weights["positions"][:time], vjp

    def _classify(self, x: Array) -> tuple[Array, Vjp]:
        normal, to_x = normalize(x, self.weights["norm"])
        logits, to_normal = mp.column_linear(normal, self.weights["head"], None, self.tp)

        def vjp(dy: Array) -> tuple[Array, Gradients]:
            d_normal, head, _ = to_normal(dy)
            dx, norm = to_x(d_normal)
            return dx, {"norm": norm, "head": head}

        return logits, vjp


def load() -> npt.NDArray[np.int64]:
    """Return the manual that comes with Python in windows of CONTEXT + 1 characters, by their numbers; as many as fill whole batches."""
    number = {character: place for place, character in enumerate(CHARACTERS)}
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = np.array([number.get(character, number["?"]) for character in text])
    batches = len(ids) // ((CONTEXT + 1) * BATCH)
    return ids[: batches * BATCH * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)


class Training:
    """Weights, optimizer and data of this rank, wherever it is on the mesh."""

    def __init__(
        self, mesh: oa.DeviceMesh, model: type[Model], options: argparse.Namespace, convert: Callable[..., Array]
    ) -> None:
        self.mesh, self.dp, self.tp = mesh, mesh.group("dp"), mesh.group("tp")
        self.windows = load()
        self.where = placements(mesh.shape[1])
        self.weights = {
            name: mp.distribute(convert(array), mesh, self.where[name]) for name, array in start(options.dtype).items()
        }
        self.adam = mp.Adam(LEARNING_RATE)
        self.states: dict[str, dict[str, Array]] = {name: {} for name in self.weights}
        for name, weight in self.weights.items():
            self.adam.prepare(weight.local, self.states[name])
        self.model = model({name: weight.local for name, weight in self.weights.items()}, self.tp)
        plan = mp.schedule(options.schedule, mesh.shape[1], MICROBATCHES)
        self.pipeline = mp.Pipeline(mesh.group("pp"), [self.model.stage()], plan)
        self.sync = mp.GradientSync(self.dp, like=self.model.weights)
        self.sampler = mp.Sampler(len(self.windows), self.dp, BATCH // self.dp.world_size)
        self.losses: list[float] = []

    def step(self, mine: npt.NDArray[np.int64]) -> None:
        """Train with this rank's share of a batch."""
        batch = self.windows[mine]
        loss, (gradients,) = self.pipeline.step(batch[:, :-1], batch[:, 1:], loss=self.model.loss)
        gradients = self.sync(gradients, weight=len(mine))
        gradients, _ = mp.clip_by_global_norm(gradients, LARGEST_GRADIENT, self.mesh, self._divided)
        for name, weight in self.weights.items():
            self.adam(weight.local, gradients[name], self.states[name])
        self.losses.append(float(self.dp.all_reduce(loss, "mean")))

    def tree(self) -> dict[str, Any]:
        """Return what a checkpoint holds; the arrays say how they lie on the mesh, so that any other mesh can load them."""
        states = {
            name: {key: weight.with_local(value) if value.shape else value for key, value in self.states[name].items()}
            for name, weight in self.weights.items()
        }
        return {"weights": self.weights, "adam": states, "sampler": self.sampler.state()}

    def resume(self, folder: str) -> None:
        """Go on from the newest checkpoint in a folder, if there is one."""
        found = mp.latest(folder, self.mesh.parent)
        if found is not None:
            tree = mp.load(found, like=self.tree(), group=self.mesh.parent)  # into the arrays that are there
            self.sampler.load_state(tree["sampler"])
            self.losses = list(mp.describe(found).extra)

    def _divided(self, name: str, array: Array) -> set[str]:
        """Tell along which axes of the mesh an array is divided, so that the norm counts each element once."""
        return {axis for axis, each in zip(self.mesh.names, self.where[name], strict=True) if isinstance(each, mp.Shard)}


def sample(training: Training, length: int) -> str:
    """Let the model write, on rank 0 alone: every rank gives its part of the weights, and the others are through then."""
    whole = {name: weight.full() for name, weight in training.weights.items()}
    alone = training.mesh.parent.split(0 if training.mesh.parent.rank == 0 else None)
    if alone is None:
        return ""
    with alone:
        model = type(training.model)(whole, alone)
        rng = np.random.default_rng(0)
        ids = [CHARACTERS.index("T")]
        for _ in range(length):
            logits, _ = model.forward(np.array([ids[-CONTEXT:]]))
            last = np.asarray(logits)[0, -1].astype(np.float64)
            chance = np.exp((last - last.max()) / 0.8)
            ids.append(int(rng.choice(VOCABULARY, p=chance / chance.sum())))
    return "".join(CHARACTERS[each] for each in ids)


def show_progress(step: int, steps: int, loss: float) -> None:
    """Draw the progress bar: one line that changes on a terminal, a line every few steps elsewhere."""
    bar = ("#" * (step * 30 // steps)).ljust(30, ".")
    line = f"[{bar}] step {step:{len(str(steps))}}/{steps}  loss {loss:.4f}"
    if sys.stdout.isatty():
        print(f"\r{line}", end="\n" if step == steps else "", flush=True)
    elif step == steps or step % max(1, steps // 10) == 0:
        print(line, flush=True)


def plot(losses: list[float], path: str) -> None:
    """Draw the loss of each step. The ending of the path chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.axhline(np.log(VOCABULARY), color="grey", linestyle=":", label="guessing")
    axes.set(xlabel="step", ylabel="loss (nats per character)")
    axes.legend()
    figure.savefig(path)


def arguments(text: str | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=1, help="into how many stages the layers are divided")
    parser.add_argument("--tp", type=int, default=1, help="among how many ranks each layer is divided")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline: 1f1b, gpipe, ...")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save here, and go on from what is here")
    parser.add_argument("--sample", type=int, default=200, help="how many characters the model writes in the end")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses: a file of matplotlib, such as losses.png")
    return parser.parse_args()


def run(training: Training, options: argparse.Namespace) -> None:
    """Train until there have been as many steps as asked for, and save every 100."""
    group, sampler, losses, steps = training.mesh.parent, training.sampler, training.losses, options.steps
    batches = chain.from_iterable(sampler.epoch(epoch) for epoch in count(sampler.epoch_number))
    with mp.AsyncSaver(options.checkpoint, group, keep=2) if options.checkpoint else nullcontext() as saver:
        for mine in islice(batches, max(0, steps - len(losses))):
            training.step(mine)
            if group.rank == 0:
                show_progress(len(losses), steps, losses[-1])
            if saver is not None and (len(losses) % 100 == 0 or len(losses) == steps):
                saver.save(training.tree(), step=len(losses), extra=losses)


def main(model: type[Model] = Model, convert: Callable[..., Array] = np.asarray, text: str | None = __doc__) -> int:
    """Train, show, save; return the exit code, the same on every rank."""
    options = arguments(text)
    with oa.init() as group, oa.DeviceMesh(group, (-1, options.pp, options.tp), ("dp", "pp", "tp")) as mesh:
        if BATCH % (mesh.shape[0] * MICROBATCHES):
            raise oa.UsageError(
                f"dp={mesh.shape[0]} ranks cannot share the {BATCH // MICROBATCHES} sequences of a microbatch evenly; start another number of "
                "ranks, or give another --pp or --tp"
            )
        training = Training(mesh, model, options, convert)
        if options.checkpoint:
            training.resume(options.checkpoint)
        if group.rank == 0:
            grid = " x ".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.shape, strict=True))
            print(f"{sum(map(math.prod, SHAPES.values()))} weights on {grid}, from step {len(training.losses)}", flush=True)
        run(training, options)
        written = sample(training, options.sample)
        if group.rank == 0:
            print(f"\n{written}\n")
            if options.plot:
                plot(training.losses, options.plot)
    last = float(np.mean(training.losses[-10:]))
    return 0 if options.steps < 300 or last < WANTED_LOSS else 1


if __name__ == "__main__":
    sys.exit(main())
