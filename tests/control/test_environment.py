"""What a record says about the machine: the same keys everywhere, torch asked only if imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.identity.environment import _cpu

DESCRIBE = """
import sys
from pathlib import Path
from pipelines.identity.environment import describe
from stages.context import Context
{imports}
ctx = Context(stage="sft", key=None, seed=1, folder=Path("."), micro_tokens=7)
print(sorted(describe(ctx, True)))
print("torch" in sys.modules)
"""
ALWAYS = {
    "checkpoint_activations", "compile",
    "cores", "cpu", "cpu_features", "deterministic", "device", "host", "libc", "machine",
    "micro_tokens", "offload", "packages", "python", "samplers", "sequence_parallel", "sharding",
    "shards", "system", "tensor_parallel", "threads", "world",
}  # fmt: skip
OF_TORCH = {"blas", "cpu_capability", "deterministic_algorithms", "matmul_precision"}


@pytest.mark.parametrize("imports", ["", "import torch"])
def test_torch_is_asked_only_where_the_stage_has_imported_it(imports: str) -> None:
    script = DESCRIBE.format(imports=imports)
    said = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    expected = ALWAYS | (OF_TORCH if imports else set())
    assert said == [str(sorted(expected)), str(bool(imports))]


def test_a_processor_is_named_on_either_architecture(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text(
        "processor : 0\nmodel name : AMD EPYC 9654\nflags : fpu avx2 avx512f amx_bf16 lm\n\n"
        "processor : 1\nmodel name : another\n"
    )
    (tmp_path / "arm").write_text(
        "processor : 0\nFeatures : fp asimd sve2 bf16 aes\nCPU implementer : 0x41\n"
        "CPU part : 0xd4f\n"
    )
    assert _cpu(tmp_path / "x86") == {
        "cpu": "AMD EPYC 9654",
        "cpu_features": "amx_bf16 avx2 avx512f",
    }
    assert _cpu(tmp_path / "arm") == {
        "cpu": "implementer 0x41 part 0xd4f",
        "cpu_features": "asimd bf16 sve2",
    }
