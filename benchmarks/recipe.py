"""A recipe from its data to its evaluation, in one process: what it gains, and how long it takes.

    python benchmarks/recipe.py smollm2-math [--set rollout.prompts=8 ...] [--write]

The stages are those of `lockstep run`, called one after another as the worker calls them; no DVC
and no servers, so that it also runs where only the compute plane is installed. The recipe's data
and model have to be there (its README says how). `--write` records the result in
benchmarks/results/recipes.json and draws the curves of its steps beside the recipe's README.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records

ROOT = Path(__file__).resolve().parents[1]
RESULTS = records.RESULTS / "recipes.json"
CURVES = ("reward_mean", "response_length", "entropy", "kl_to_reference")
LINKED = ("recipes", "rewards", "environments", "tool_answers")
"""Folders of the clone that stages read."""


def main() -> None:
    arguments = options_of(sys.argv[1:])
    result = measure(arguments)
    print(json.dumps({k: v for k, v in result.items() if k != "curves"}, indent=2))
    if arguments.write:
        records.add(RESULTS, arguments.recipe, result)
        for policy, curves in result["curves"].items():
            picture = ROOT / "recipes" / arguments.recipe / f"{policy}.svg"
            picture.write_text(drawn(curves), encoding="utf-8")


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/recipe"))
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--write", action="store_true", help="record the result")
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every stage that the recipe needs, and what each took; what is done is not done again."""
    import torch

    from stages.contracts.catalog import bind_all

    device = "cuda" if torch.cuda.is_available() else "cpu"
    params = params_of(arguments.recipe, arguments.set)
    root = arguments.folder / arguments.recipe
    root.mkdir(parents=True, exist_ok=True)
    for name in LINKED:
        if not (root / name).exists():
            (root / name).symlink_to(ROOT / name)
    seconds, metrics = {}, {}
    for bound in bind_all(params):
        if is_needed(bound, params):
            done = run(bound, params, root, device, arguments)
            metrics[bound.address], seconds[bound.address] = done["metrics"], done["seconds"]
            print(f"{bound.address}: {seconds[bound.address]} s", flush=True)
    return {
        "seconds": {**seconds, "all": round(sum(seconds.values()), 1)},
        "metrics": metrics,
        "curves": {name: curves_of(root / f"jobs/online@{name}") for name in params.rl.online},
        "set": arguments.set,
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


WIDTH, HEIGHT, EDGE = 270, 174, 48


def drawn(curves: Mapping[str, Sequence[float]]) -> str:
    """A picture with a small chart for each curve, over the steps."""
    charts = [_chart(name, values, at) for at, (name, values) in enumerate(curves.items())]
    size = f'width="{WIDTH * len(charts)}" height="{HEIGHT}"'
    style = (
        "<style>text{font:11px sans-serif;fill:#666}path{fill:none;stroke:#27c;stroke-width:1.5}"
    )
    style += "line{stroke:#ccc}</style>"
    body = "\n".join(charts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{style}\n{body}\n</svg>\n'


def _chart(name: str, values: Sequence[float], at: int) -> str:
    low, high = min(values), max(values)
    spread, last = (high - low) or 1.0, max(1, len(values) - 1)
    right, bottom = WIDTH - 12, HEIGHT - EDGE
    places = [
        (EDGE + (right - EDGE) * i / last, bottom - (bottom - EDGE) * (value - low) / spread)
        for i, value in enumerate(values)
    ]
    line = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return "\n".join(
        [
            f'<g transform="translate({WIDTH * at} 0)">',
            f'<text x="{EDGE}" y="18">{name}</text>',
            f'<line x1="{EDGE}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
            f'<line x1="{EDGE}" y1="{EDGE}" x2="{EDGE}" y2="{bottom}"/>',
            f'<text x="2" y="{EDGE + 4}">{high:.3g}</text>',
            f'<text x="2" y="{bottom}">{low:.3g}</text>',
            f'<text x="{EDGE}" y="{bottom + 16}">step 1</text>',
            f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{len(values)}</text>',
            f'<path d="{line}"/>',
            "</g>",
        ]
    )


if __name__ == "__main__":
    main()
