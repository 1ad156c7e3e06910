"""Collectives as data: schedules, the promise of each collective, and the proof that a schedule keeps it."""
