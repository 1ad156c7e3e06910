"""Collectives as data: what a schedule is, what each collective promises, and the proof that a schedule keeps it."""
