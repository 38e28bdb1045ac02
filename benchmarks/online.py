"""Seconds of a fused step: generation, scoring and the update of a policy in one process.

    python benchmarks/online.py --model 135m [--steps 6] [--overlap] [--write]
    python benchmarks/online.py --model 8b --in-memory --offload --checkpoint [--lora 16] [--write]

Fixed work: a GRPO step of 64 prompts x 8 samples x exactly 256 new tokens, no KL term, one
optimizer step, in bfloat16 (float32 without a GPU). The model has no token that ends a response,
and rewards are made up from the text. What is timed is the stage itself, from the end of one step
to the end of the next; the first two, which compile and record, are left out. Of the parts,
`take_seconds` (the sampler gets the weights) is in `generate_seconds`, and `optimizer_seconds`
(AdamW, and rounding the weights again) in `update_seconds`. `--in-memory` makes the policy up where
it is computed with, and saves nothing, for a model that the disk has no room for. `--model tiny`
shows on any machine that it runs. `--write` adds the result to benchmarks/results/online.json.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records, workloads
from benchmarks.peaks import peaks
from benchmarks.step_clock import StepClock

RESULTS = records.RESULTS / "online.json"
SKIPPED_STEPS = 2
WAYS = ("compile", "overlap", "reference", "checkpoint", "offload", "lora")
STAGE = "online@fast"


def main() -> None:
    arguments = options_of(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    print(json.dumps(result, indent=2))
    if arguments.write:
        ways = [way for way in WAYS if getattr(arguments, way)]
        records.add(RESULTS, " ".join([arguments.model, *ways]), result)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=workloads.SHAPES, default="135m")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--reference", action="store_true", help="measure the KL all the same")
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="activations computed twice")
    parser.add_argument("--offload", action="store_true", help="AdamW's moments on the host")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--in-memory", action="store_true", help="no weights on the disk")
    parser.add_argument("--profile", action="store_true", help="a table of the last step's time")
    parser.add_argument("--write", action="store_true", help="record the result")
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    import torch

    from stages import online
    from stages.contracts.catalog import bind
    from stages.contracts.params import Params
    from stages.engines.generation.resident_sampler import ResidentSampler
    from stages.engines.training.optimizer import Learner

    on_gpu = torch.cuda.is_available()
    work = workloads.rl_step(arguments.model)
    params = Params.model_validate(changes(arguments, work, on_gpu))
    bound = bind(STAGE, params)
    inputs = {name: root / path for name, path in bound.inputs.items()}
    outs = {name: root / path for name, path in bound.outs.items()}
    make_inputs(arguments.model, work.num_prompts, inputs, weights=not arguments.in_memory)
    for path in outs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    ctx = context(root / "job", params.seed, "cuda" if on_gpu else "cpu", arguments)
    with ExitStack() as changed:
        rewards_from_text(changed)
        if arguments.in_memory:
            weights_in_memory(changed)
        timed = {
            "take_seconds": timing(changed, ResidentSampler, "take"),
            "optimizer_seconds": timing(changed, Learner, "step"),
        }
        began = time.perf_counter()
        with peaks() as memory:
            if arguments.profile:
                profiled(lambda: online.run(bound.config, inputs, outs, ctx))
            else:
                online.run(bound.config, inputs, outs, ctx)
        whole = time.perf_counter() - began
    lines = (ctx.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # With overlap, the last step has nothing to sample ahead.
    counted = slice(SKIPPED_STEPS, -1 if arguments.overlap else None)
    steps = [json.loads(line)["metrics"] for line in lines][counted]
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
        **{name: statistics.median(seconds[SKIPPED_STEPS:]) for name, seconds in timed.items()},
        "tokens_per_second": made / statistics.median(of_step),
        "num_new_tokens": made,
        "stage_seconds": whole,
        **memory,
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("write", "profile")},
        "hardware": records.hardware("cuda" if on_gpu else "cpu"),
        "versions": records.versions("torch", "transformers", "triton"),
    }


def changes(arguments: argparse.Namespace, work: workloads.RlStep, on_gpu: bool) -> dict[str, Any]:
    responses = work.num_responses
    update: dict[str, Any] = {"epochs": 1, "batch_size": responses, "kl_coef": 0.0, "max_kl": 1e9}
    if arguments.in_memory:
        update["max_logprob_gap"] = 1.0  # a long run is not to end for it
    if arguments.overlap:
        update |= {"mismatch": "token_truncate", "max_logprob_gap": 1.0}
    score = {"missing_eos_penalty": 0.0, "reference": arguments.reference}
    return {
        "precision": "bfloat16" if on_gpu else "float32",
        "lora": {"rank": arguments.lora, "save": "adapter"},
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
            "engine": "torch",
        },
        "score": score,
        "policy_update": update,
        "online": {"overlap": arguments.overlap},
    }


def make_inputs(
    shape: str, num_prompts: int, inputs: dict[str, Path], *, weights: bool = True
) -> None:
    """A policy without an end, prompts, a verifier, and the state of a policy that begins."""
    from stages.data import schema
    from stages.data.artifacts import write_parquet
    from stages.engines.training.rl_state import start_state
    from stages.rewards.verifier import Verifier

    folder = inputs["policy"]
    for name in ("policy", "prompts", "reward"):
        inputs[name].parent.mkdir(parents=True, exist_ok=True)
    workloads.make_model(shape, folder, weights=weights)
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


def rewards_from_text(changed: ExitStack) -> None:
    """As quick as a verifier, and different from response to response."""
    from stages.rewards.verifier import Verifier

    replace(changed, Verifier, "reward", lambda _, said, *__, **___: float(len(said) % 7))


def weights_in_memory(changed: ExitStack) -> None:
    """The policy is made up instead of loaded, and not saved."""
    from stages import online, policy_update
    from stages.engines.generation import resident_sampler

    replace(changed, policy_update, "load_policy", workloads.load_at_random)
    replace(changed, resident_sampler, "load_policy", workloads.load_at_random)
    replace(changed, online, "save", lambda *_, **__: {})


def timing(changed: ExitStack, owner: Any, name: str) -> list[float]:
    """The seconds of each call of a method; the GPU may still be busy with it."""
    method = getattr(owner, name)
    seconds: list[float] = []

    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        value = method(*arguments, **options)
        seconds.append(time.perf_counter() - began)
        return value

    replace(changed, owner, name, timed)
    return seconds


def replace(changed: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until `changed` is closed."""
    changed.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def context(folder: Path, seed: int, device: str, arguments: argparse.Namespace) -> StepClock:
    from stages.contracts.sharding import Offload

    folder.mkdir()
    return StepClock(
        stage=STAGE,
        key="fast",
        seed=seed,
        folder=folder,
        device=device,
        micro_tokens=arguments.micro_tokens,
        compile=arguments.compile,
        checkpoint_activations=arguments.checkpoint,
        offload=Offload.OPTIMIZER if arguments.offload else Offload.NONE,
        checkpoint_seconds=1e9 if arguments.in_memory else 30.0,
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
