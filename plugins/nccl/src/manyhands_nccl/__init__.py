"""The nccl backend of manyhands."""
