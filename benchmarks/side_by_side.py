"""Our engines and their peers at the same work, in turn, on the same GPU.

    python benchmarks/side_by_side.py --model 135m [--only sft,trl_sft_packed,...] [--write]

Fixed work: an RL step (GRPO) of 64 prompts x 8 samples x exactly 256 new tokens, prompts of about
25 tokens, no KL term, one optimizer step; generation of the same tokens with log-probs; SFT, reward
model and DPO on sequences of uneven length, 221 tokens on average. Random weights. peers.py says
how peers are set up. Ours are the stages' own functions: a fused step includes rewards, logging and
the new weights' way to the sampler; training includes its metrics.

Each part runs in a process of its own, alone on the machine, and ends by `--limit` seconds; after
`--total` seconds none begins. What has been measured is recorded after every part
(results/side_by_side.json), beside the parts of earlier runs on the same hardware with the same
versions; `run` says which are of one run. `--model tiny` shows without a GPU that all but vLLM
runs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, records, workloads

RESULTS = records.RESULTS / "side_by_side.json"
VERSIONS = ("torch", "transformers", "triton", "trl", "vllm", "accelerate")
PARTS = (
    "sft",
    "trl_sft_padded",
    "trl_sft_packed",
    "reward_model",
    "trl_reward_model",
    "dpo",
    "trl_dpo",
    "generation",
    "vllm",
    "online",
    "trl_grpo",
)
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "MASTER_ADDR": "127.0.0.1",
}
if find_spec("flashinfer") is None:
    QUIET["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM would import it to see whether it fits
COLOCATED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Comparison:
    """Our part beside a peer's, by a rate; how many times as fast we mean to be, by model."""

    ours: str
    theirs: str
    rate: str = "tokens_per_second"
    targets: tuple[tuple[str, float], ...] = ()


BOTH = ("135m", "1.1b")
COMPARISONS = (
    Comparison("generation", "vllm", targets=(("135m", 4.0),)),
    Comparison("generation", "vllm", "tokens_per_second_with_seeds"),
    Comparison("sft", "trl_sft_padded", targets=tuple((model, 6.0) for model in BOTH)),
    Comparison("sft", "trl_sft_padded", "best_tokens_per_second"),
    Comparison("sft", "trl_sft_packed", targets=tuple((model, 3.0) for model in BOTH)),
    Comparison("sft", "trl_sft_packed", "best_tokens_per_second"),
    Comparison("reward_model", "trl_reward_model", targets=tuple((model, 6.0) for model in BOTH)),
    Comparison("reward_model", "trl_reward_model", "best_tokens_per_second"),
    Comparison("dpo", "trl_dpo", targets=tuple((model, 6.0) for model in BOTH)),
    Comparison("dpo", "trl_dpo", "best_tokens_per_second"),
    Comparison("online", "trl_grpo", "steps_per_second", (("135m", 8.0), ("1.1b", 4.0))),
)
SHARE_TARGET = {"1.1b": 0.6}
"""Of the GPU's arithmetic that training makes use of."""
MICRO_TOKENS = {"135m": 65536, "1.1b": 32768}
"""Of ours; what fits, and keeps the GPU busy while the host prepares more."""
STEP_MICRO_TOKENS = {"135m": 147456, "1.1b": 49152}
"""The same for a fused step, whose 143,872 tokens are known: few passes, and full ones."""


def main() -> None:
    options = options_of(sys.argv[1:])
    if options.one:
        print("\nRESULT " + json.dumps(measure(options.one, options)), flush=True)
        os._exit(0)  # engines may take long to end, and nothing of them is kept
    options.folder = options.folder or Path(tempfile.mkdtemp())
    if not (options.folder / "model" / "config.json").exists():
        workloads.make_model(options.model, options.folder / "model")
    kept = _kept(options.model)
    began = time.monotonic()
    for part in options.only.split(","):
        left = options.total - (time.monotonic() - began)
        if left <= 0:
            print(f"{part}: no time left", flush=True)
            continue
        result = in_a_process(part, options, min(options.limit, left))
        print(f"{part}: {json.dumps(result)}", flush=True)
        old = kept["parts"].get(part, {})
        if "failed" not in result or "failed" in old or not old:
            kept["parts"][part] = {**result, "run": kept["run"]}
        kept["comparisons"] = compared(options.model, kept["parts"])
        if options.write:
            records.add(RESULTS, options.model, {k: v for k, v in kept.items() if k != "run"})
    print(table(kept["comparisons"]))


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=workloads.SHAPES, default="135m")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--folder", type=Path, help="where the model is, or is to be made")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a part")
    parser.add_argument("--total", type=float, default=570, help="seconds in which parts begin")
    parser.add_argument("--micro-tokens", type=int, help="of ours; by default what suits the model")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if unknown := set(options.only.split(",")) - set(PARTS):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


