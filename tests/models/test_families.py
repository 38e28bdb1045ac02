"""Models of many families: loaded, run, sampled from, taught and saved, each against transformers.

What is compared with is the library's own forward pass and `generate`, one sequence at a time.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from stages.contracts.model import ModelParams
from stages.contracts.precision import Precision
from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.scalars import sequence_rewards
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models.base_folder import take_base_model
from stages.engines.models.folders import (
    content_hash,
    folder_hash,
    load_policy,
    load_scalar_model,
    pad_id,
    save_model,
    start_scalar_model,
)
from stages.engines.training.learner import Optimization
from stages.engines.training.optimizer import Learner
from tests.models.families import FAMILIES, write_family

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul", "ignore:.torch.jit.script.")
PROMPTS = [[1, 9, 5, 7, 12, 30, 8], [1, 6], [1, 20, 21, 22, 23, 9, 9, 9, 9, 9]]
RESPONSES = [[10, 11, 2], [12, 13, 14, 15, 16, 17, 18, 19, 2], [4]]


def base_of(tmp_path, family, **changes):
    source = write_family(tmp_path / "given", family, **changes)
    params = ModelParams(source="folder")
    take_base_model(params, Precision.FLOAT32, source, tmp_path / "base")
    return tmp_path / "base"


def batch_for(model):
    return collate(PROMPTS, RESPONSES, pad_id(model))


@torch.no_grad()
def plain_logprobs(model, temperature=1.0):
    """Of each response's tokens, by the library's own forward pass over one sequence."""
    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0] / temperature
        ahead = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        found.append(ahead.gather(1, torch.tensor(response)[:, None]).squeeze(1))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_run_sampled_taught_and_saved_as_transformers_would(tmp_path, family):
    folder = base_of(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = load_policy(folder)
    batch = batch_for(model)

    expected = plain_logprobs(reference, temperature=0.7)
    found = response_logprobs(model, batch, 0.7).logprobs
    for row, of_row in zip(found, expected, strict=True):
        torch.testing.assert_close(row[: len(of_row)], of_row, rtol=0, atol=2e-4)

    generator = TorchGenerator("cpu", Precision.FLOAT32, 2)
    generator.load(folder)
    answers = generator.generate(
        [Request(ids) for ids in PROMPTS], max_new_tokens=12, sampling=Sampling()
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        whole = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer.ids == whole[0, len(prompt) :].tolist()

    learner = Learner(model, Optimization(learning_rate=0.01, max_grad_norm=1.0))
    model.train()
    learned = []
    for _ in range(3):
        loss = -(response_logprobs(model, batch, 1.0).logprobs * batch.response_mask).sum()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters()), "every weight has to learn"
        learner.step(1.0)
        learned.append(float(loss))
    assert learned[-1] < learned[0]

    model.eval()
    save_model(model, tmp_path / "saved", tokenizer_from=folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    now = response_logprobs(model, batch, 1.0).logprobs
    for row, of_row in zip(now, plain_logprobs(again), strict=True):
        torch.testing.assert_close(row[: len(of_row)].detach(), of_row, rtol=0, atol=2e-4)
    assert content_hash(load_policy(tmp_path / "saved")) == folder_hash(tmp_path / "saved")


WITHOUT_CLASSIFIER = ("cohere", "granite")
"""Families of which transformers has no sequence classifier."""


@torch.no_grad()
def plain_rewards(folder, family):
    """Of each sequence's last token, by the library's own forward pass over one sequence."""
    sequences = [torch.tensor([p + r]) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    if family not in WITHOUT_CLASSIFIER:
        whole = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        return [whole(input_ids=ids).logits[0, 0] for ids in sequences]
    backbone = AutoModel.from_pretrained(folder).eval()
    head = load_file(folder / "model.safetensors")["score.weight"]
    return [backbone(input_ids=ids).last_hidden_state[0, -1] @ head[0] for ids in sequences]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_becomes_a_reward_model_that_transformers_reads_the_same(tmp_path, family):
    folder = base_of(tmp_path, family)
    model = start_scalar_model(folder)
    assert not sequence_rewards(model, batch_for(model)).any(), "a new head says 0"
    torch.manual_seed(5)
    for parameter in model.score.parameters():
        parameter.data.normal_()
    save_model(model, tmp_path / "reward", tokenizer_from=folder)
    found = sequence_rewards(load_scalar_model(tmp_path / "reward"), batch_for(model))
    expected = plain_rewards(tmp_path / "reward", family)
    for reward, said in zip(found, expected, strict=True):
        torch.testing.assert_close(reward, said, rtol=0, atol=2e-4)
