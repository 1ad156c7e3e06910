"""The gloo backend of manyhands."""
