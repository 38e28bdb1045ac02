"""Packed rows against padded ones: hidden states, log-probs, values, gradients, neighbours."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from stages.context import Context, StageError
from stages.contracts.lora import LoraParams
from stages.contracts.precision import Precision
from stages.data.batching import collate
from stages.engines.forward import attention, packed
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.packed import ForwardSettings, configure_forward, hidden_states
from stages.engines.forward.scalars import token_scores
from stages.engines.forward.ulysses import share_rows
from stages.engines.models.folders import load_policy, load_scalar_model
from stages.engines.models.lora import open_for_training
from stages.engines.models.precision import round_weights
from stages.engines.processes.ranks import ALONE
from stages.learning.pairs import paired_batch
from tests.stages.test_lora import write_base

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")
SIZES = {
    "vocab_size": 29,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
PROMPTS = ([3, 4, 5], [6], [7, 8, 9, 10, 11], [2, 2], [4])
RESPONSES = ([12, 13], [14, 15, 16, 17, 18, 19, 1], [], [3, 3, 3], [9])
PACKABLE = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 8, "init_std": 0.5},
}
PADDED = {
    "gemma2": {"head_dim": 8},  # windows, and a cap on the scores
    "gemma3_text": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "falcon": {"new_decoder_architecture": False},  # an attention of its own
    "mamba": {"state_size": 4},  # none at all
}


def build(family: str, auto=AutoModelForCausalLM, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    return auto.from_config(config).double().eval()


@pytest.fixture
def batch():
    return collate(PROMPTS, RESPONSES, pad_id=0)


def both_ways(model, compute: Callable[[], torch.Tensor], *, packs: bool = True):
    """What `compute` says and its gradients, as they are and with the model padded."""
    results = []
    for way in ("as it is", "padded"):
        if way == "padded":
            packed._packable[packed.unwrapped(model)] = False
        model.zero_grad()
        value = compute()
        weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype)
        (value.reshape(-1) * weights).sum().backward()
        learnt = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((value.detach(), {name: g.clone() for name, g in learnt.items()}))
        if way == "as it is":
            assert packed._packable[packed.unwrapped(model)] is packs
    return results


def assert_equal(one, two, bound=1e-10):
    torch.testing.assert_close(one[0], two[0], rtol=bound, atol=bound)
    assert one[1].keys() == two[1].keys()
    for name, gradient in one[1].items():
        scale = float(two[1][name].abs().max())
        torch.testing.assert_close(gradient, two[1][name], rtol=0, atol=bound * max(scale, 1.0))


@pytest.mark.parametrize("family", PACKABLE)
def test_log_probs_and_gradients_are_those_of_padded_rows(family, batch):
    model = build(family, **PACKABLE[family])
    assert_equal(*both_ways(model, lambda: response_logprobs(model, batch, 0.7).logprobs))


@pytest.mark.parametrize("family", PADDED)
def test_a_model_that_cannot_be_packed_is_padded(family, batch):
    model = build(family, **PADDED[family])
    before = model.config._attn_implementation
    results = both_ways(model, lambda: hidden_states(model, batch), packs=False)
    assert_equal(*results)
    assert model.config._attn_implementation == before


def test_a_model_whose_layers_lose_word_of_the_sequences_is_padded(batch):
    """The numbers of a tiny batch may look right; that each layer was told is looked at, too."""
    model = build("llama", initializer_range=1e-6)
    layer = model.model.layers[1].self_attn
    told = layer.forward
    layer.forward = lambda *args, **kw: told(
        *args, **kw | {"sequences": None, "attention_mask": None}
    )
    hidden_states(model, batch)
    assert not packed._packable[model]


def test_a_model_whose_packed_rows_say_something_else_is_padded(batch):
    """Each layer was told of the sequences, and makes something else of them."""
    model = build("llama")
    layer = model.model.layers[1].self_attn
    told = layer.forward

    def forward(*args, **kw):
        answer, *rest = told(*args, **kw)
        return (answer if kw.get("sequences") is None else 1.5 * answer), *rest

    layer.forward = forward
    assert_equal(*both_ways(model, lambda: hidden_states(model, batch), packs=False))


def test_what_another_model_does_meanwhile_does_not_count(batch):
    """A sampler and a learner share a process; here one runs within the first pass of the other."""
    busy, model = build("llama"), build("llama")

    def work(*_):
        hidden_states(busy, batch)

    work()
    model.model.layers[0].register_forward_hook(work)
    hidden_states(model, batch)
    assert packed._packable[model]


def test_values_are_those_of_padded_rows(batch):
    model = build("llama", AutoModelForSequenceClassification, num_labels=1)

    def scores():
        return token_scores(model, batch)[batch.attention_mask > 0]

    assert_equal(*both_ways(model, scores))
    assert token_scores(model, batch).shape == batch.ids.shape


def test_pairs_and_supports_are_those_of_padded_rows():
    model = build("llama")
    pairs = [
        {"prompt_ids": [3, 4], "chosen_ids": [5, 6, 7], "rejected_ids": [8]},
        {"prompt_ids": [9], "chosen_ids": [5], "rejected_ids": [8, 8, 8, 8, 8]},
    ]
    batch = paired_batch(model, pairs, "cpu")
    assert_equal(*both_ways(model, lambda: response_logprobs(model, batch, 1.0).logprobs))
    model = build("llama")
    supports = [[sorted({token, 5, 11}) for token in response] for response in RESPONSES]
    batch = collate(PROMPTS, RESPONSES, 0, supports=supports)
    assert_equal(*both_ways(model, lambda: response_logprobs(model, batch, 1.0).logprobs))


@pytest.mark.parametrize("load", [load_policy, load_scalar_model])
def test_adapters_learn_the_same(load, tmp_path, batch):
    base = write_base(tmp_path / "base")
    if load is load_scalar_model:
        scalar = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        scalar.save_pretrained(base)
    model = open_for_training(load, base, "cpu", LoraParams(rank=2), seed=1).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))

    def said():
        if load is load_scalar_model:
            return token_scores(model, batch)
        return response_logprobs(model, batch, 1.0).logprobs

    one, two = both_ways(model, said)
    assert any("lora_A" in name for name in one[1])
    assert_equal(one, two)


def test_a_sequence_never_sees_its_neighbours():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    other = [[row[0], *(token + 1 for token in row[1:])] for row in RESPONSES[1:2]]
    responses = [RESPONSES[0], other[0], *RESPONSES[2:]]
    said = [
        response_logprobs(model, collate(PROMPTS, r, 0), 1.0).logprobs
        for r in (RESPONSES, responses)
    ]
    kept = [0, 2, 3, 4]
    assert torch.equal(said[0][kept], said[1][kept])
    assert not torch.equal(said[0][1], said[1][1])


def test_what_fills_a_row_up_changes_nothing(batch):
    """As compiled rows are; here eagerly, in double precision."""
    model = build("llama")
    expected = hidden_states(model, batch)
    whole = batch.packed
    for budget in (4, 24, 1000):
        row = packed._filled_up(whole, budget)
        num_tokens = len(whole.ids)
        assert len(row.ids) % -(-budget // packed.SIZES) == 0
        assert len(row.ids) == len(row.positions) == len(row.at) == int(row.starts[-1])
        assert (row.starts.diff() <= row.longest).all()
        assert (row.starts.diff() >= 0).all()
        assert len(set(row.at.tolist())) == len(row.at)
        assert num_tokens <= len(row.ids)
        found = hidden_states(model, replace(batch, packed=row))[:num_tokens]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def by_sequence(q, k, v, starts, ends, max_q, max_k, *, scale, window_size, **_):
    """What torch's variable-length attention is said to compute, one sequence after another."""
    assert window_size == (-1, 0)
    assert torch.equal(starts, ends)
    assert max_q == max_k
    assert q.dtype == torch.bfloat16
    assert starts.dtype == torch.int32
    assert q.stride(-1) == 1
    groups = q.shape[1] // k.shape[1]
    answers = []
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        assert end - start <= max_q
        qs, ks, vs = (part[start:end].transpose(0, 1).float() for part in (q, k, v))
        ks, vs = (part.repeat_interleave(groups, 0) for part in (ks, vs))
        scores = (qs @ ks.mT * scale).masked_fill(
            torch.ones(end - start, end - start).triu(1).bool(), -torch.inf
        )
        answers.append((scores.softmax(-1) @ vs).transpose(0, 1).to(q.dtype))
    return torch.cat(answers)


