"""The backend pigeon of oneaccord."""
