"""The images on which digits.py, checkpoint.py, elastic.py and sharded.py train; it is no program itself."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
BATCH = 60  # of all ranks together


def load() -> tuple[Floats, Labels, Floats, Labels]:
    """Return images of 8 x 8 pixels and labels to train on (80 %) and to test with; the same split on every rank."""
    table = np.loadtxt(Path(__file__).parents[1] / "data" / "digits.csv", np.float32, delimiter=",")
    table = table[np.random.default_rng(0).permutation(len(table))]
    images, labels, cut = table[:, :-1] / 16.0, table[:, -1].astype(np.int64), len(table) * 8 // 10
    return images[:cut], labels[:cut], images[cut:], labels[cut:]
