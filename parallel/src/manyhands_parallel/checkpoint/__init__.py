"""Checkpoints of trees of arrays: written by many ranks, read by any number of them.

``errors`` < ``safetensors``, ``metadata``, ``storage``, ``tiling``, ``host`` < ``ranks``, ``plan``, ``reading`` < ``save``, ``load`` < ``folder`` < ``saver``.
"""
