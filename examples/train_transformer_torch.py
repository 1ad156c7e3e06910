"""The transformer of train_transformer.py in torch: layers of mp.torch, gradients by autograd. Mesh, training and checkpoints are the same.

python examples/train_transformer_torch.py                                               one process
oneaccord run -n 4 examples/train_transformer_torch.py --pp 2 --tp 2                      four
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import train_transformer as numpy_version
from torch import nn
from torch.nn import functional

import oneaccord as oa
import oneaccord_parallel as mp


class Layers(nn.Module):  # type: ignore[misc]
    """What one rank has of the model, as a module."""

    def __init__(self, weights: dict[str, torch.Tensor], tp: oa.Group, first: bool, last: bool) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))  # the same memory, which the optimizer updates
        self.tp, self.first, self.last = tp, first, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation, or on the last stage this rank's logits."""
        if self.first:
            time = x.shape[1]
            x = mp.torch.vocab_parallel_embedding(x, self.tokens, self.tp) + self.positions[:time]
        for layer in range(len(self.norm1)):
            x = x + self.attention(normalize(x, self.norm1[layer]), self.qkv[layer], self.out[layer])
            hidden = torch.relu(mp.torch.column_linear(normalize(x, self.norm2[layer]), self.up[layer], None, self.tp))
            x = x + mp.torch.row_linear(hidden, self.down[layer], None, self.tp)
        if self.last:
            x = mp.torch.column_linear(normalize(x, self.norm), self.head, None, self.tp)
        return x

    def attention(self, x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Causal attention of this rank's heads, summed over the ranks."""
        together = mp.torch.column_linear(x, qkv.flatten(1), None, self.tp)
        q, k, v = together.unflatten(-1, qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mp.torch.row_linear(attended.transpose(1, 2).flatten(2), out.flatten(0, 1), None, self.tp)


def normalize(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last axis."""
    return functional.rms_norm(x, gain.shape, gain, eps=1e-5)


class Model(numpy_version.Model):
    """The module in the place of the functions by hand."""

    def __init__(self, weights: dict[str, torch.Tensor], tp: oa.Group) -> None:
        super().__init__(weights, tp)
        self.layers = Layers(weights, tp, self.first, self.last)

    def forward(self, x: Any) -> tuple[Any, list[Any]]:
        """Return this rank's logits of a model that is whole."""
        with torch.no_grad():
            return self.layers(torch.as_tensor(x)), []

    def loss(self, logits: Any, targets: Any) -> Any:
        """Return the mean cross-entropy; autograd finds the gradient."""
        return mp.torch.vocab_parallel_cross_entropy(logits, torch.as_tensor(targets), self.tp)

    def stage(self) -> mp.Stage:
        """Return the module as a stage of the pipeline."""
        return mp.torch.Stage(self.layers)


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Make a tensor of an array."""
    return torch.from_numpy(array)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(numpy_version.main(Model, tensor, __doc__))
