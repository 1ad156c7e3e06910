"""Proofs that a schedule does what its collective promises."""
