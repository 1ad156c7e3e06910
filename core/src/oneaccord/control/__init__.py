"""How the ranks of a job find, trust and watch each other."""
