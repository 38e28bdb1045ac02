"""The memory estimate has the engines' own constants, and counts the weights that models have."""

import ctypes
import gc
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from benchmarks.workloads import SHAPES
from stages.contracts.lora import LoraParams, LoraSave
from stages.contracts.precision import Precision
from stages.engines.forward import head, packed
from stages.engines.generation import generators
from stages.engines.generation.llama import decoder as decoding
from stages.engines.models import tensor_files
from stages.engines.models.folders import load_policy, save_model
from stages.engines.models.lora import open_for_training
from stages.engines.processes import deepspeed_engine
from stages.engines.training import offload
from stages.memory import model, work
from stages.memory.shape import REARRANGED, shape_of
from tests.stages.forks import FORKS
from tests.waiting import TIMEOUT_S


def test_constants_are_those_of_the_engines():
    assert model.CHUNK_TOKENS == head.CHUNK_TOKENS
    assert model.CHUNK_LOGITS == head.CHUNK_LOGITS
    assert model.COMPILED_TOKENS == head.COMPILED_TOKENS
    assert model.PREFILL_TOKENS == decoding.PREFILL_TOKENS
    assert model.CACHE_BLOCK == decoding.CACHE_BLOCK
    assert model.BUCKET_ELEMENTS == deepspeed_engine.BUCKET_ELEMENTS
    assert model.PIECE_BYTES == offload.PIECE_BYTES
    assert work.TORCH_WEIGHTS == generators.TORCH_WEIGHTS
    assert work.WRITERS == tensor_files.THREADS
    assert work.FILE_BYTES == tensor_files.FILE_BYTES
    assert work.SIZES == packed.SIZES


def held():
    """Memory that is this process's own and in use, in bytes.

    What malloc keeps of freed memory depends on the order in which threads free it.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return 1024 * int(kib)


def note_growth(folder, said):
    """By how much that grows when a policy is loaded."""
    before = held()
    policy = load_policy(folder)
    said.write_text(str(held() - before))
    del policy


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="trims as the GNU C library does")
def test_a_merged_adapter_takes_four_bytes_a_weight_and_a_mapped_folder_hardly_any(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "whole")
    lora = LoraParams(rank=1, save=LoraSave.ADAPTER)
    learner = open_for_training(load_policy, tmp_path / "whole", "cpu", lora, seed=3)
    save_model(learner, tmp_path / "adapter", tokenizer_from=tmp_path / "whole", lora=lora)
    grown = {}
    for kind in ("whole", "adapter"):
        said = tmp_path / f"said-{kind}"
        process = FORKS.Process(target=note_growth, args=(tmp_path / kind, said))
        process.start()
        process.join(TIMEOUT_S)
        grown[kind] = int(said.read_text())
    whole = model.Model(shape_of(sizes), Precision.FLOAT32)
    expected = work._loading(replace(whole, merged=True), rounds=True)
    assert expected == 4 * whole.weights
    assert grown["adapter"] == pytest.approx(expected, rel=0.15)
    assert work._loading(whole, rounds=True) == 0
    assert grown["whole"] < expected / 5


@pytest.mark.parametrize("family", REARRANGED)
def test_families_that_count_as_rearranged_are(family):
    assert get_checkpoint_conversion_mapping(family)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_weights_is_the_models(shape):
    sizes = shape_of(SHAPES[shape])
    with torch.device("meta"):
        policy = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
        scalar = LlamaForSequenceClassification(LlamaConfig(**SHAPES[shape], num_labels=1))
    assert sizes.weights == policy.num_parameters()
    rated = model.Model(sizes, Precision.BFLOAT16, scalar=True).weights
    assert rated == scalar.num_parameters() - scalar.score.weight.numel()
