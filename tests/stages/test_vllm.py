"""vLLM under the tests of every generator, and under its own: in processes of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.hardware import HAS_GPU

ASIDE = Path(sys.prefix) / "vllm"
"""Where `make test` installs vLLM for the CPU."""
TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None and not ASIDE.is_dir(), reason="vLLM is not installed"
)


def run(*files):
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ASIDE)])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-s", "-p", "no:cacheprovider"),
            *("-p", "no:xdist", "--durations=0"),
            *(TESTS / file for file in files),
        ],
        cwd=TESTS.parents[1],
        env={**os.environ, "PYTHONPATH": path, "LOCKSTEP_TESTED_ENGINE": "vllm"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout[-8000:])
    assert done.returncode == 0


@pytest.mark.skipif(HAS_GPU, reason="this vLLM would take the GPU")
def test_vllm_keeps_what_a_generator_promises():
    run("test_generators.py", "vllm_cases.py")


@pytest.mark.gpu
def test_vllm_on_a_gpu_follows_its_weights_and_repeats():
    run("vllm_gpu_cases.py")
