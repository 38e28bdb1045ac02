"""The Triton kernels, compiled for GPUs that are not here, with what their callers hand to them.

Nothing is launched. What the compiler makes of a kernel tells whether it would be slow: attention
without tensor cores, or a cache that is not read ahead, in pieces of 16 bytes, while it computes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""That a program may have, by the GPU's kind."""


KERNELS = ("_attention", "_draw", "_rms_norm", "_rotate", "_spread", "_swiglu")
STEPS = (
    ("135m", "bfloat16", 80),
    ("135m", "bfloat16", 90),
    ("1.1b", "float32", 90),
    ("qwen3", "bfloat16", 90),
)
"""Shape, type of numbers, kind of GPU."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """By step, and then by kernel: its shared memory, and its code."""
    if not _has_assembler():
        pytest.skip("Triton has no assembler for NVIDIA GPUs here")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return dict(zip(STEPS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_fits_the_gpu_and_reads_16_bytes_at_a_time(steps, step):
    assert sorted(steps[step]) == sorted(KERNELS)
    for name, (shared, code) in steps[step].items():
        assert shared <= SHARED_MEMORY[step[-1]], name
        assert "ld.global.v4.b32" in code, name
    _, attention = steps[step]["_attention"]
    assert "cp.async.cg.shared.global" in attention
    # Tensor cores would cut float32 down.
    assert ("mma.sync" in attention) == (step[1] == "bfloat16")


def _has_assembler():
    from triton import knobs

    try:
        return Path(knobs.nvidia.ptxas.path).exists()
    except RuntimeError:
        return False


def _compiled(shape_name, dtype_name, arch):
    """What the fixture says of one step."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.workloads import SHAPES
    from stages.engines.generation.generator import Request, Sampling
    from stages.engines.generation.llama import kernels, prompt_kernels
    from stages.engines.generation.llama.slots import Slots
    from stages.engines.generation.llama.weights import Layer, Shape

    dtype = getattr(torch, dtype_name)
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    names |= {torch.int32: "i32", torch.int64: "i64"}
    found = {}

    class Compiled:
        """In the place of a kernel: what is handed over is compiled for, and nothing is run."""

        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return self.launch

        def launch(self, *args, num_warps=4, num_stages=3):
            signature, constants, attributes = {}, {}, {}
            for place, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=True)):
                kind = "fp32"
                if parameter.is_constexpr:
                    kind, constants[(place,)] = "constexpr", value
                elif isinstance(value, torch.Tensor):
                    kind = "*" + names[value.dtype]
                elif isinstance(value, int):
                    kind = "i32"
                signature[parameter.name] = kind
                if kind[0] == "*" or (kind == "i32" and value % 16 == 0):
                    attributes[(place,)] = [["tt.divisibility", 16]]
            made = triton.compile(
                ASTSource(self.kernel, signature, constants, attributes),
                target=GPUTarget("cuda", arch, 32),
                options={"num_warps": num_warps, "num_stages": num_stages},
            )
            assert made.asm["cubin"]
            found[self.kernel.__name__] = (made.metadata.shared, made.asm["ptx"])

    originals = [
        (module, name, value)
        for module in (kernels, prompt_kernels)
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    ]
    for module, name, kernel in originals:
        setattr(module, name, Compiled(kernel))

    qwen3 = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151936}
    qwen3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = SHAPES.get(shape_name, qwen3)
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    dim = sizes.get("head_dim", width // heads)
    shape = Shape(1, heads, sizes["num_key_value_heads"], dim, 1e-6)
    gain = torch.ones(dim, dtype=dtype) if "head_dim" in sizes else None
    none = torch.empty(0)
    layer = Layer(none, none, None, gain, gain, none, None, none, none, None, none, None)

    board = Slots(2, 2, 256, torch.device("cpu"))
    board.begin([Request([1], seed=i) for i in range(2)], 256, Sampling(), [])
    x = torch.zeros(2, width, dtype=dtype)
    kernels.rms_norm(x, x[0], 1e-6)
    kernels.swiglu(x.new_zeros(2, 2 * sizes["intermediate_size"]))
    cache = x.new_zeros(2, shape.num_kv_heads, 320, dim)
    qkv = x.new_zeros(2, (heads + 2 * shape.num_kv_heads) * dim)
    angles = x.new_zeros(320, dim)
    kernels.attention(board.state, shape, angles, angles)(qkv, layer, cache, cache)
    ids = torch.zeros(1, dtype=torch.int64)
    kernels.prompts(shape, angles, angles, ids, ids)(qkv[:, None], layer, cache, cache)
    kernels.draw_and_record(torch.zeros(2, sizes["vocab_size"]), board)
    for module, name, kernel in originals:
        setattr(module, name, kernel)
    return found


if __name__ == "__main__":
    print(json.dumps([_compiled(*step) for step in STEPS]))
