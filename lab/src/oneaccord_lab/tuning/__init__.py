"""Tables that choose algorithms: made from times, which the model predicts or which this machine shows."""
