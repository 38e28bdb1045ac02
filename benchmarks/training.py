"""Real tokens a second of training: SFT, reward model and DPO, through the code that stages run.

Random weights and random sequences of uneven lengths (workloads.py). A token counts once however
often it is computed; padding, and what fills compiled rows up, counts nothing. MFU counts six
operations a token for every weight that multiplies (all but the embedding's lookup) and twelve
times width and half the length for attention, against the GPU's peak in bfloat16 on paper; beside
it is the share of what one large matrix product reaches in the same process.

    python benchmarks/training.py [--model 135m|1.1b|8b|tiny] [--stages sft,reward_model,dpo]
        [--micro-tokens 32768] [--compile] [--checkpoint] [--offload] [--padded] [--profile]
        [--in-memory] [--write]

`--in-memory` makes policies up where they learn, for a model that the disk has no room for.
`--padded` runs the padded way in turn with ours, in the same process. `--write` records the result
in benchmarks/results/training.json, by model, stage and settings.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import records
from benchmarks.peaks import GIB, peaks
from benchmarks.step_clock import StepClock
from benchmarks.workloads import SHAPES, Sequences, load_at_random, make_model, sequences
from stages.algorithms.preference import PreferenceObjective
from stages.context import Context
from stages.contracts.lora import LoraParams
from stages.contracts.objectives import PreferenceLoss
from stages.contracts.precision import Precision
from stages.contracts.reward_model import RewardModelParams
from stages.contracts.sharding import Offload
from stages.engines.forward import packed
from stages.engines.models.folders import load_policy, start_scalar_model
from stages.engines.models.lora import open_for_training
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Plan, Work, train
from stages.engines.training.optimizer import Learner
from stages.learning.imitation import imitation
from stages.learning.pairs import preference
from stages.reward_model import _from_pairs

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
RESULTS = records.RESULTS / "training.json"
STAGES = ("sft", "reward_model", "dpo")
SKIPPED_STEPS = 2
"""They warm up."""


def main() -> None:
    options = options_of(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        make_model(options.model, Path(folder) / "model", weights=not options.in_memory)
        for stage in options.stages.split(","):
            for padded in [False, True] if options.padded else [False]:
                result = measure(stage, Path(folder), options, padded=padded)
                print(json.dumps(result), flush=True)
                if options.write:
                    records.add(RESULTS, _key(result), result)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=[p.value for p in Precision])
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=512, help="in an optimizer step")
    parser.add_argument("--steps", type=int, default=4, help="timed, after two that warm up")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--offload", action="store_true", help="AdamW's moments on the host")
    parser.add_argument("--in-memory", action="store_true", help="no weights on the disk")
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where a GPU's time goes")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(words)
    options.precision = Precision(
        options.precision or ("bfloat16" if options.device == "cuda" else "float32")
    )
    return options


def measure(
    stage: str, folder: Path, options: argparse.Namespace, *, padded: bool
) -> dict[str, Any]:
    """Tokens a second over the timed steps; a step is an optimizer step of `rows` rows."""
    num_rows = options.rows * (options.steps + SKIPPED_STEPS)
    load = load_at_random if options.in_memory else load_policy
    if stage == "reward_model":
        load = start_scalar_model
    how = Optimization(
        learning_rate=1e-5, max_grad_norm=1.0, precision=Precision(options.precision)
    )
    offload = Offload.OPTIMIZER if options.offload else Offload.NONE
    data = sequences(options.model, num_rows)
    job = Path(tempfile.mkdtemp(dir=folder))
    clock = StepClock(
        stage="benchmark",
        key=None,
        seed=17,
        folder=job,
        device=options.device,
        micro_tokens=options.micro_tokens,
        compile=options.compile,
        checkpoint_activations=options.checkpoint,
        checkpoint_seconds=1e9,
    )
    plan = Plan(num_rows, options.rows, 1, seed=17, learning_rate=lambda *_: 1.0)
    with peaks() as memory:
        model = open_for_training(load, folder / "model", options.device, LoraParams(), seed=1)
        learner = Learner(model, how, offload)
        work, lengths = work_on(stage, learner.model, data, options.device)
        if padded:
            packed._packable[learner.model] = False
        train(clock, {"policy": learner}, plan, work, shown=["loss"])
    seconds = clock.seconds(SKIPPED_STEPS)
    timed = [row for step in range(SKIPPED_STEPS, plan.num_steps) for row in plan.rows(step)]
    num_tokens = sum(sum(lengths[row]) for row in timed)
    if options.profile and options.device == "cuda":
        _profile(clock, learner, plan, work)
    flops_per_second = sum(
        _flops(learner.model, length, stage) for row in timed for length in lengths[row]
    ) / sum(seconds)
    name = records.hardware(options.device)
    peak = next((peak for kind, peak in PEAK_FLOPS.items() if kind in name), None)
    return {
        "model": options.model,
        "stage": stage,
        "way": "padded" if padded else "packed",
        "precision": options.precision,
        "compile": options.compile,
        "checkpoint_activations": options.checkpoint,
        "offload": options.offload,
        "micro_tokens": options.micro_tokens,
        "rows_a_step": options.rows,
        "mean_length": round(num_tokens / sum(len(lengths[row]) for row in timed), 1),
        "tokens_per_second": round(num_tokens / sum(seconds)),
        "steps_seconds": [round(value, 3) for value in seconds],
        "mfu": round(flops_per_second / peak, 3) if peak else None,
        "share_of_matmul_rate": round(flops_per_second / matmul_rate(), 3)
        if options.device == "cuda"
        else None,
        "peak_gigabytes": round(memory["peak_memory_gib"] * GIB / 1e9, 1)
        if options.device == "cuda"
        else None,
        **memory,
        "hardware": name,
        "versions": records.versions("torch", "transformers", "triton"),
    }


def work_on(stage: str, model: Any, data: Sequences, device: str) -> tuple[Work, list[list[int]]]:
    """What is learnt, and the lengths of the sequences of each row."""
    if stage == "sft":
        work = imitation(model, data.prompts, data.chosen, device, lambda i: f"row {i}")
        pairs = zip(data.prompts, data.chosen, strict=True)
        return work, [[len(prompt) + len(response)] for prompt, response in pairs]
    rows = [
        {
            "prompt_ids": prompt,
            "chosen_ids": chosen,
            "rejected_ids": rejected,
            "chosen_ref": -1000.0,
            "rejected_ref": -1000.0,
            "margin": None,
        }
        for prompt, chosen, rejected in zip(data.prompts, data.chosen, data.rejected, strict=True)
    ]
    lengths = [
        [len(row["prompt_ids"]) + len(row[side]) for side in ("chosen_ids", "rejected_ids")]
        for row in rows
    ]
    if stage == "reward_model":
        return _from_pairs(model, rows, RewardModelParams(), device), lengths
    objective = PreferenceObjective(PreferenceLoss.SIGMOID, beta=0.1)
    return preference(model, rows, device, objective), lengths


def _flops(model: Any, length: int, stage: str) -> float:
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    if stage == "reward_model" or not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size  # looked up, not multiplied
    heads = config.num_attention_heads * model.base_model.layers[0].self_attn.head_dim
    attention = 12 * config.num_hidden_layers * heads * length / 2
    return float(length * (6 * weights + attention))


def matmul_rate(size: int = 8192, rounds: int = 20) -> float:
    """Operations a second of a large matrix product in bfloat16."""
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(rounds + 3):
        if number == 3:
            begin.record()
        square @ square
    end.record()
    end.synchronize()
    return rounds * 2.0 * size**3 / (begin.elapsed_time(end) / 1000)


def _profile(ctx: Context, learner: Learner, plan: Plan, work: Work) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        one = Plan(plan.batch_size, plan.batch_size, 1, seed=17, learning_rate=lambda *_: 1.0)
        train(ctx, {"policy": learner}, one, work, shown=["loss"], before="profile")
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))


def _key(result: dict[str, Any]) -> str:
    key = [result[name] for name in ("model", "stage", "way", "precision", "micro_tokens")]
    flags = [name for name in ("compile", "checkpoint_activations", "offload") if result[name]]
    return " ".join(map(str, [*key, *flags]))


if __name__ == "__main__":
    main()
