"""Launchers of oneaccord for Slurm and PBS."""
