"""The numbers of sampling and training on machines with fewer instructions than this one.

torch, oneDNN and MKL choose their kernels by what the processor can do, and can be told to leave
instructions aside. Each such machine must repeat itself bit for bit, and differ from this one by
the rounding of float32 alone. Where a processor has no more than the plainest, as an Arm without
SVE, there is nothing to leave aside, and the two must be the same.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("DEFAULT", "NO AVX")
"""What torch calls a processor of whose vectors it makes no particular use."""
ONLY = {
    "avx512": {},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "default": {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
"""From the most instructions to the fewest: what keeps the libraries of an x86-64 to them, too."""
ROUNDING = 1e-5
"""Of log-probs below 10 after sums of some hundred terms, each rounded by 2^-24. Sampler and
trainer, whose kernels differ on every machine, were seen 5e-7 apart."""
AFTER_A_STEP = 1e-4
"""AdamW's first step is as long whatever the gradient's size, also where that is hardly more than
rounding."""


def machines() -> dict[str, dict[str, str]]:
    """The variables that make this machine one with fewer instructions, by name."""
    best = torch.backends.cpu.get_cpu_capability()
    found: dict[str, dict[str, str]] = {"as it is": {}}
    if platform.machine() == "x86_64":
        names = list(ONLY)
        # One that the processor lacks would be believed, and end in an illegal instruction.
        fewer = [] if best in PLAIN else names[names.index(best.lower()) + 1 :]
        found |= {name: {"ATEN_CPU_CAPABILITY": name, **ONLY[name]} for name in fewer}
    else:
        found["default"] = {"ATEN_CPU_CAPABILITY": "default"}
    return found


MACHINES = machines()


@pytest.fixture(scope="module")
def numbers():
    """What each machine computes, all at the same time."""
    started = {
        name: subprocess.Popen(
            [sys.executable, __file__],
            env={
                **os.environ,
                **variables,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, variables in MACHINES.items()
    }
    found = {}
    for name, process in started.items():
        output, errors = process.communicate()
        assert process.returncode == 0, f"{name}:\n{errors}"
        found[name] = json.loads(output.splitlines()[-1])
    return found


def test_a_capability_that_is_asked_for_is_used(numbers):
    for name, variables in MACHINES.items():
        asked = variables.get("ATEN_CPU_CAPABILITY", numbers["as it is"]["capability"])
        used = numbers[name]["capability"]
        assert used.lower() == asked.lower() or (asked == "default" and used in PLAIN), name


@pytest.mark.parametrize("name", MACHINES)
def test_sampling_and_training_repeat(numbers, name):
    one, other = numbers[name]["digests"]
    assert one == other


@pytest.mark.parametrize("name", MACHINES)
def test_sampler_and_trainer_agree(numbers, name):
    assert numbers[name]["gap"] < ROUNDING


@pytest.mark.parametrize("name", [name for name in MACHINES if name != "as it is"])
@pytest.mark.parametrize("what", ["logprobs", "entropies", "loss", "gradients", "learnt"])
def test_machines_differ_by_rounding_alone(numbers, name, what):
    bound = AFTER_A_STEP if what == "learnt" else ROUNDING
    expected = torch.tensor(numbers["as it is"][what])
    torch.testing.assert_close(torch.tensor(numbers[name][what]), expected, rtol=0, atol=bound)


def _model():
    # First, so that transformers is imported without what nobody needs here.
    import stages.engines.models.lean_transformers  # noqa: F401, I001
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    # Uniform numbers are the same bits everywhere; normal ones are computed, and rounded.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.4 * (torch.rand(weight.shape, generator=generator) - 0.5))
    return model


def _sampled(model):
    """What a policy says, and how far the sampler's log-probs are from the trainer's."""
    from stages.contracts.precision import Precision
    from stages.data.batching import collate
    from stages.engines.forward.logprobs import response_logprobs
    from stages.engines.generation.generator import Request, Sampling
    from stages.engines.generation.torch_generator import TorchGenerator

    requests = [Request([2, 3, 4 + i % 7], i) for i in range(24)]
    generator = TorchGenerator("cpu", Precision.FLOAT32, 6)
    generator.take(model, "")
    said = generator.generate(requests, max_new_tokens=16, sampling=Sampling())
    batch = collate([r.prompt_ids for r in requests], [c.ids for c in said], 0)
    with torch.no_grad():
        trained = response_logprobs(model, batch, 1.0).logprobs
    gap = max(
        abs(ours - theirs)
        for row, completion in zip(trained.tolist(), said, strict=True)
        for ours, theirs in zip(row, completion.logprobs, strict=False)
    )
    return said, gap


def _learnt(model):
    """Numbers of one step on responses that are the same everywhere."""
    from stages.algorithms.loss import Counts, LossAggregation, Tokens
    from stages.algorithms.policy_loss import Objective, policy_loss
    from stages.contracts.objectives import Aggregation, PolicyObjective
    from stages.data.batching import collate
    from stages.engines.forward.logprobs import response_logprobs
    from stages.engines.training.learner import Optimization
    from stages.engines.training.optimizer import Learner

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 64, (16, 12), generator=generator).tolist()
    lengths = [1 + i % 9 for i in range(16)]
    rows = zip(ids, lengths, strict=True)
    batch = collate([row[:3] for row in ids], [row[3 : 3 + n] for row, n in rows], 0)
    learner = Learner(model, Optimization(learning_rate=1e-3, max_grad_norm=1.0))
    now = response_logprobs(model, batch, 1.0)
    shape = batch.response_mask.shape
    ratios = 0.6 * (torch.rand(shape, generator=generator) - 0.5)
    loss = policy_loss(
        now.logprobs,
        now.logprobs.detach() - ratios,
        torch.rand(shape, generator=generator) - 0.5,
        Tokens.padded(batch.response_mask),
        Counts(sum(lengths), 16),
        Objective(PolicyObjective.CLIP, 0.2, 0.2, None, LossAggregation(Aggregation.TOKEN_MEAN)),
    ).value
    loss.backward()
    gradients = [float(weight.grad.norm()) for weight in model.parameters()]
    learner.clip_gradients()
    learner.step(1.0)
    with torch.no_grad():
        learnt = response_logprobs(model, batch, 1.0).logprobs
    return {
        "logprobs": now.logprobs.tolist(),
        "entropies": now.entropies.tolist(),
        "loss": float(loss),
        "gradients": gradients,
        "learnt": learnt.tolist(),
    }


def _numbers():
    torch.set_num_threads(1)
    digests = []
    for _ in range(2):
        model = _model()
        said, gap = _sampled(model)
        numbers = _learnt(model)
        digest = hashlib.sha256(repr((said, numbers)).encode())
        for weight in model.parameters():
            digest.update(weight.detach().numpy().tobytes())
        digests.append(digest.hexdigest())
    capability = torch.backends.cpu.get_cpu_capability()
    return {"capability": capability, "digests": digests, "gap": gap, **numbers}


if __name__ == "__main__":
    print(json.dumps(_numbers()))
