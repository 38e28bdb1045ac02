"""Peak GPU memory of each kind of work, against the model's size and the context.

    python benchmarks/memory.py [--models 135m,1.1b,7b] [--contexts 1024,4096,16384,32768] [--write]

Each cell is the most that torch had allocated (`peak_gib`) and taken from the GPU (`reserved_gib`)
while the work was done once, with all that stays between steps: weights, float32 weights, moments.
A forward pass has one sequence of the full context (`micro_tokens` = context; a pair, for reward
model and DPO), the least that can be had: more tokens in a pass need more in proportion. A rollout
decodes 8 samples of one prompt. Nothing is compiled. What does not fit is recorded as that, and
longer contexts are then not tried.

`sleep` is what the GPU had in use with a generator awake, asleep and awake again. Without a GPU the
process's own memory is shown instead, which says only that the script runs.

`--write` records the result in benchmarks/results/memory.json.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks import records, training
from benchmarks.workloads import FIRST_WORD, SHAPES, Sequences, make_model
from stages.context import Context, StageError
from stages.contracts.catalog import bind
from stages.contracts.lora import LoraParams
from stages.contracts.params import Params
from stages.contracts.precision import Precision
from stages.engines.forward.inference import over_responses
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models.lora import open_for_training
from stages.engines.models.precision import DTYPES
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Plan, train
from stages.engines.training.optimizer import Learner
from stages.engines.training.rl_state import RlState
from stages.policy_update import learn

RESULTS = records.RESULTS / "memory.json"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PRECISION = Precision.BFLOAT16 if CUDA else Precision.FLOAT32
SLOTS, NEW_TOKENS = 8, 32
SLEEPERS = ("tiny", "135m", "1.1b")
"""Models that are small enough to be written to a folder first."""
GIB = 2**30


@dataclass(frozen=True)
class Cell:
    """What is measured at every context."""

    stage: str
    way: str
    work: Callable[[int, Context], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="135m,1.1b,7b")
    parser.add_argument("--contexts", default="1024,4096,16384,32768")
    parser.add_argument("--total", type=float, default=240, help="seconds in which cells begin")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    contexts = [int(number) for number in options.contexts.split(",")]
    result: dict[str, Any] = {
        "measured": "torch.cuda" if CUDA else "the process's own memory: there is no GPU",
        "hardware": records.hardware(DEVICE),
        "gpu_gib": round(torch.cuda.mem_get_info()[1] / GIB, 1) if CUDA else None,
        "precision": PRECISION.value,
        "slots": SLOTS,
        "versions": records.versions("torch", "transformers", "peft", "triton"),
        "models": {},
    }
    until = time.monotonic() + options.total
    for model in options.models.split(","):
        of_model = result["models"][model] = {"cells": []}
        began = time.monotonic()
        try:
            for cell in measured(model, contexts, until):
                of_model["cells"].append(cell)
                print(json.dumps(cell), flush=True)
            if model in SLEEPERS and time.monotonic() < until:
                of_model["sleep"] = sleep(model)
                print(json.dumps(of_model["sleep"]), flush=True)
        except Exception as error:  # what was measured until then is kept
            of_model["failed"] = repr(error)[:1000]
            print(f"{model}: {error!r}", flush=True)
        of_model["seconds"] = round(time.monotonic() - began, 1)
        _free()
        if options.write:
            records.write(RESULTS, result)
    print(table(result, contexts))


def measured(shape: str, contexts: list[int], until: float) -> Iterator[dict[str, Any]]:
    """Every cell, learner by learner, so that no two models are in memory at once."""
    length = max(contexts) + 1
    for cells in (_of_answering, _of_learning, _of_the_reward_model, _of_an_adapter):
        for cell in cells(shape, length):
            largest = None
            for context in contexts:
                if time.monotonic() > until:
                    return
                if largest is not None:
                    continue
                found = _peak(lambda cell=cell, context=context: _once(cell, context))  # type: ignore[misc]
                if "does_not_fit" in found:
                    largest = context
                yield {"stage": cell.stage, "way": cell.way, "context": context, **found}
        del cell
        _free()


def _once(cell: Cell, context: int) -> None:
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


def _peak(work: Callable[[], object]) -> dict[str, Any]:
    _free()
    if not CUDA:
        work()
        return {"rss_gib": round(_own_memory(), 2)}
    at_rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        work()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        return {"does_not_fit": str(error)[:200]}
    except StageError as error:
        return {"does_not_fit": str(error)[:400]}
    return {
        "at_rest_gib": round(at_rest / GIB, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
        "seconds": round(time.perf_counter() - began, 2),
    }


def _of_answering(shape: str, length: int) -> Iterator[Cell]:
    """A policy that does not learn."""
    model = _random(LlamaForCausalLM, shape, length).to(DTYPES[PRECISION]).eval()

    def rollout(context: int, _: Context) -> None:
        generator = TorchGenerator(DEVICE, PRECISION, SLOTS)
        generator.take(model, "random")
        prompt = _tokens(shape, context - NEW_TOKENS, 1)
        requests = [Request(prompt, seed=index) for index in range(SLOTS)]
        generator.generate(requests, max_new_tokens=NEW_TOKENS, sampling=Sampling())
        generator.close()

    def score(context: int, ctx: Context) -> None:
        over_responses(ctx, model, _rows(shape, context), _logprobs(model))

    yield Cell("rollout", "", rollout)
    yield Cell("score (log-probs)", "", score)


def _of_learning(shape: str, length: int) -> Iterator[Cell]:
    """One learner for all that trains a policy whole."""
    with _learner(_random(LlamaForCausalLM, shape, length)) as learner:
        _warm_up("sft", shape, learner)
        for way in ("", "checkpointed"):
            yield Cell("sft", way, _training("sft", shape, learner))
            yield Cell("dpo", way, _training("dpo", shape, learner))
            yield Cell("policy_update", way, _updating(shape, learner))


def _of_the_reward_model(shape: str, length: int) -> Iterator[Cell]:
    model = _random(LlamaForSequenceClassification, shape, length, num_labels=1)
    with _learner(model) as learner:
        _warm_up("reward_model", shape, learner)
        for way in ("", "checkpointed"):
            yield Cell("reward_model", way, _training("reward_model", shape, learner))


def _of_an_adapter(shape: str, length: int) -> Iterator[Cell]:
    model = open_for_training(
        lambda *_: _random(LlamaForCausalLM, shape, length),
        Path("nowhere"),
        DEVICE,
        LoraParams(rank=16),
        seed=17,
    )
    with _learner(model) as learner:
        _warm_up("sft", shape, learner)
        for way in ("LoRA", "LoRA, checkpointed"):
            yield Cell("sft", way, _training("sft", shape, learner))


@contextmanager
def _learner(model: Any) -> Iterator[Learner]:
    how = Optimization(learning_rate=1e-6, max_grad_norm=1.0, precision=PRECISION)
    yield Learner(model, how)


def _warm_up(stage: str, shape: str, learner: Learner) -> None:
    """One step, after which moments are there as they are between any two steps."""
    _once(Cell(stage, "", _training(stage, shape, learner)), 64)


def _training(stage: str, shape: str, learner: Learner) -> Callable[[int, Context], object]:
    def work(context: int, ctx: Context) -> object:
        _drop_gradients(learner)
        prompt, chosen, rejected = (
            _tokens(shape, number, seed)
            for seed, number in enumerate((8, context - 8, context - 8))
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
        said = over_responses(ctx, learner.model, rows, _logprobs(learner.model))
        scored = [{**row, "logprobs": each} for row, each in zip(rows, said, strict=True)]
        return learn(config, {}, ctx, ALONE, RlState(0, None, {}), {"policy": learner}, scored)

    return work


def _drop_gradients(learner: Learner) -> None:
    """Those that a step left behind which did not fit."""
    for parameter in (*learner.parameters(), *learner.model.parameters()):
        parameter.grad = None


def _logprobs(model: Any) -> Any:
    return lambda batch: response_logprobs(model, batch, 1.0).logprobs


def _rows(shape: str, context: int, count: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "prompt_id": f"{0:016x}",
            "sample_index": index,
            "greedy": False,
            "prompt_ids": _tokens(shape, 8, 1),
            "response_ids": _tokens(shape, context - 8, 2 + index),
            "support": None,
            "seed": index,
            "finish_reason": "length",
            "policy_hash": "random",
            "reward": float(index),
            "ref_logprobs": None,
        }
        for index in range(count)
    ]


def _tokens(shape: str, number: int, seed: int) -> list[int]:
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


def sleep(shape: str) -> dict[str, Any]:
    """What the GPU has in use with a generator awake, asleep, and awake again."""
    generator = TorchGenerator(DEVICE, PRECISION, 512)
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, Path(folder) / "model")
        _free()
        before = _in_use()
        generator.load(Path(folder) / "model")
    requests = [Request(_tokens(shape, 25, 1), seed=index) for index in range(512)]

    def answer() -> None:
        generator.generate(requests, max_new_tokens=256 if CUDA else 4, sampling=Sampling())

    answer()
    awake = _in_use()
    seconds_to_sleep = _timed(generator.sleep)
    asleep = _in_use()
    seconds_to_wake = _timed(generator.wake)
    answer()
    again = _in_use()
    generator.close()
    _free()
    names = ("before", "awake", "asleep", "awake_again", "closed")
    used = dict(zip(names, (before, awake, asleep, again, _in_use()), strict=True))
    return {
        "slots": 512,
        "seconds_to_sleep": seconds_to_sleep,
        "seconds_to_wake": seconds_to_wake,
        **{f"{name}_gib": value for name, value in used.items()},
    }


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    return round(time.perf_counter() - began, 3)


def _in_use() -> dict[str, float]:
    """By torch's count, and by the driver's, which sees graphs and libraries too."""
    if not CUDA:
        return {"rss": round(_own_memory(), 2)}
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    return {"allocated": round(allocated / GIB, 2), "driver": round((total - free) / GIB, 2)}


def _own_memory() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss / GIB)


def _free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def table(result: dict[str, Any], contexts: list[int]) -> str:
    """As Markdown: peak GiB by stage and context, for each model."""
    name = "peak_gib" if CUDA else "rss_gib"
    head = ["model", "stage", *(f"{context / 1024:g}k" for context in contexts)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for model, found in result["models"].items():
        rows: dict[str, dict[int, str]] = {}
        for cell in found["cells"]:
            row = rows.setdefault(", ".join(filter(None, (cell["stage"], cell["way"]))), {})
            row[cell["context"]] = str(cell.get(name, "does not fit"))
        for stage, row in rows.items():
            cells = [row.get(context, "–") for context in contexts]
            lines.append("| " + " | ".join([model, stage, *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
