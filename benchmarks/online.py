"""Seconds of a fused step: generation, scoring and the update of a policy in one process.

    python benchmarks/online.py --model 135m [--steps 6] [--overlap] [--write]

Fixed work: a GRPO step of 64 prompts x 8 samples x exactly 256 new tokens, no KL term, one
optimizer step, in bfloat16 (float32 without a GPU). The model has no token that ends a response,
and rewards are made up from the text. What is timed is the stage itself, from the end of one step
to the end of the next; the first two, which compile and record, are left out. `--model tiny` shows
on any machine that it runs. `--write` adds the result to benchmarks/results/online.json.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records, workloads
from benchmarks.step_clock import StepClock

RESULTS = records.RESULTS / "online.json"
SKIPPED_STEPS = 2
STAGE = "online@fast"


def main() -> None:
    arguments = options_of(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    print(json.dumps(result, indent=2))
    if arguments.write:
        ways = [way for way in ("compile", "overlap", "reference") if getattr(arguments, way)]
        records.add(RESULTS, " ".join([arguments.model, *ways]), result)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=workloads.SHAPES, default="135m")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--reference", action="store_true", help="measure the KL all the same")
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true", help="a table of the last step's time")
    parser.add_argument("--write", action="store_true", help="record the result")
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    import torch

    from stages import online
    from stages.contracts.catalog import bind
    from stages.contracts.params import Params

    on_gpu = torch.cuda.is_available()
    work = workloads.rl_step(arguments.model)
    params = Params.model_validate(changes(arguments, work, on_gpu))
    bound = bind(STAGE, params)
    inputs = {name: root / path for name, path in bound.inputs.items()}
    outs = {name: root / path for name, path in bound.outs.items()}
    make_inputs(arguments.model, work.num_prompts, inputs)
    for path in outs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    ctx = context(root / "job", params.seed, "cuda" if on_gpu else "cpu", arguments)
    rewards_from_text()
    began = time.perf_counter()
    if arguments.profile:
        profiled(lambda: online.run(bound.config, inputs, outs, ctx))
    else:
        online.run(bound.config, inputs, outs, ctx)
    whole = time.perf_counter() - began
    lines = (ctx.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # With overlap, the last step has nothing to sample ahead.
    timed = slice(SKIPPED_STEPS, -1 if arguments.overlap else None)
    steps = [json.loads(line)["metrics"] for line in lines][timed]
    of_step = ctx.seconds(SKIPPED_STEPS)[: len(steps)]
    made = work.num_responses * work.new_tokens
    assert all(step["num_tokens"] == made for step in steps), steps
    parts = [name for name in steps[0] if name.endswith("_seconds")]
    return {
        "model": arguments.model,
        "step_seconds": statistics.median(of_step),
        "fastest_step_seconds": min(of_step),
        "steps_seconds": [round(value, 3) for value in of_step],
        **{name: statistics.median(step[name] for step in steps) for name in parts},
        "tokens_per_second": made / statistics.median(of_step),
        "num_new_tokens": made,
        "stage_seconds": whole,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("write", "profile")},
        "hardware": records.hardware("cuda" if on_gpu else "cpu"),
        "versions": records.versions("torch", "transformers", "triton"),
    }


def changes(arguments: argparse.Namespace, work: workloads.RlStep, on_gpu: bool) -> dict[str, Any]:
    responses = work.num_responses
    update: dict[str, Any] = {"epochs": 1, "batch_size": responses, "kl_coef": 0.0, "max_kl": 1e9}
    if arguments.overlap:
        update |= {"mismatch": "token_truncate", "max_logprob_gap": 1.0}
    score = {"missing_eos_penalty": 0.0, "reference": arguments.reference}
    return {
        "precision": "bfloat16" if on_gpu else "float32",
        "model": {"max_length": workloads.MAX_LENGTH},
        "rl": {
            "algorithm": "grpo",
            "reward": "verifier",
            "iterations": {},
            "online": {"fast": {"policy": "sft", "steps": arguments.steps}},
        },
        "rollout": {
            "prompts": work.num_prompts,
            "samples": work.num_samples,
            "max_new_tokens": work.new_tokens,
            "batch_size": responses,
        },
        "score": score,
        "policy_update": update,
        "online": {"overlap": arguments.overlap},
    }


def make_inputs(shape: str, num_prompts: int, inputs: dict[str, Path]) -> None:
    """A policy without an end, prompts, a verifier, and the state of a policy that begins."""
    from stages.data import schema
    from stages.data.artifacts import write_parquet
    from stages.engines.training.rl_state import start_state
    from stages.rewards.verifier import Verifier

    folder = inputs["policy"]
    for name in ("policy", "prompts", "reward"):
        inputs[name].parent.mkdir(parents=True, exist_ok=True)
    workloads.make_model(shape, folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        values["eos_token_id"] = None
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    start_state(inputs["state"])
    inputs["verifier"].mkdir(parents=True, exist_ok=True)
    Verifier().save(inputs["verifier"])
    rows = [
        {
            "prompt_id": f"{index:016x}",
            "prompt": workloads.text(ids),
            "prompt_ids": ids,
            "answer": "",
            "extra": "{}",
        }
        for index, ids in enumerate(workloads.sequences(shape, num_prompts).prompts)
    ]
    write_parquet(inputs["prompts"], rows, schema.PromptRow)


def rewards_from_text() -> None:
    """As quick as a verifier, and different from response to response."""
    from stages.rewards.verifier import Verifier

    Verifier.reward = lambda _, response, *__, **___: float(len(response) % 7)  # type: ignore[method-assign]


def context(folder: Path, seed: int, device: str, arguments: argparse.Namespace) -> StepClock:
    folder.mkdir()
    return StepClock(
        stage=STAGE,
        key="fast",
        seed=seed,
        folder=folder,
        device=device,
        micro_tokens=arguments.micro_tokens,
        compile=arguments.compile,
    )


def profiled(work: Any) -> None:
    """Where the time of the whole run goes, by operation and by Python function."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.runcall(work)
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()
