"""Processes of this machine: which ones live, and how to end a tree of them."""

import time

import psutil

TERMINATE_GRACE_S = 10.0
POLL_S = 0.02


def process_lives(pid: int, started: float) -> bool:
    """Whether the process that started at that time still runs; pids come round again."""
    try:
        process = psutil.Process(pid)
        return _lives(process) and abs(process.create_time() - started) < 1
    except psutil.NoSuchProcess:
        return False


def end_processes(pids: list[int], grace: float = TERMINATE_GRACE_S) -> None:
    """Ask these processes and their children to end, then insist."""
    processes: set[psutil.Process] = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            processes |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    for insist in (False, True):
        for process in processes:
            try:
                process.kill() if insist else process.terminate()
            except psutil.NoSuchProcess:
                continue
        deadline = time.monotonic() + grace
        while (processes := set(filter(_lives, processes))) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _lives(process: psutil.Process) -> bool:
    """A zombie is gone: it waits for somebody to ask how it ended, and does nothing else."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
