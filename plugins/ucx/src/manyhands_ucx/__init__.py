"""The ucx backend of manyhands."""
