"""The laboratory of oneaccord: the commands ``bench``, ``show`` and ``simulate``, and the measurements, drawings and predictions behind them."""