def test_flash_is_given_what_it_takes(batch, monkeypatch):
    """Its place is taken by a plain computation from its documented arguments."""
    model = build("llama").float()
    round_weights(model, Precision.BFLOAT16)
    expected = hidden_states(model, batch).float()
    monkeypatch.setattr(attention, "_has_flash", lambda _: True)
    monkeypatch.setattr(attention, "varlen_attn", by_sequence)
    found = hidden_states(model, batch).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * float(expected.abs().max()))
    assert not torch.equal(found, expected)


def test_flash_is_told_what_each_version_of_it_asks_for():
    def of_window(query, *, scale=None, window_size=(-1, -1)): ...

    def of_groups(query, *, scale=None, window_size=(-1, -1), enable_gqa=False): ...

    def of_flag(query, is_causal=False, scale=None): ...

    assert attention.causal_options(of_window) == {"window_size": (-1, 0)}
    assert attention.causal_options(of_groups) == {"window_size": (-1, 0), "enable_gqa": True}
    assert attention.causal_options(of_flag) == {"is_causal": True}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_activations_that_are_computed_again_give_the_same_bits(batch, checkpointed):
    model = build("llama")
    model.train()
    results = []
    for settings in (ForwardSettings(), ForwardSettings(checkpoint_activations=checkpointed)):
        configure_forward(model, settings)
        model.zero_grad()
        response_logprobs(model, batch, 1.0).logprobs.sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def test_rows_of_other_sequences_are_not_compiled_for_anew(monkeypatch):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=512)).eval()
    configure_forward(model, ForwardSettings(compile=True, micro_tokens=64))
    seen = []
    for lengths in ([9, 3, 4], [5, 5], [2] * 7, [12, 2], [11, 1, 1, 1]):
        rows = [list(range(2, 2 + length)) for length in lengths]
        hidden_states(model, collate([r[:1] for r in rows], [r[1:] for r in rows], 0))
        seen.append(len(graphs))
    assert seen[0] > 0
    assert seen[-1] == seen[0], "only the number of tokens is compiled for"


