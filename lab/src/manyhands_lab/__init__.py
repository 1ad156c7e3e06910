"""The laboratory of manyhands: the commands ``bench``, ``show`` and ``simulate``, and what they measure, draw and predict with."""
