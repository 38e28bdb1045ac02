"""`lockstep lm-eval`: evaluate a finished checkpoint with the lm-eval package, in its own process.

Outside the graph, because its data come from the network and its packages are not ours: no stage
reads its results. Results are saved with the hash of the checkpoint in
`artifacts/lm_eval/POLICY/TASKS.json`, with lm-eval's own file beside them. The process inherits the
caller's environment: proxies, tokens and offline settings.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.identity.hashing import HashCache
from stages.contracts.family import ROOT
from stages.contracts.params import Params

FOLDER = "artifacts/lm_eval"
_HAS_IT = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lm_eval') is None)"
_LONGEST_NAME = 100
Results = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how; None leaves a choice to lm-eval."""

    policy: str
    tasks: str
    """Names, with commas between them."""
    include_path: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: str | None = None
    device: str | None = None
    chat: bool = False
    mlflow: bool = False
    """Whether to log the results to the evaluation's run."""
    python: str | None = None


def lm_eval(repository: Repository, request: Request, *, as_json: bool) -> str:
    """Run it, save the results, and return the text to print."""
    params = load_params(repository.root)
    policy = request.policy
    family = [ROOT, *params.rl.family]
    if policy not in family:
        raise LockstepError(f"there is no policy {policy!r}; there are {', '.join(family)}")
    tasks = [name.strip() for name in request.tasks.split(",") if name.strip()]
    if not tasks:
        raise LockstepError("--tasks is empty: pass, for example, --tasks gsm8k,ifeval")
    model = Path("artifacts/policies") / policy / "model"
    if not (repository.root / model / "tokenizer_config.json").is_file():
        raise LockstepError(
            f"{model} does not exist: `lockstep run` computes it, or `dvc pull {model}` fetches it "
            "from a remote"
        )
    python = request.python or sys.executable
    _refuse_without_lm_eval(python)
    digest = HashCache(repository.home / "hashes.json").of(repository.root / model)
    kept = repository.root / FOLDER / policy / f"{_file_name(tasks, request)}.json"
    raw = _run(repository, command(python, model, tasks, params, request, repository.root), kept)
    outcome: dict[str, Any] = {
        "policy": policy,
        "model": {"path": str(model), "hash": digest},
        "tasks": tasks,
        "limit": request.limit,
        "num_fewshot": request.num_fewshot,
        "chat": request.chat,
        "versions": {name: raw.get(f"{name}_version") for name in ("lm_eval", "transformers")},
        "num_samples": {
            name: count["effective"] for name, count in raw.get("n-samples", {}).items()
        },
        "results": results_of(raw),
    }
    atomic.write_json(kept, outcome)
    url = (
        log_results(repository, params, policy, digest, outcome["results"], suffix_of(request))
        if request.mlflow
        else None
    )
    if as_json:
        return json.dumps(outcome, indent=2)
    where = kept.relative_to(repository.root)
    lines = [render(outcome["results"]), "", f"saved in {where}"]
    if request.limit:
        lines.insert(1, f"on the first {request.limit} only: not for publication")
    return "\n".join([*lines, *([f"in MLflow: {url}"] if url else [])])


def command(
    python: str,
    model: Path,
    tasks: list[str],
    params: Params,
    request: Request,
    root: Path,
) -> list[str]:
    """The command, run in the repository: relative paths have no comma that would split them."""
    weights = f"pretrained={model}"
    if (root / model / "adapter_config.json").is_file():
        weights = f"pretrained={model / 'base'},peft={model}"
    words = [python, "-m", "lm_eval", "run", "--model", "hf", "--tasks", ",".join(tasks)]
    words += ["--model_args", f"{weights},dtype={params.precision.value}"]
    for option, value in (
        ("--limit", request.limit),
        ("--num_fewshot", request.num_fewshot),
        ("--batch_size", request.batch_size),
        ("--device", request.device),
    ):
        if value is not None:
            words += [option, str(value)]
    if request.include_path:
        words += ["--include_path", str(Path(request.include_path).absolute())]
    if request.chat:
        words.append("--apply_chat_template")
    if params.model.trust_remote_code:
        words.append("--trust_remote_code")
    return words


def results_of(raw: Mapping[str, Any]) -> Results:
    """The numbers of each task: `exact_match`, or `exact_match/strict-match` where it filters."""
    return {
        task: {
            metric if name == "none" else f"{metric}/{name}": float(value)
            for key, value in values.items()
            if isinstance(value, int | float)
            for metric, comma, name in [key.partition(",")]
            if comma
        }
        for task, values in raw["results"].items()
    }


