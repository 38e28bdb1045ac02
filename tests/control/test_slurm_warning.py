"""Slurm's early warning goes to every process of a job: the worker heeds it, its helpers live."""

import os
import signal
import subprocess
import sys

PROGRAM = """
import subprocess, sys, threading
from pipelines.slurm.signals import SlurmWarning
warning, told = SlurmWarning(), threading.Event()
warning.listen()
helper = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
helper.stdout.readline()
warning.answer(told.set)
print("ready", flush=True)
told.wait()
print("told, helper", helper.poll())
helper.communicate()
"""


def test_the_warning_is_heard_by_the_worker_and_not_by_its_helpers() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        os.killpg(worker.pid, signal.SIGUSR2)
        assert worker.stdout.read() == "told, helper None\n"
    assert worker.returncode == 0