def _kept(model: str) -> dict[str, Any]:
    """What earlier runs found on the same hardware with the same versions."""
    import torch

    now: dict[str, Any] = {
        "hardware": records.hardware("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": records.versions(*VERSIONS),
    }
    old = records.recorded(RESULTS).get(model, {})
    same = all(old.get(name) == value for name, value in now.items())
    run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {**now, "parts": old["parts"] if same else {}, "comparisons": [], "run": run}


def in_a_process(part: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", part, "--model", options.model]
    command += ["--folder", str(options.folder)]
    if options.micro_tokens:
        command += ["--micro-tokens", str(options.micro_tokens)]
    extra = QUIET | (COLOCATED if part == "trl_grpo" else {})
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        # A session of its own: vLLM's helpers have to end with it.
        process = subprocess.Popen(
            command,
            env={**os.environ, **extra},
            text=True,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            said.write(f"\nno result after {limit:g} s\n")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    seconds = round(time.monotonic() - began, 1)
    for line in reversed(lines):
        if line.startswith("RESULT "):
            return {**json.loads(line.removeprefix("RESULT ")), "process_seconds": seconds}
    return {"failed": "\n".join(lines)[-2500:], "process_seconds": seconds}


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part, in this process."""
    shape, folder = options.model, options.folder
    if part == "vllm":
        return peers.vllm(shape, folder / "model")
    if part == "trl_grpo":
        found = peers.grpo(shape, folder / "model")
        return {**found, "steps_per_second": 1 / found["step_seconds"]}
    if part.startswith("trl_sft"):
        return peers.sft(shape, folder / "model", packing=part == "trl_sft_packed")
    if part == "trl_reward_model":
        return peers.reward_model(shape, folder / "model")
    if part == "trl_dpo":
        return peers.dpo(shape, folder / "model")
    return _ours(part, options)


def _ours(part: str, options: argparse.Namespace) -> dict[str, Any]:
    shape, tiny = options.model, options.model == "tiny"
    words = ["--model", shape]
    if part == "generation":
        from benchmarks import generation

        work = workloads.rl_step(shape)
        number = str(work.num_responses)
        words += ["--requests", number, "--slots", number, "--new-tokens", str(work.new_tokens)]
        return generation.measure(generation.options_of(words))
    fitting = STEP_MICRO_TOKENS if part == "online" else MICRO_TOKENS
    micro_tokens = options.micro_tokens or fitting.get(shape, 8192)
    words += ["--micro-tokens", str(micro_tokens), *([] if tiny else ["--compile"])]
    if part == "online":
        from benchmarks import online

        with tempfile.TemporaryDirectory() as folder:
            found = online.measure(
                online.options_of([*words, "--steps", "4" if tiny else "6"]), Path(folder)
            )
        return {**found, "steps_per_second": 1 / found["step_seconds"]}
    from benchmarks import training

    words += (
        ["--rows", "8", "--steps", "2"] if tiny else ["--steps", "6" if shape == "135m" else "4"]
    )
    return training.measure(part, options.folder, training.options_of(words), padded=False)


def compared(model: str, parts: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for comparison in COMPARISONS:
        ours, theirs = parts.get(comparison.ours, {}), parts.get(comparison.theirs, {})
        own_rate = "steps_per_second" if "steps" in comparison.rate else "tokens_per_second"
        if own_rate not in ours or comparison.rate not in theirs:
            continue
        target = dict(comparison.targets).get(model)
        # A peer that has no number, as one that ran out of memory, has lost no race.
        ratio = ours[own_rate] / theirs[comparison.rate] if theirs[comparison.rate] else None
        rows.append(
            {
                "ours": comparison.ours,
                "theirs": comparison.theirs,
                "by": comparison.rate,
                "our_rate": round(ours[own_rate], 3),
                "their_rate": round(theirs[comparison.rate], 3),
                "times_as_fast": ratio and round(ratio, 2),
                "target": target,
                "reached": ratio >= target if target and ratio else None,
                "same_run": ours["run"] == theirs["run"],
            }
        )
    of = {"mfu": "the GPU's peak on paper", "share_of_matmul_rate": "a large matrix product here"}
    for by, theirs in of.items():
        if share := parts.get("sft", {}).get(by):
            target = SHARE_TARGET.get(model)
            reached = share >= target if target else None
            row = {"ours": "sft", "theirs": theirs, "by": by, "our_rate": share}
            rows.append({**row, "target": target, "reached": reached})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| ours | theirs | by | ours | theirs | times as fast | target | reached |"]
    lines.append("|" + " --- |" * 8)
    names = ("ours", "theirs", "by", "our_rate", "their_rate", "times_as_fast", "target", "reached")
    shown = {None: "", True: "yes", False: "no"}
    for row in rows:
        values = [row.get(name) for name in names]
        cells = [shown[v] if v is None or isinstance(v, bool) else str(v) for v in values]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
