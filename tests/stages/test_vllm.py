"""vLLM under the tests of every generator, and under its own: all in one process of theirs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ASIDE = Path(sys.prefix) / "vllm"
"""Where `make test` installs vLLM for the CPU."""
TESTS = Path(__file__).parent


@pytest.mark.skipif(
    find_spec("vllm") is None and not ASIDE.is_dir(), reason="vLLM is not installed"
)
def test_vllm_keeps_what_a_generator_promises():
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ASIDE)])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *(TESTS / "test_generators.py", TESTS / "vllm_cases.py"),
        ],
        cwd=TESTS.parents[1],
        env={**os.environ, "PYTHONPATH": path, "LOCKSTEP_TESTED_ENGINE": "vllm"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
