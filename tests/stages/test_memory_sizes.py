"""The memory estimate has the engines' own constants, and counts the weights that models have."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.workloads import SHAPES
from stages.contracts.precision import Precision
from stages.engines.forward import head, packed
from stages.engines.generation import generators
from stages.engines.generation.llama import decoder as decoding
from stages.engines.models import tensor_files
from stages.engines.processes import deepspeed_engine
from stages.engines.training import offload
from stages.memory import model, work
from stages.memory.shape import shape_of


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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_weights_is_the_models(shape):
    sizes = shape_of(SHAPES[shape])
    with torch.device("meta"):
        policy = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
        scalar = LlamaForSequenceClassification(LlamaConfig(**SHAPES[shape], num_labels=1))
    assert sizes.weights == policy.num_parameters()
    rated = model.Model(sizes, Precision.BFLOAT16, scalar=True).weights
    assert rated == scalar.num_parameters() - scalar.score.weight.numel()
