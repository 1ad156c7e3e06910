"""``oneaccord run --backend simulated``: an unchanged script on all ranks of one process, each of which takes it for its own."""
