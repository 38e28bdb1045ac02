"""The kinds of work whose memory is measured (memory.py), each at any context.

A model is made once for all that it can do, and one at a time is in memory.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks import training
from benchmarks.workloads import FIRST_WORD, SHAPES, Sequences
from stages.context import Context
from stages.contracts.catalog import bind
from stages.contracts.lora import LoraParams
from stages.contracts.params import Params
from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload
from stages.engines.forward.inference import logprobs_by, over_responses
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models.lora import open_for_training
from stages.engines.models.precision import DTYPES
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Plan, train
from stages.engines.training.optimizer import Learner
from stages.engines.training.rl_state import RlState
from stages.learning.update import Update
from stages.policy_update import learn

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PRECISION = Precision.BFLOAT16 if CUDA else Precision.FLOAT32
SLOTS, NEW_TOKENS = 8, 32
OFFLOADED = ("8b",)
"""Models that learn with AdamW's moments on the host, as one GPU has no room for these."""


@dataclass(frozen=True)
class Cell:
    """What is measured at every context."""

    stage: str
    way: str
    work: Callable[[int, Context], object]


def once(cell: Cell, context: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ctx = Context(
            stage="memory",
            key="iter_001",
            seed=17,
            folder=Path(folder),
            device=DEVICE,
            micro_tokens=context,
            checkpoint_activations=cell.way.endswith("checkpointed"),
            checkpoint_seconds=1e9,
        )
        cell.work(context, ctx)


def _of_answering(shape: str, length: int) -> Iterator[Cell]:
    """A policy that does not learn."""
    model = _random(LlamaForCausalLM, shape, length).to(DTYPES[PRECISION]).eval()

    def rollout(context: int, _: Context) -> None:
        generator = TorchGenerator(DEVICE, PRECISION, SLOTS)
        generator.take(model, "random")
        prompt = tokens(shape, context - NEW_TOKENS, 1)
        requests = [Request(prompt, seed=index) for index in range(SLOTS)]
        generator.generate(requests, max_new_tokens=NEW_TOKENS, sampling=Sampling())
        generator.close()

    def score(context: int, ctx: Context) -> None:
        over_responses(ctx, _rows(shape, context), logprobs_by("policy", lambda: model, 1.0))

    yield Cell("rollout", "", rollout)
    yield Cell("score (log-probs)", "", score)


def _of_learning(shape: str, length: int) -> Iterator[Cell]:
    """One learner for all that trains a policy whole."""
    with _learner(shape, _random(LlamaForCausalLM, shape, length)) as learner:
        _warm_up("sft", shape, learner)
        for way in _ways(shape):
            yield Cell("sft", way, _training("sft", shape, learner))
            yield Cell("dpo", way, _training("dpo", shape, learner))
            yield Cell("policy_update", way, _updating(shape, learner))


def _of_the_reward_model(shape: str, length: int) -> Iterator[Cell]:
    model = _random(LlamaForSequenceClassification, shape, length, num_labels=1)
    with _learner(shape, model) as learner:
        _warm_up("reward_model", shape, learner)
        for way in _ways(shape):
            yield Cell("reward_model", way, _training("reward_model", shape, learner))


def _of_an_adapter(shape: str, length: int) -> Iterator[Cell]:
    model = open_for_training(
        lambda *_: _random(LlamaForCausalLM, shape, length),
        Path("nowhere"),
        DEVICE,
        LoraParams(rank=16),
        seed=17,
    )
    with _learner("", model) as learner:
        _warm_up("sft", shape, learner)
        for way in ("LoRA", "LoRA, checkpointed"):
            yield Cell("sft", way, _training("sft", shape, learner))


def _ways(shape: str) -> list[str]:
    return ["offloaded", "offloaded, checkpointed"] if shape in OFFLOADED else ["", "checkpointed"]


@contextmanager
def _learner(shape: str, model: Any) -> Iterator[Learner]:
    how = Optimization(learning_rate=1e-6, max_grad_norm=1.0, precision=PRECISION)
    yield Learner(model, how, Offload.OPTIMIZER if shape in OFFLOADED else Offload.NONE)


def _warm_up(stage: str, shape: str, learner: Learner) -> None:
    """One step, after which moments are there as they are between any two steps."""
    once(Cell(stage, "", _training(stage, shape, learner)), 64)


def _training(stage: str, shape: str, learner: Learner) -> Callable[[int, Context], object]:
    def work(context: int, ctx: Context) -> object:
        _drop_gradients(learner)
        prompt, chosen, rejected = (
            tokens(shape, number, seed) for seed, number in enumerate((8, context - 8, context - 8))
        )
        data = Sequences([prompt], [chosen], [rejected])
        what, _ = training.work_on(stage, learner.model, data, DEVICE)
        plan = Plan(1, 1, 1, seed=17, learning_rate=lambda *_: 1.0)
        return train(ctx, {"policy": learner}, plan, what, shown=["loss"])

    return work


def _updating(shape: str, learner: Learner) -> Callable[[int, Context], object]:
    """A GRPO step over two responses, one in each pass."""
    update = {"epochs": 1, "batch_size": 2, "kl_coef": 0.0, "max_logprob_gap": 1e9, "max_kl": 1e9}
    rl = {"algorithm": "grpo", "reward": "verifier"}
    params = Params.model_validate({"rl": rl, "policy_update": update})
    config = bind("policy_update@iter_001", params).config

    def work(context: int, ctx: Context) -> object:
        _drop_gradients(learner)
        rows = _rows(shape, context, 2)
        said = over_responses(ctx, rows, logprobs_by("policy", lambda: learner.model, 1.0))
        scored = [{**row, "logprobs": each} for row, each in zip(rows, said, strict=True)]
        state = RlState(0, None, {})
        return learn(Update(config, {}, ctx, ALONE, state, {"policy": learner}, scored))

    return work


def _drop_gradients(learner: Learner) -> None:
    """Those that a step left behind which did not fit."""
    for parameter in (*learner.parameters(), *learner.model.parameters()):
        parameter.grad = None


def _rows(shape: str, context: int, count: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "prompt_id": f"{0:016x}",
            "sample_index": index,
            "greedy": False,
            "prompt_ids": tokens(shape, 8, 1),
            "response_ids": tokens(shape, context - 8, 2 + index),
            "support": None,
            "loss_mask": None,
            "seed": index,
            "finish_reason": "length",
            "policy_hash": "random",
            "reward": float(index),
            "ref_logprobs": None,
        }
        for index in range(count)
    ]


def tokens(shape: str, number: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    words = (FIRST_WORD, SHAPES[shape]["vocab_size"])
    tokens: list[int] = torch.randint(*words, (number,), generator=draw).tolist()
    return tokens


def _random(kind: Any, shape: str, length: int, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SHAPES[shape], "max_position_embeddings": max(2048, length)}
    config = LlamaConfig(**sizes, pad_token_id=0, eos_token_id=None, **more)
    with torch.device(DEVICE):
        return kind(config).float()


KINDS = (_of_answering, _of_learning, _of_the_reward_model, _of_an_adapter)
"""Each gives the cells of one model."""
