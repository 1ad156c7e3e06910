"""An allocation that lasts as long as this process wants it, and no longer than this process lives."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess

from oneaccord.api import Ask, ConfigError, Deadline, DeadlineError
from oneaccord_slurm.config import SlurmConfig

__all__ = ["Allocation"]

_RELEASE_S = 10.0
"""How long an allocation may take to be given back before its holder is killed."""
# The holder ends when its standard input does: when it is closed, or this process ends, however it does.
_HOLD = 'env -0; printf "\\0"; exec cat > /dev/null'
_HOLD_SBATCH = """
tasks=$1
shift
job=$(sbatch --parsable --output=/dev/null "$@" --wrap "sleep infinity") || exit
job=${job%%;*}
trap 'scancel "$job"' EXIT
trap 'exit 143' TERM
until state=$(squeue --noheader --jobs "$job" --format %T) && [ "$state" = RUNNING ]; do
    [ -n "$state" ] || { echo "the job $job ended before it ran" >&2; exit 1; }
    kill -0 "$PPID" || exit 1
    sleep 0.2 < /dev/null &
    wait $!
done
list=$(squeue --noheader --jobs "$job" --format %N)
# What Slurm tells the script of the job alone: how its tasks are laid out.
step() { srun --jobid="$job" --overlap --quiet "$@" < /dev/null; }
where=$(step --ntasks="$tasks" printenv SLURMD_NODENAME) || exit
counts=$(for host in $(scontrol show hostnames "$list"); do printf '%s,' "$(echo "$where" | grep -cx "$host")"; done)
gpus=$(step --ntasks=1 --nodes=1 printenv SLURM_GPUS_ON_NODE)
for pair in JOB_ID="$job" JOB_NODELIST="$list" NTASKS="$tasks" TASKS_PER_NODE="${counts%,}" GPUS_ON_NODE="$gpus"; do
    printf 'SLURM_%s\\0' "$pair"
done
printf '\\0'
cat > /dev/null
"""


class Allocation:
    """An allocation made by ``salloc`` or ``sbatch``.

    Parameters
    ----------
    config
        The options of the launcher.
    ask
        What is wanted.
    deadline
        Until when it must be granted.

    Attributes
    ----------
    environ
        The variables of the allocation.

    Raises
    ------
    ConfigError
        Slurm refuses it, in its words.
    DeadlineError
        It was not granted in time, and is asked for no longer.
    """

    def __init__(self, config: SlurmConfig, ask: Ask, deadline: Deadline) -> None:
        wanted = _wanted(config, ask)
        if config.submit == "salloc":
            command = ["salloc", "--quiet", *wanted, "sh", "-c", _HOLD]
        else:
            command = ["sh", "-c", _HOLD_SBATCH, "sbatch", str(ask.ranks), *wanted]
        self._shown = shlex.join([config.submit, *wanted])
        try:
            # In a session of its own no terminal's Ctrl-C reaches it: the ranks end first.
            self._holder = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"{self._shown} cannot be run ({error}): is Slurm installed on this host?") from error
        try:
            self.environ: dict[str, str] = self._read(deadline)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the allocation back; more than once is fine."""
        holder = self._holder
        for stream in (holder.stdin, holder.stdout, holder.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            holder.wait(_RELEASE_S)
        except subprocess.TimeoutExpired:  # it waits in Slurm's queue
            holder.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                holder.wait(_RELEASE_S)
            if holder.poll() is None:
                holder.kill()
                holder.wait()

    def _read(self, deadline: Deadline) -> dict[str, str]:
        """Return the variables that the holder says once it has the allocation."""
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        said, descriptor = b"", self._holder.stdout.fileno()
        while not said.endswith(b"\0\0"):
            if not select.select([descriptor], [], [], deadline.remaining())[0]:
                self._holder.send_signal(signal.SIGTERM)
                raise DeadlineError(
                    f"{self._shown} was not granted within {deadline.timeout_s:g} s; it is not waited for any longer. More time: a longer timeout; "
                    "squeue --start says when Slurm expects to have room"
                )
            piece = os.read(descriptor, 65536)
            if not piece:
                complaint = os.fsdecode(self._holder.stderr.read()).strip()
                raise ConfigError(f"{self._shown} failed: {complaint or 'it said nothing'}")
            said += piece
        pairs = (os.fsdecode(pair).partition("=") for pair in said.split(b"\0") if pair)
        return {name: value for name, _, value in pairs}


def _wanted(config: SlurmConfig, ask: Ask) -> list[str]:
    options = {"partition": config.partition, "account": config.account, "time": config.time}
    words = ["--job-name=oneaccord", f"--ntasks={ask.ranks}"]
    words += [f"--{name}={value}" for name, value in options.items() if value is not None]
    if ask.per_host:
        words += [f"--nodes={-(-ask.ranks // ask.per_host)}", f"--ntasks-per-node={ask.per_host}"]
    if ask.gpus:
        words.append(f"--gpus-per-task={ask.gpus}")
    return [*words, *config.args]
