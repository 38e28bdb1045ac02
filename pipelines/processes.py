"""Processes of this machine: which ones live, and how to end a tree of them."""

import psutil

TERMINATE_GRACE_S = 10.0


def process_lives(pid: int, started: float) -> bool:
    """Whether the process that started at that time still runs; pids come round again."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started) < 1
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
        _, alive = psutil.wait_procs(processes, timeout=grace)
        processes = set(alive)
