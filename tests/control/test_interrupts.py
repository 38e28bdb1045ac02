"""A signal that asks a command to end is remembered, whenever it comes."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import time
from pipelines.base.interrupts import Interrupts
interrupts = Interrupts()
interrupts.catch()
print("ready", flush=True)
while not interrupts.received:
    time.sleep(0.01)
print(interrupts.received[0].name)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_remembered_instead_of_ending_the_process(name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.Signals[name])
        assert process.stdout.read() == f"{name}\n"
    assert process.returncode == 0
