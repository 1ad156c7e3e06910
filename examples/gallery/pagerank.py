"""Score the pages of a web by the links to them: PageRank by power iteration.

Each rank of the group has some pages: their scores, and the links that leave them. It computes what its pages give to all pages.
One reduce_scatter adds that up, and returns to each rank what all of them give to its own pages.

    oneaccord run -n 4 examples/gallery/pagerank.py
"""

from typing import Any

import numpy as np
import numpy.typing as npt

import oneaccord as oa

Array = npt.NDArray[Any]


def links(page: int, pages: int) -> Array:
    """Return the pages to which a page links; pages of small numbers are popular, and every tenth page links nowhere."""
    rng = np.random.default_rng(page)
    return (pages * rng.random(0 if page % 10 == 9 else rng.integers(1, 12)) ** 3).astype(np.int64)


def main(group: oa.Group, pages: int = 4000, damping: float = 0.85, tolerance: float = 1e-10) -> tuple[Array, list[float]]:
    """Return the score of every page, on all ranks, and by how much all of them changed in each iteration."""
    counts = [len(each) for each in np.array_split(np.arange(pages), group.world_size)]
    first = sum(counts[: group.rank])
    targets = [links(page, pages) for page in range(first, first + counts[group.rank])]
    degrees = np.array([len(each) for each in targets])
    sources, to = np.repeat(np.arange(len(targets)), degrees), np.concatenate(targets)
    score = np.full(len(targets), 1.0 / pages)
    changes = [1.0]
    while changes[-1] > tolerance:
        given = np.bincount(to, weights=(score / np.maximum(degrees, 1))[sources], minlength=pages)
        given += score[degrees == 0].sum() / pages  # who links nowhere gives to all
        new = (1.0 - damping) / pages + damping * group.reduce_scatter(given, counts=counts)
        changes.append(float(group.all_reduce(np.abs(new - score).sum())))
        score = new
    return group.all_gather(score, counts=counts), changes


if __name__ == "__main__":
    with oa.init() as group:
        score, changes = main(group)
        if group.rank == 0:
            best = score.argsort()[::-1][:5]
            print(f"{len(changes) - 1} iterations; the scores sum to {score.sum():.9f}")
            print("the first five pages:", ", ".join(f"{page} ({score[page]:.4f})" for page in best))
