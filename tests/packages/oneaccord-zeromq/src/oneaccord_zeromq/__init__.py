"""Messages of oneaccord over ZeroMQ."""
