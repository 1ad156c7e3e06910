"""Messages of manyhands over ZeroMQ."""
