"""Each rank of ``oneaccord run --backend simulated`` has generators of random numbers of its own."""

import os
import textwrap

from support import preloaded

SOURCE = """
    import random
    import numpy as np
    import oneaccord as oa

    with oa.init() as group:
        draws = [], []
        group.barrier()
        for seeded in draws:
            for _ in range(3):
                seeded += [random.random(), float(np.random.random())]
                group.barrier()
            random.seed(group.rank // 2)
            np.random.seed(group.rank // 2)
        print(*draws)
"""


def draws(folder, seed):
    """Return the lines that four ranks print, in the order of the ranks: what they drew before, and after they gave seeds."""
    (folder / "script.py").write_text(textwrap.dedent(SOURCE))
    command = ["-m", "oneaccord", "run", "-n", "4", "--backend", "simulated", "script.py"]
    done = preloaded.run(command, cwd=folder, environ=os.environ | {"ONEACCORD_BACKENDS__SIMULATED__SEED": str(seed)})
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split("] ", 1)[1] for line in sorted(done.stdout.splitlines())]
    return [tuple(line[1:-1].split("] [")) for line in lines]


def test_ranks_draw_as_processes_do_and_what_nobody_has_seeded_follows_from_the_seed_of_the_run(tmp_path):
    first, again, other = (draws(tmp_path, seed) for seed in (1, 1, 2))
    assert first == again
    unseeded, seeded = zip(*first, strict=True)
    assert len(set(unseeded)) == 4
    assert seeded[0] == seeded[1] != seeded[2] == seeded[3]
    assert [after for _, after in other] == list(seeded)
    assert not set(unseeded) & {before for before, _ in other}
