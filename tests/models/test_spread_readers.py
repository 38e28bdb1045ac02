"""A model that is read by rows is, in all that it computes with, the one that is loaded whole."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.engines.forward.inference import response_batch
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.models import readers
from stages.engines.models.folders import load_policy, load_scalar_model
from stages.engines.models.lean_transformers import AutoModelForCausalLM
from stages.engines.models.readers import load_spread
from stages.engines.models.scalar_class import AutoScalarModel
from stages.engines.processes.ranks import ALONE, connect_alone
from tests.models.families import write_family
from tests.stages.conftest import rewrite_weights

IDS = torch.tensor([[3, 4, 5, 6, 7]])
KINDS = ["qwen2", "gpt2", "gemma3_text", "opt", "mixtral"]
"""Tied; with masks, or scales, that no file has; with a head of another width; rearranged."""
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    connect_alone("cpu")
    yield
    dist.destroy_process_group()


@pytest.fixture
def read():
    """Load a folder as a rank does; whether by rows is noted."""
    by_rows = []

    def whole(*_):
        by_rows.append(False)
        return load_policy(*_)

    def of(folder, precision=Precision.FLOAT32):
        return load_spread(AutoModelForCausalLM, whole, ALONE, folder, "cpu", precision)

    of.by_rows = lambda: not by_rows
    return of


def tensors(model):
    """All that is computed with, by name."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(spread, whole):
    expected = tensors(whole)
    held = tensors(spread)
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype, name
        assert torch.equal(held[name], tensor), name
    with torch.no_grad():
        logits = [model(input_ids=IDS).logits for model in (spread, whole)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", KINDS)
def test_a_model_of_another_kind_is_the_same_spread(tmp_path, read, family):
    folder = write_family(tmp_path / "model", family)
    assert_same(read(folder), load_policy(folder))


@pytest.mark.parametrize("changes", [{}, LLAMA3, {"tie_word_embeddings": True}])
def test_a_llama_is_read_by_rows_and_rounded(tmp_path, read, changes):
    folder = write_family(tmp_path / "model", "llama", **changes)
    assert_same(read(folder, Precision.BFLOAT16), load_policy(folder, "cpu", Precision.BFLOAT16))
    assert read.by_rows()


@pytest.mark.parametrize("equal", [False, True])
def test_a_head_that_is_stored_beside_the_embeddings_it_is_tied_to_counts(tmp_path, read, equal):
    folder = write_family(tmp_path / "model", "llama", tie_word_embeddings=True)

    def add_head(tensors):
        embeddings = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embeddings.clone() if equal else embeddings.flip(0)

    rewrite_weights(folder / "model.safetensors", add_head)
    whole = load_policy(folder)
    assert (whole.lm_head.weight is whole.model.embed_tokens.weight) == equal
    assert_same(read(folder), whole)


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_a_scalar_model_is_the_same_spread(tmp_path, family):
    from stages.engines.models.folders import save_model, start_scalar_model

    base = write_family(tmp_path / "base", family)
    model = start_scalar_model(base)
    torch.nn.init.normal_(model.score.weight)
    save_model(model, tmp_path / "model", tokenizer_from=base)
    how = (ALONE, tmp_path / "model", "cpu", Precision.FLOAT32)
    spread = load_spread(AutoScalarModel, None, *how)
    assert_same(spread, load_scalar_model(tmp_path / "model"))


def test_what_a_file_lacks_or_spoils_is_an_error(tmp_path, read):
    folder = write_family(tmp_path / "model", "llama")
    weights = folder / "model.safetensors"
    rewrite_weights(weights, lambda tensors: tensors["model.norm.weight"][0].fill_(torch.nan))
    with pytest.raises(StageError, match=r"model\.norm\.weight has numbers that are not finite"):
        read(folder)
    rewrite_weights(weights, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(StageError, match=r"has no tensor model\.norm\.weight"):
        read(folder)


def test_a_model_that_was_let_go_is_not_in_memory_beside_the_next(tmp_path, read):
    folder = write_family(tmp_path / "model", "llama")
    rows = [{"prompt_ids": [3], "response_ids": [4, 5], "support": None, "loss_mask": None}]
    model = read(folder)
    with torch.no_grad():
        response_logprobs(model, response_batch(model, rows, "cpu"), 1.0)
    first = weakref.ref(model)
    gc.disable()  # nothing is to depend on when Python looks for garbage by itself
    try:
        del model
        read(folder)
        assert first() is None
    finally:
        gc.enable()


def test_rows_that_are_not_the_files_are_an_error(tmp_path, read, monkeypatch):
    folder = write_family(tmp_path / "model", "llama")
    real = readers.check_rows

    def spoiled(model, folder, stored, rows):
        rows["model.norm.weight"][1][0].add_(0.5)
        real(model, folder, stored, rows)

    monkeypatch.setattr(readers, "check_rows", spoiled)
    with pytest.raises(StageError, match=r"model\.norm\.weight in memory is not what the file"):
        read(folder)
