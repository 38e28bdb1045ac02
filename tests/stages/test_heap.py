"""A job keeps the memory that it has freed, up to a limit."""

import platform
import subprocess
import sys

import pytest

ROUNDS = """
import ctypes, resource
from pathlib import Path
from stages.engines.processes.heap import KEPT, keep_freed_memory
# A huge page would be a single fault: whether there are some is for the machine to say.
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
if {keeps}:
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
size = resource.getpagesize()
def round():
    del [bytearray(2**22) for _ in range(8)][:]
round(); round()
before = faults()
for _ in range(5):
    round()
print((faults() - before) / 5 / (2**25 / size))
del [bytearray(2**22) for _ in range(100)][:]
print(pages() * size < KEPT + 2**26)
"""


def run(keeps: bool) -> tuple[float, bool]:
    """Faults a page of a round that frees 32 MiB, and whether most of 400 MiB have gone back."""
    words = [sys.executable, "-c", ROUNDS.format(keeps=keeps)]
    told = subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()
    return float(told[0]), told[1] == "True"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of the GNU C library")
def test_what_was_freed_is_used_again_without_page_faults() -> None:
    assert run(False)[0] > 0.5
    faults, gives_back = run(True)
    assert faults < 0.02
    assert gives_back
