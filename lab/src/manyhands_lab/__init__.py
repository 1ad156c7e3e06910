"""The laboratory of manyhands: the commands ``bench``, ``show`` and ``simulate``, and the measurements, drawings and predictions behind them."""
