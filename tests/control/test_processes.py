"""A process is known by its number and its start, whatever becomes of the clock."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from pipelines.base import processes
from pipelines.base.locks import is_locked
from pipelines.base.processes import (
    boot,
    end_processes,
    lives,
    process_lives,
    sleep_beside,
    start_of,
)
from tests.waiting import FOR_EVER_S, must_not_wait, until


def test_a_process_lives_until_it_ends_and_its_number_alone_does_not_count() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = start_of(process.pid)
        assert process_lives(process.pid, started)
        assert not process_lives(process.pid, f"{started}1")
        process.communicate(b"\n")
    assert not process_lives(process.pid, started)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_still_lives_after_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me, before = os.getpid(), psutil.Process().create_time()
    started, this_boot = start_of(me), boot()
    real = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: real - 3600)
    assert abs(psutil.Process().create_time() - before) > 1000, "the time of day is another"
    assert process_lives(me, started)
    assert boot() == this_boot


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_same_number_and_tick_after_another_start_of_the_machine_is_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me, started = os.getpid(), start_of(os.getpid())
    assert process_lives(me, started)
    monkeypatch.setattr(processes, "boot", lambda: "the next start")
    assert not process_lives(me, started)


FIRST_THREAD_LEAVES = """
import ctypes, fcntl, sys, threading, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_lives_as_long_as_any_of_its_threads(tmp_path: Path) -> None:
    """Those of a process that is killed end one by one, and the last lets go of its locks."""
    lock = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", FIRST_THREAD_LEAVES, str(lock)])
    seen = psutil.Process(process.pid)
    until(lambda: seen.status() == psutil.STATUS_ZOMBIE, "its first thread has left")
    assert is_locked(lock)
    assert lives(seen)
    end_processes([process.pid])
    assert not is_locked(lock)
    assert not lives(seen)
    process.wait()


@must_not_wait
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="of Linux")
def test_a_sleep_ends_with_the_first_of_the_processes_that_it_is_beside() -> None:
    forever, short = (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    )
    with forever, short:
        assert short.stdin
        began = time.monotonic()
        threading.Timer(0.2, short.stdin.close).start()
        sleep_beside([forever.pid, short.pid], FOR_EVER_S)
        assert time.monotonic() - began > 0.19
        for _ in range(3):  # it has ended, but nobody has waited for it
            began = time.monotonic()
            sleep_beside([short.pid, forever.pid], FOR_EVER_S)
            assert time.monotonic() - began > 0.01
        short.wait()
        sleep_beside([short.pid, forever.pid], FOR_EVER_S)
        began = time.monotonic()
        sleep_beside([forever.pid], 0.1)
        assert time.monotonic() - began > 0.09
        forever.communicate(b"\n")


def test_a_sleep_beside_nobody_is_a_sleep() -> None:
    began = time.monotonic()
    sleep_beside([], 0.1)
    assert time.monotonic() - began > 0.09
