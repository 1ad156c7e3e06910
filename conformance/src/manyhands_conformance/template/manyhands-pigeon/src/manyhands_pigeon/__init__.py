"""The backend pigeon of manyhands."""
