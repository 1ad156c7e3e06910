"""Checkpoints of trees of arrays: written by many ranks, read by any number of them.

``errors`` < ``documents``, ``storage``, ``tiling``, ``host`` < ``safetensors`` < ``metadata`` < ``ranks``, ``plan``, ``reading`` < ``save``, ``load`` < ``folder`` < ``saver``.
"""
