"""Chunked log-probs against the model's own logits: values, gradients, memory."""

from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from stages.context import StageError
from stages.data.batching import collate
from stages.engines.forward import head
from stages.engines.forward.logprobs import logprobs_of, response_logprobs, response_topk

VOCABULARY = 29
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "gpt_neox": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 8, "init_std": 0.5},
    "phi": {},
}
"""What is special about each family's head: a cap, a scale, a bias (Phi), a projection (OPT)."""
SUMMED_IN_FLOAT32 = {"cohere", "gemma2"}
"""Families that multiply by a norm's weight in float32 even in a model of float64. The gradient of
that weight is a float32 sum over the tokens of a row, and packed and padded rows have them at other
places: how far the two sums are apart depends on the width of the machine's vectors."""
PROMPTS = ([3, 4, 5], [6], [7, 8, 9, 10, 11])
RESPONSES = ([12, 13], [14, 15, 16, 17, 18], [19])
TEMPERATURE = 0.7


def build(family: str, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.fixture
def batch():
    return collate(PROMPTS, RESPONSES, pad_id=0)


def naive(policy, batch):
    """[B, T, V] scaled logits, all of them."""
    logits = policy(input_ids=batch.ids, attention_mask=batch.attention_mask).logits
    index = batch.before[:, :, None].expand(-1, -1, logits.shape[-1])
    return logits.gather(1, index) / TEMPERATURE


def naive_response(policy, batch, support=None):
    """[B, T] log-probs and entropies, token by token; `support` has the ids of each that count."""
    scaled = naive(policy, batch)
    logprobs, entropies = (scaled.new_zeros(batch.response_mask.shape) for _ in range(2))
    for b, t in batch.response_mask.nonzero().tolist():
        kept = support[b][t] if support else list(range(VOCABULARY))
        distribution = scaled[b, t, kept].log_softmax(-1)
        logprobs[b, t] = distribution[kept.index(int(batch.response_ids[b, t]))]
        entropies[b, t] = torch.special.entr(distribution.exp()).sum()
    return logprobs, entropies


def gradients(policy, *weighted) -> list[torch.Tensor]:
    """Of sums with weights that differ from token to token, so that none can be mistaken."""
    loss = sum(
        (value * torch.arange(1, value.numel() + 1).reshape(value.shape)).sum() * factor
        for factor, value in enumerate(weighted, start=1)
    )
    parameters = [p for p in policy.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros(1) if grad is None else grad for grad in found]


def close(ours, expected, rounding=1e-10):
    torch.testing.assert_close(ours, expected, rtol=rounding, atol=rounding)


def assert_same(policy, batch, support=None, rounding=lambda _: 1e-10):
    """Values, and gradients parameter by parameter, are those of the model's own logits."""
    ours = response_logprobs(policy, batch, TEMPERATURE)
    expected = naive_response(policy, batch, support)
    close((ours.logprobs, ours.entropies), expected)
    both = gradients(policy, ours.logprobs, ours.entropies), gradients(policy, *expected)
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    for name, one, other in zip(names, *both, strict=True):
        close(one, other, rounding(name))
    return ours


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_those_of_the_models_own_logits(family, batch, monkeypatch):
    policy = build(family)
    monkeypatch.setattr(head, "CHUNK_TOKENS", 3)
    # Twenty terms in float32: 20 * 2^-24 of the largest, and some room.
    of_norm = 1e-5 if family in SUMMED_IN_FLOAT32 else 1e-10
    assert_same(policy, batch, rounding=lambda name: of_norm if "norm" in name else 1e-10)


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 512])
def test_the_size_of_a_chunk_changes_nothing(chunk, batch, monkeypatch):
    policy = build("llama")
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    assert_same(policy, batch)