def test_compiled_layers_compute_the_same(batch, monkeypatch):
    # What Dynamo makes of a layer, without the minute that a C++ compiler needs for it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=512)).eval()
    results = []
    for settings in (
        ForwardSettings(),
        ForwardSettings(compile=True, micro_tokens=64, checkpoint_activations=True),
    ):
        configure_forward(model, settings)
        for part in (batch, collate(PROMPTS[:2], RESPONSES[:2], 0)):
            model.zero_grad()
            value = response_logprobs(model, part, 1.0).logprobs
            value.sum().backward()
            results.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    for eager, compiled in ((results[0], results[2]), (results[1], results[3])):
        for one, two in zip(eager, compiled, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sharing", "said"), [(3, "28 attention heads"), (7, "4 key/value heads can neither")]
)
def test_rows_that_heads_cannot_be_shared_out_for_are_refused(tmp_path, sharing, said):
    sizes = {"hidden_size": 56, "num_attention_heads": 28, "num_key_value_heads": 4}
    model = torch.nn.Linear(1, 1)
    model.config = AutoConfig.for_model("qwen2", **sizes)
    ctx = Context("sft", None, 1, tmp_path, world=sharing, sequence_parallel=sharing)
    with pytest.raises(StageError, match=said):
        share_rows(ctx, ALONE, model)
