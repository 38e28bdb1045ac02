"""On a GPU too, sampling and training repeat, and what cannot repeat raises."""

import subprocess
import sys

import pytest

TWICE = """
import hashlib, torch
from stages.engines.processes import determinism
determinism.before_import()
determinism.after_import()
from stages.contracts.precision import Precision
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.generation.generator import Request, Sampling
from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
# Last, so that transformers has been imported without what nobody needs here.
from transformers import LlamaConfig, LlamaForCausalLM

def go():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, eos_token_id=1)
    model = LlamaForCausalLM(config).to(DEVICE)
    requests = [Request([2, 3, 4 + i], i) for i in range(32)]
    generator = TorchGenerator(DEVICE, Precision.FLOAT32, 12)
    generator.take(model, "")
    said = [
        completion
        for sampling in (Sampling(top_p=0.9, top_k=40), Sampling())
        for completion in generator.generate(requests, max_new_tokens=24, sampling=sampling)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        batch = collate([r.prompt_ids for r in requests] * 2, [c.ids for c in said], 0, DEVICE)
        now = response_logprobs(model, batch, 1.0)
        (-now.logprobs.sum() + now.entropies.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256(repr(said).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()

assert go() == go()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sampling_and_training_repeat(device):
    done = run(f"DEVICE = {device!r}\n{TWICE}")
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_what_cannot_repeat_on_a_gpu_raises():
    script = "import torch; from stages.engines.processes import determinism; "
    script += "determinism.before_import(); determinism.after_import(); "
    script += "image = torch.rand(1, 1, 9, 9, device='cuda', requires_grad=True); "
    script += "torch.nn.functional.adaptive_avg_pool2d(image, 2).sum().backward()"
    assert "does not have a deterministic implementation" in run(script).stderr


def test_nothing_is_imported_for_a_stage_without_torch():
    script = "import sys; from stages.engines.processes import determinism; "
    script += (
        "determinism.before_import(); determinism.after_import(); assert 'torch' not in sys.modules"
    )
    assert run(script).returncode == 0
