"""TRL and vLLM at the same work as our engines, one after another on the same GPU.

    python benchmarks/peers.py --model 135m [--only grpo,sft,...] [--write]

Fixed work: a GRPO step of 64 prompts x 8 samples x exactly 256 new tokens, no KL term, one
optimizer step; SFT, reward model and DPO on sequences of uneven length. Peers run in bf16 with
their own defaults, except that TRL gets vLLM in its process (colocated), batches as large as help
it, and no activation checkpointing, which would only slow it down at these sizes. Each runs in a
process of its own. `--write` adds the result to benchmarks/results/peers.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import workloads

RESULTS = Path(__file__).parent / "results" / "peers.json"
NUM_PROMPTS, NUM_SAMPLES, NEW_TOKENS = 64, 8, 256
KINDS = ("vllm", "grpo", "sft_padded", "sft_packed", "reward_model", "dpo")
TRAINED_ROWS = 1536
SKIPPED_STEPS = 3
"""The first steps of a trainer warm up and are not timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=workloads.SHAPES, default="135m")
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--folder", type=Path, help="where the model is, or is to be made")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    if not (folder / "config.json").exists():
        workloads.make_model(options.model, folder)
    if options.kind:
        print("RESULT " + json.dumps(_MEASURES[options.kind](options.model, folder)))
        return
    measured: dict[str, Any] = {}
    for kind in options.only.split(","):
        measured[kind] = _in_a_process(kind, options.model, folder)
        print(kind, json.dumps(measured[kind]), flush=True)
    if options.write:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known[options.model] = {**measured, "versions": _versions()}
        RESULTS.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _in_a_process(kind: str, model: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", model, "--folder", folder, "--kind", kind]
    quiet = {
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, **quiet}, text=True, capture_output=True
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    return {"failed": (done.stderr or done.stdout)[-1500:]}


def _vllm(shape: str, folder: Path) -> dict[str, float]:
    """Generation alone, with log-probs, as many sequences at once as vLLM's default allows."""
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        str(folder), dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.6, max_logprobs=1
    )
    prompts = workloads.sequences(shape, NUM_PROMPTS).prompts
    seconds = []
    for turn in range(3):
        asked = [
            (
                TokensPrompt(prompt_token_ids=prompt),
                SamplingParams(
                    temperature=1.0,
                    seed=turn * 10_000 + index,
                    max_tokens=NEW_TOKENS,
                    ignore_eos=True,
                    logprobs=0,
                    detokenize=False,
                ),
            )
            for index, prompt in enumerate(p for p in prompts for _ in range(NUM_SAMPLES))
        ]
        began = time.perf_counter()
        answers = engine.generate([a for a, _ in asked], [s for _, s in asked], use_tqdm=False)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        made = sum(len(answer.outputs[0].token_ids) for answer in answers)
        assert made == NUM_PROMPTS * NUM_SAMPLES * NEW_TOKENS, made
    return {"seconds": min(seconds), "tokens_per_second": made / min(seconds)}


def _grpo(shape: str, folder: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    rows = workloads.sequences(shape, NUM_PROMPTS * 8).prompts

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[0] % 2) for ids in completion_ids]

    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=reward,
        args=GRPOConfig(
            **_trainer_settings(6, 64),
            gradient_accumulation_steps=NUM_PROMPTS * NUM_SAMPLES // 64,
            num_generations=NUM_SAMPLES,
            max_completion_length=NEW_TOKENS,
            use_vllm=on_gpu,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=512,
            generation_kwargs={"min_tokens": NEW_TOKENS, "ignore_eos": True} if on_gpu else None,
        ),
        train_dataset=Dataset.from_dict({"prompt": [workloads.text(row) for row in rows]}),
        callbacks=[clock := _clock()],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return {
        "seconds_a_step": clock.seconds_a_step(),
        "mean_length": logged[-1]["completions/mean_length"],
        **_memory(),
    }


def _sft(shape: str, folder: Path, packing: bool) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = workloads.sequences(shape, TRAINED_ROWS)
    rows = [p + c for p, c in zip(data.prompts, data.chosen, strict=True)]
    num_steps = 8 if shape == "tiny" else 40 if packing else 120
    trainer = SFTTrainer(
        model=str(folder),
        args=SFTConfig(**_trainer_settings(num_steps, 8), packing=packing, max_length=1024),
        train_dataset=Dataset.from_dict({"text": [workloads.text(row) for row in rows]}),
        callbacks=[clock := _clock()],
    )
    clock.count_tokens(trainer)
    trainer.train()
    return {"tokens_per_second": clock.tokens_per_second(), **_memory()}


def _reward_model(shape: str, folder: Path) -> dict[str, Any]:
    from trl import RewardConfig, RewardTrainer

    trainer = RewardTrainer(
        model=str(folder),
        args=RewardConfig(**_trainer_settings(8 if shape == "tiny" else 80, 8)),
        train_dataset=_pairs(shape),
        callbacks=[clock := _clock()],
    )
    clock.count_tokens(trainer)
    trainer.train()
    return {"tokens_per_second": clock.tokens_per_second(), **_memory()}


def _dpo(shape: str, folder: Path) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=str(folder),
        args=DPOConfig(
            **_trainer_settings(8 if shape == "tiny" else 80, 8), precompute_ref_log_probs=True
        ),
        train_dataset=_pairs(shape),
        callbacks=[clock := _clock()],
    )
    clock.count_tokens(trainer)
    trainer.train()
    return {"tokens_per_second": clock.tokens_per_second(), **_memory()}


def _pairs(shape: str) -> Any:
    from datasets import Dataset

    data = workloads.sequences(shape, 83 * 8)
    sides = {"prompt": data.prompts, "chosen": data.chosen, "rejected": data.rejected}
    return Dataset.from_dict({k: [workloads.text(r) + " " for r in v] for k, v in sides.items()})


def _trainer_settings(num_steps: int, batch_size: int) -> dict[str, Any]:
    import torch

    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": num_steps,
        "per_device_train_batch_size": batch_size,
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1 if num_steps < 10 else 10,
        "disable_tqdm": True,
    }


def _clock() -> Any:
    """Times the steps after the first ones, and counts the tokens that are not padding."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []
            self.tokens: list[int] = []
            self._seen = 0

        def count_tokens(self, trainer: Any) -> None:
            collate = trainer.data_collator

            def counting(rows: Any) -> Any:
                batch = collate(rows)
                mask = batch.get("attention_mask")
                self._seen += int(batch["input_ids"].numel() if mask is None else mask.sum())
                return batch

            trainer.data_collator = counting

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            self.tokens.append(self._seen)

        def seconds_a_step(self) -> float:
            times = self.times[min(SKIPPED_STEPS, len(self.times) - 2) - 1 :]
            return (times[-1] - times[0]) / (len(times) - 1)

        def tokens_per_second(self) -> float:
            first = SKIPPED_STEPS
            spent = self.times[-1] - self.times[first]
            return (self.tokens[-1] - self.tokens[first]) / spent

    return Clock()


def _memory() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9}


def _versions() -> dict[str, str]:
    import torch

    names = ("torch", "transformers", "trl", "vllm")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**found, "gpu": gpu}


_MEASURES = {
    "vllm": _vllm,
    "grpo": _grpo,
    "sft_padded": lambda shape, folder: _sft(shape, folder, packing=False),
    "sft_packed": lambda shape, folder: _sft(shape, folder, packing=True),
    "reward_model": _reward_model,
    "dpo": _dpo,
}

if __name__ == "__main__":
    main()
