"""The tcp backend of manyhands."""
