"""The hybrid backend of manyhands."""
