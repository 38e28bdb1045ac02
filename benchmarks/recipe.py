"""A recipe from its data to its evaluation: what it gains over seeds, and how long it takes.

    python benchmarks/recipe.py smollm2-math [--seeds 1 2 3 4 5] [--set rollout.prompts=8 ...]
                                             [--write]

The stages are those of `lockstep run`, called one after another as the worker calls them, in a
process for each seed; the processes share the GPU, so that seconds are not those of a run alone. No
DVC and no servers: it also runs where only the compute plane is installed. The recipe's data and
model have to be there (its README says how). `--write` records the result in
benchmarks/results/recipes.json and draws the curves of its steps beside the recipe's README, a line
for each seed. `--only evaluate_sft --set sft.epochs=0` measures the model as it came.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.curves import drawn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = records.RESULTS / "recipes.json"
CURVES = ("reward_mean", "multi_turn_rate", "response_length", "entropy", "kl_to_reference")
WITHIN_A_RUN = ("_low", "_high", "_error")
"""Ends of the names of metrics that say how sure another one is, from one run alone."""
LINKED = ("recipes", "rewards", "environments", "tool_answers")
"""Folders of the clone that stages read."""


def main() -> None:
    arguments = options_of(sys.argv[1:])
    if arguments.result:
        records.write(arguments.result, measure(arguments))
        return
    runs = side_by_side(arguments)
    result = {
        "evaluations": spreads([run["metrics"] for run in runs]),
        "seeds": arguments.seeds,
        "set": arguments.set,
        "hardware": runs[0]["hardware"],
        "versions": runs[0]["versions"],
        "runs": [
            {key: run[key] for key in ("seed", "seconds", "metrics", "curves")} for run in runs
        ],
    }
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=2))
    if arguments.write:
        records.add(RESULTS, arguments.name or arguments.recipe, result)
        for policy in runs[0]["curves"]:
            picture = ROOT / "recipes" / arguments.recipe / f"{policy}.svg"
            picture.write_text(drawn([run["curves"][policy] for run in runs]), encoding="utf-8")


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", metavar="STAGE", help="this stage and what it needs")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/recipe"))
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--write", action="store_true", help="record the result")
    parser.add_argument("--name", help="record it under this name, not under the recipe's")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def side_by_side(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The result of each seed, all at the same time; the log of each is beside its files."""
    started = [_start(arguments, seed) for seed in arguments.seeds]
    failed = [folder for process, folder in started if process.wait()]
    if failed:
        raise SystemExit(f"failed, see {', '.join(str(folder / 'log') for folder in failed)}")
    return [
        {"seed": seed, **records.recorded(folder / "result.json")}
        for seed, (_, folder) in zip(arguments.seeds, started, strict=True)
    ]


def _start(arguments: argparse.Namespace, seed: int) -> tuple[subprocess.Popen[bytes], Path]:
    folder = arguments.folder / arguments.recipe / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    words = [*sys.argv[1:], "--set", f"seed={seed}", "--folder", str(folder)]
    words += ["--result", str(folder / "result.json")]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([sys.executable, __file__, *words], stdout=log, stderr=log)
    return process, folder


def spreads(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Mean, standard deviation, lowest and highest of what each evaluation says of every run."""
    return {
        address: {
            name: _spread([run[address][name] for run in runs])
            for name in metrics
            if all(name in run[address] for run in runs) and not name.endswith(WITHIN_A_RUN)
        }
        for address, metrics in runs[0].items()
        if address.startswith("evaluate")
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": round(statistics.fmean(values), 5),
        "std": round(deviation, 5),
        "low": min(values),
        "high": max(values),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every stage that the recipe needs, and what each took; what is done is not done again."""
    import torch

    from stages.contracts.catalog import bind_all

    device = "cuda" if torch.cuda.is_available() else "cpu"
    params = params_of(arguments.recipe, arguments.set)
    root = arguments.folder
    for name in LINKED:
        if not (root / name).exists():
            (root / name).symlink_to(ROOT / name)
    seconds, metrics = {}, {}
    needed = [bound for bound in bind_all(params) if is_needed(bound, params)]
    for bound in needed_for(arguments.only, needed) if arguments.only else needed:
        done = run(bound, params, root, device, arguments)
        metrics[bound.address], seconds[bound.address] = done["metrics"], done["seconds"]
        print(f"{bound.address}: {seconds[bound.address]} s", flush=True)
    online = [root / f"jobs/online@{name}" for name in params.rl.online]
    return {
        "seconds": {**seconds, "all": round(sum(seconds.values()), 1)},
        "metrics": metrics,
        "curves": {job.name.partition("@")[2]: curves_of(job) for job in online if job.exists()},
        "hardware": records.hardware(device),
        "versions": records.versions("torch", "transformers", "math-verify"),
    }


def params_of(recipe: str, changes: Sequence[str]) -> Any:
    """params.yaml with the recipe merged into it, and these changes."""
    from ruamel.yaml import YAML

    from stages.contracts.params import Params

    yaml = YAML(typ="safe")
    values = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    said = yaml.load((ROOT / "recipes" / recipe / "params.yaml").read_text(encoding="utf-8"))
    for section, settings in said["params"].items():
        values[section] = (
            {**values[section], **settings} if isinstance(settings, dict) else settings
        )
    for change in changes:
        key, _, value = change.partition("=")
        *parents, last = key.split(".")
        within = values
        for parent in parents:
            within = within[parent]
        within[last] = yaml.load(value)
    return Params.model_validate(values)


def is_needed(bound: Any, params: Any) -> bool:
    """Whether `lockstep run` would make it for the report, the report itself apart."""
    name = bound.stage.name
    if name == "reward_model":
        return bool(params.rl.reward == "reward_model")
    if name == "reward_source":
        return bound.key in (params.rl.reward, params.evaluate.correct)
    return bool(name != "report")


def needed_for(address: str, bounds: Sequence[Any]) -> list[Any]:
    """The stage of this address and those whose outputs it reads, directly or not, in order."""
    chosen: list[Any] = []
    for bound in reversed(bounds):
        read = {path for later in chosen for path in later.inputs.values()}
        if bound.address == address or read & set(bound.outs.values()):
            chosen.insert(0, bound)
    if not chosen:
        raise SystemExit(f"--only {address}: no such stage; {[bound.address for bound in bounds]}")
    return chosen


def run(
    bound: Any, params: Any, root: Path, device: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The stage's metrics and seconds, those of an earlier call where it is done already."""
    from stages.context import Context

    folder = root / "jobs" / bound.address
    kept = folder / "done.json"
    if kept.exists():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {name: root / path for name, path in bound.inputs.items()}
    outs = {name: root / path for name, path in bound.outs.items()}
    for path in outs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    ctx = Context(
        stage=bound.address,
        key=bound.key,
        seed=params.seed,
        folder=folder,
        device=device,
        micro_tokens=arguments.micro_tokens,
        compile=arguments.compile,
    )
    began = time.perf_counter()
    metrics = importlib.import_module(bound.stage.module).run(bound.config, inputs, outs, ctx)
    done = {"metrics": metrics, "seconds": round(time.perf_counter() - began, 1)}
    records.write(kept, done)
    return done


def curves_of(folder: Path) -> dict[str, list[float]]:
    """What a stage logged at each of its steps."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line)["metrics"] for line in lines]
    known = [name for name in CURVES if name in steps[0]]
    return {name: [round(step[name], 5) for step in steps] for name in known}


if __name__ == "__main__":
    main()
