"""The ucc backend of manyhands."""
