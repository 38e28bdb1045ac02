"""Seconds of a fused step: generation, scoring and the update of a policy in one process.

    python benchmarks/online.py --model 135m [--steps 6] [--overlap] [--write]

Fixed work: a GRPO step of 64 prompts x 8 samples x exactly 256 new tokens, no KL term, one
optimizer step, in bfloat16 (float32 without a GPU). The model has no token that ends a response,
and rewards are made up from the text. What is timed is the stage itself, as it times its steps; the
first two, which compile and record, are left out. `--model tiny` shows on any machine that it runs.
`--write` adds the result to benchmarks/results/online.json.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import workloads

RESULTS = Path(__file__).parent / "results" / "online.json"
NUM_PROMPTS, NUM_SAMPLES, NEW_TOKENS = 64, 8, 256
SKIPPED_STEPS = 2
STAGE = "online@fast"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=workloads.SHAPES, default="135m")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--reference", action="store_true", help="measure the KL all the same")
    parser.add_argument("--micro-tokens", type=int, help="tokens in one forward pass")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true", help="a table of the last step's time")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    print(json.dumps(result, indent=2))
    if arguments.write:
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        known[arguments.model + ("-overlap" if arguments.overlap else "")] = result
        RESULTS.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def measure(arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    import torch

    from stages import online
    from stages.contracts.catalog import bind
    from stages.contracts.params import Params

    on_gpu = torch.cuda.is_available()
    tiny = arguments.model == "tiny"
    num_prompts = 4 if tiny else NUM_PROMPTS
    params = Params.model_validate(changes(arguments, num_prompts, on_gpu))
    bound = bind(STAGE, params)
    inputs = {name: root / path for name, path in bound.inputs.items()}
    outs = {name: root / path for name, path in bound.outs.items()}
    make_inputs(arguments.model, num_prompts, inputs)
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
    made = num_prompts * NUM_SAMPLES * NEW_TOKENS
    assert all(step["num_tokens"] == made for step in steps), steps
    parts = [name for name in steps[0] if name.endswith("_seconds")]
    of_step = [sum(step[name] for name in parts) for step in steps]
    return {
        "step_seconds": statistics.median(of_step),
        "fastest_step_seconds": min(of_step),
        **{name: statistics.median(step[name] for step in steps) for name in parts},
        "tokens_per_second": made / statistics.median(of_step),
        "num_new_tokens": made,
        "stage_seconds": whole,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("write", "profile")},
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers")},
        },
    }


def changes(arguments: argparse.Namespace, num_prompts: int, on_gpu: bool) -> dict[str, Any]:
    responses = num_prompts * NUM_SAMPLES
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
            "prompts": num_prompts,
            "samples": NUM_SAMPLES,
            "max_new_tokens": NEW_TOKENS,
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
        }
        for index, ids in enumerate(workloads.sequences(shape, num_prompts).prompts)
    ]
    write_parquet(inputs["prompts"], rows, schema.PROMPTS)


def rewards_from_text() -> None:
    """As quick as a verifier, and different from response to response."""
    from stages.rewards.verifier import Verifier

    Verifier.reward = lambda _, response, *__, **___: float(len(response) % 7)  # type: ignore[method-assign]


def context(folder: Path, seed: int, device: str, arguments: argparse.Namespace) -> Any:
    from stages.context import Context

    folder.mkdir()
    known = {field.name for field in fields(Context)}
    wanted = {"micro_tokens": arguments.micro_tokens, "compile": arguments.compile or None}
    options = {k: v for k, v in wanted.items() if k in known and v is not None}
    return Context(stage=STAGE, key="fast", seed=seed, folder=folder, device=device, **options)


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