def test_a_support_renormalises_values_and_gradients(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    support = [
        [
            sorted({token, *torch.randperm(VOCABULARY, generator=generator)[:size].tolist()})
            for size, token in enumerate(response)
        ]
        for response in RESPONSES
    ]
    policy = build("llama")
    batch = collate(PROMPTS, RESPONSES, pad_id=0, supports=support)
    for chunk in (2, 512):
        monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
        ours = assert_same(policy, batch, support)
    # A support of one token leaves no choice: it is certain, whatever the weights.
    assert len(support[0][0]) == 1
    assert ours.logprobs[0, 0] == ours.entropies[0, 0] == 0


@pytest.mark.parametrize(
    "supports",
    [[[[12], [1, 2]], [[14]], [[19]]], [[[12], [13]], None, [[19]]], [[[12]], [[14]], [[19]]]],
    ids=["a token outside", "a row without", "too short"],
)
def test_a_support_that_does_not_fit_its_response_is_refused(supports):
    with pytest.raises(ValueError, match="support"):
        collate(PROMPTS, [[12, 13], [14], [19]], pad_id=0, supports=supports)


def test_rows_without_a_support_have_none():
    assert collate(PROMPTS, RESPONSES, pad_id=0, supports=[None] * 3).support is None


def test_an_empty_response_takes_no_gradient():
    policy = build("llama")
    batch = collate(PROMPTS, ([12, 13], [], [19]), pad_id=0)
    assert not assert_same(policy, batch).logprobs[1].any()
    nothing = response_logprobs(policy, collate(PROMPTS, ([], [], []), 0), TEMPERATURE)
    assert nothing.logprobs.shape == (3, 0)
    assert not any(grad.any() for grad in gradients(policy, nothing.logprobs))


def test_the_likeliest_tokens_and_the_log_probs_of_given_ones(batch, monkeypatch):
    policy = build("gemma2")
    monkeypatch.setattr(head, "CHUNK_TOKENS", 3)
    counted = batch.response_mask > 0
    whole = naive(policy, batch).log_softmax(-1)
    ids, values = response_topk(policy, batch, 4, TEMPERATURE)
    assert not values.requires_grad
    expected = whole[counted].topk(4)
    assert ids[counted].tolist() == expected.indices.tolist()
    close(values[counted], expected.values.detach())
    assert not ids[~counted].any()
    assert not values[~counted].any()

    ours = logprobs_of(policy, batch, ids, TEMPERATURE)
    close(ours.detach(), values)
    theirs = whole.gather(-1, ids) * counted[:, :, None]
    close(gradients(policy, ours), gradients(policy, theirs))


def test_under_an_adapter_the_log_probs_are_those_of_the_wrapped_model(batch):
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(build("llama"), LoraConfig(target_modules="all-linear", r=2))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    policy = policy.double()
    assert_same(policy, batch)


def test_a_model_that_does_something_unknown_to_its_logits_is_refused(batch):
    policy = build("llama").train()
    forward = policy.forward

    def doubled(**inputs):
        output = forward(**inputs)
        output.logits = output.logits * 2
        return output

    policy.forward = doubled
    with pytest.raises(StageError, match="llama"):
        response_logprobs(policy, batch, TEMPERATURE)
    assert policy.training


class Backbone(nn.Module):
    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)

    def forward(self, input_ids, **_):
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))


class Policy(nn.Module):
    """Next to nothing but an output head."""

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.base_model = Backbone(vocabulary, hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.config = SimpleNamespace(get_text_config=lambda: None)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.head(self.base_model(input_ids).last_hidden_state))


class MemoryOfTensors(TorchDispatchMode):
    """Bytes of the tensors that live at once. A process's memory is no measure of them: it has
    what the allocator and the machine's mathematical library keep for themselves, too."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None) -> Any:
        made = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._known:
            return
        self._known.add(address)
        self._live += size
        self.peak = max(self.peak, self._live)
        finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._known.remove(address)
        self._live -= size


def test_the_logits_of_a_batch_are_never_in_memory_at_once(monkeypatch):
    tokens, vocabulary, hidden = 1024, 2000, 8
    monkeypatch.setattr(head, "CHUNK_TOKENS", 16)
    whole = tokens * vocabulary * 4
    torch.manual_seed(0)
    policy = Policy(vocabulary, hidden)
    ids = torch.randint(vocabulary, (4, tokens // 4 + 1))
    batch = collate(ids[:, :1].tolist(), ids[:, 1:].tolist(), 0)

    def in_chunks():
        ours = response_logprobs(policy, batch, 1.0)
        return ours.logprobs.sum() + ours.entropies.sum()

    def at_once():
        distribution = policy(batch.ids).logits[:, :-1].log_softmax(-1)
        chosen = distribution.gather(-1, batch.response_ids[:, :, None])
        return chosen.sum() - (distribution.exp() * distribution).sum()

    def measure(loss):
        policy.zero_grad()
        with MemoryOfTensors() as memory:
            value = loss()
            value.backward()
        return value.detach(), policy.head.weight.grad, memory.peak

    value, gradient, peak = measure(in_chunks)
    naive_value, naive_gradient, naive_peak = measure(at_once)
    # Two orders of a sum in float32, over 64 chunks and over the whole.
    torch.testing.assert_close(value, naive_value, rtol=1e-4, atol=0)
    torch.testing.assert_close(gradient, naive_gradient, rtol=1e-3, atol=1e-3)
    assert peak < 0.25 * whole, "a chunk is 1/64 of the whole, and some of its size live at once"
    assert naive_peak > 3 * whole, "what the measure would see"


def test_one_wide_support_does_not_widen_all_others():
    """Padded as a whole it would be tokens x vocabulary after all."""
    wide, narrow = list(range(VOCABULARY)), [3]
    batch = collate([[1]], [[3] * 9], pad_id=0, supports=[[wide] + [narrow] * 8])
    assert batch.support.ids.numel() == VOCABULARY + 8
    chunks = list(batch.support.chunks(3))
    assert [tuple(chunk.shape) for chunk in chunks] == [(3, VOCABULARY), (3, 1), (3, 1)]
    assert chunks[0][1].tolist() == [3] + [-1] * (VOCABULARY - 1)
