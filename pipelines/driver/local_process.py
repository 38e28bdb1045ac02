"""A process on this machine with what a profile gives a job: setup, container, threads, GPUs."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.base.redacted_log import open_log
from pipelines.config.profiles import thread_variables
from pipelines.ledger.launch import Launch
from pipelines.slurm.submit import stays_here


def start_here(launch: Launch, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the launch's module; neither Ctrl-C nor the end of the terminal reaches it.

    `log` is how the names of its logs begin.
    """
    resources = launch.resources
    words = [resources.python or sys.executable, "-u", "-m", launch.module, *arguments]
    words = [*shlex.split(resources.container or ""), *words]
    script = "\n".join(["set -e", *resources.setup, f"exec {shlex.join(words)}"])
    kept = {name: value for name, value in os.environ.items() if not stays_here(name)}
    variables = {
        **thread_variables(resources),
        "PYTHONPATH": str(launch.code),
        "PYTHONSAFEPATH": "1",
        # As for a job of its own: of the machine's GPUs, as many as the profile says.
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(resources.gpus_per_node))),
    }
    bash = shutil.which("bash") or "/bin/sh"
    with open_log(log.with_suffix(".out")) as out, open_log(log.with_suffix(".err")) as err:
        return subprocess.Popen(
            [bash, "-c", script],
            cwd=launch.root,
            env={**kept, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