def render(results: Results) -> str:
    """A line for each number, with its standard error."""
    rows = [
        (task, metric, f"{value:.4f}", _error(metrics, metric))
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if "_stderr" not in metric
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "\n".join(
        f"{task:<{widths[0]}}  {metric:<{widths[1]}}  {value:>{widths[2]}}{error}"
        for task, metric, value, error in rows
    )


def _error(metrics: Mapping[str, float], metric: str) -> str:
    name, slash, kind = metric.partition("/")
    error = metrics.get(f"{name}_stderr{slash}{kind}")
    return "" if error is None else f" ± {error:.4f}"


def _refuse_without_lm_eval(python: str) -> None:
    try:
        has_it = subprocess.run([python, "-c", _HAS_IT], check=False).returncode == 0
    except OSError as error:
        raise LockstepError(f"--python {python}: {error.strerror}") from None
    if not has_it:
        raise LockstepError(
            f"lm-eval is not installed for {python}: `pip install -c constraints.txt -e "
            "'.[lm-eval]'`, or pass an interpreter that has it with --python"
        )


def _run(repository: Repository, words: list[str], kept: Path) -> dict[str, Any]:
    """Run it and return its results file, which is moved beside ours."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".") as aside:
        # Its output goes to stderr: our stdout may be read by programs.
        done = subprocess.run(
            [*words, "--output_path", aside], cwd=repository.root, stdout=sys.stderr, check=False
        )
        if done.returncode:
            raise LockstepError(
                f"lm-eval exited with status {done.returncode}; see its output above"
            )
        files = sorted(Path(aside).rglob("results*.json"))
        if len(files) != 1:
            raise LockstepError(f"lm-eval wrote {len(files)} results files instead of one")
        raw: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
        shutil.move(files[0], kept.with_suffix(".raw.json"))
    return raw


def _file_name(tasks: list[str], request: Request) -> str:
    name = "+".join(re.sub(r"[^\w.-]", "_", task) for task in tasks)
    if name != "+".join(tasks) or len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(",".join(tasks).encode()).hexdigest()[:8]
        name = f"{name[:_LONGEST_NAME]}-{digest}"
    return name + suffix_of(request)


def suffix_of(request: Request) -> str:
    """Other options give another name, so that a partial evaluation never replaces a full one.

    Used in file names and in MLflow, so only with characters that both accept.
    """
    shots = f".{request.num_fewshot}-shot" if request.num_fewshot is not None else ""
    chat = ".chat" if request.chat else ""
    return shots + chat + (f".first-{request.limit}" if request.limit else "")


def evaluation_of(policy: str, params: Params) -> str:
    """The stage that evaluates a policy."""
    if policy == ROOT:
        return "evaluate_sft"
    if policy in params.rl.preferences:
        return f"evaluate_preference@{policy}"
    return f"evaluate_online@{policy}" if policy in params.rl.online else f"evaluate@{policy}"


def log_results(
    repository: Repository,
    params: Params,
    policy: str,
    digest: str,
    results: Results,
    suffix: str,
) -> str:
    """Log the metrics to the run of the policy's evaluation, and return its address.

    `suffix`: appended to the name of each task, as in the file names.
    """
    from pipelines.ledger.entry import Ledger
    from pipelines.tracking.cursor import StageCursor, store_address
    from pipelines.tracking.errors import RefusedError, UnreachableError
    from pipelines.tracking.metrics import Point, safe_name
    from pipelines.tracking.rounds import SETTINGS

    stage = evaluation_of(policy, params)
    entry = Ledger(repository.jobs).latest(stage).get(stage)
    run = StageCursor.of(entry, store_address(repository)).run_id if entry else None
    if entry is None or run is None:
        raise LockstepError(
            f"the results are saved, but MLflow has no run of {stage} from this clone: run "
            "`lockstep run`, then `lockstep sync`"
        )
    if entry.spec.inputs["policy"].hash != digest:
        raise LockstepError(
            f"the results are saved, but the last run of {stage} evaluated other weights than "
            f"{policy} has now: `lockstep run` evaluates these"
        )
    os.environ.update(SETTINGS)
    from pipelines.tracking.store import Store

    points = [
        Point(safe_name(f"lm_eval/{task}{suffix}/{metric}"), value, time.time(), 0)
        for task, metrics in results.items()
        for metric, value in metrics.items()
    ]
    try:
        store = Store(repository)
        store.log(run, points)
        return store.url(run) or run
    except (UnreachableError, RefusedError) as error:
        raise LockstepError(f"the results are saved, but MLflow refused them: {error}") from None
