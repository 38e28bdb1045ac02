"""What TRL and vLLM are given to do, so that it is the work our engines do (side_by_side.py).

Peers run in bf16 (TRL with float32 weights under autocast, as we keep float32 weights) with their
own defaults, and where a default would only slow them down at these sizes, with what is best for
them: vLLM is in TRL's process (colocated), nothing is detokenised, activations are not computed
twice, references of DPO are worked out beforehand, and FlashAttention is used where it is
installed. TRL's SFT, reward model and DPO are measured with TRL's default batch and with another
that may suit them better. vLLM is measured without seeds, which is faster, and with one for each
request, as we have.

Each function runs in a process of its own. A trainer's tokens are counted by its own collator, and
its time from the end of one step to the end of another.
"""

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import workloads

SKIPPED_STEPS = 3
"""The first steps of a trainer warm up and are not timed."""
TIMED_SECONDS = {"135m": 4.0, "1.1b": 4.0, "tiny": 0.1}
"""A trainer stops after so many, but not before MIN_STEPS steps."""
MIN_STEPS = 3
GRPO_STEPS = {"135m": 4, "1.1b": 4, "tiny": 3}
"""Of which the first is not timed."""
GRPO_ROWS = {"135m": 64, "1.1b": 32, "tiny": 8}
"""Of a micro-batch."""
DEFAULT_BATCH = 8
LARGE_BATCH = {"135m": 64, "1.1b": 32, "tiny": 16}
"""In sequences. Larger ones do not fit beside the logits of all tokens."""


def vllm(shape: str, folder: Path) -> dict[str, Any]:
    """Generation alone, with log-probs, as many sequences at once as vLLM's default allows."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        str(folder), dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.6, max_logprobs=1
    )
    work = workloads.rl_step(shape)
    prompts = workloads.sequences(shape, work.num_prompts).prompts
    asked = [TokensPrompt(prompt_token_ids=p) for p in prompts for _ in range(work.num_samples)]
    made = len(asked) * work.new_tokens

    def seconds(turn: int, *, seeded: bool) -> float:
        sampling = [
            SamplingParams(
                temperature=1.0,
                seed=turn * 10_000 + index if seeded else None,
                max_tokens=work.new_tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for index in range(len(asked))
        ]
        began = time.perf_counter()
        answers = engine.generate(asked, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        assert made == sum(len(answer.outputs[0].token_ids) for answer in answers)
        assert answers[0].outputs[0].logprobs is not None
        return took

    plain = [seconds(turn, seeded=False) for turn in range(2)]
    with_seeds = seconds(2, seeded=True)
    return {
        "tokens_per_second": round(made / min(plain)),
        "tokens_per_second_with_seeds": round(made / with_seeds),
        "seconds": [round(value, 2) for value in (*plain, with_seeds)],
        "requests": len(asked),
        "new_tokens": work.new_tokens,
    }


def grpo(shape: str, folder: Path) -> dict[str, Any]:
    """Whole steps: sampling, rewards, update, and the new weights' way to vLLM."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    work = workloads.rl_step(shape)
    rows = workloads.sequences(shape, work.num_prompts).prompts

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[0] % 7) for ids in completion_ids]

    batch_size = GRPO_ROWS[shape]
    exactly = {"ignore_eos": True, "detokenize": False}
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=reward,
        args=GRPOConfig(
            **_settings(batch_size, GRPO_STEPS[shape]),
            logging_steps=1,
            gradient_accumulation_steps=work.num_responses // batch_size,
            num_generations=work.num_samples,
            max_completion_length=work.new_tokens,
            beta=0.0,
            use_vllm=on_gpu,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.2,
            vllm_max_model_length=512,
            generation_kwargs=exactly if on_gpu else {"min_new_tokens": work.new_tokens},
        ),
        train_dataset=Dataset.from_dict({"prompt": [workloads.text(row) for row in rows]}),
        callbacks=[clock := _clock(seconds=None)],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    lengths = {
        entry[f"completions/{name}_length"] for entry in logged for name in ("min", "mean", "max")
    }
    assert lengths == {work.new_tokens}, lengths
    steps = clock.step_seconds(skipped=1)
    ratio = "sampling/importance_sampling_ratio/mean"
    return {
        "step_seconds": sorted(steps)[len(steps) // 2],
        "fastest_step_seconds": min(steps),
        "steps_seconds": [round(value, 3) for value in steps],
        "new_tokens": work.num_responses * work.new_tokens,
        "micro_batch": batch_size,
        "vllm": on_gpu,
        "importance_ratio_mean": logged[-1].get(ratio),
        **_memory(),
    }


def sft(shape: str, folder: Path, *, packing: bool) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = workloads.sequences(shape, 64 if shape == "tiny" else 1024)
    rows = [p + c for p, c in zip(data.prompts, data.chosen, strict=True)]
    texts = Dataset.from_dict({"text": [workloads.text(row) for row in rows]})

    def trainer(batch_size: int, callback: Any) -> Any:
        settings = {**_settings(batch_size), "packing": packing, "max_length": 1024}
        return SFTTrainer(
            model=str(folder),
            args=SFTConfig(**settings, model_init_kwargs=_attention()),
            train_dataset=texts,
            callbacks=[callback],
        )

    other = LARGE_BATCH[shape]
    if packing:
        # All rows of a batch become one: without FlashAttention that costs its length squared.
        other = 2 * DEFAULT_BATCH if _attention() else DEFAULT_BATCH // 2
    return _with_batches(shape, trainer, sorted({DEFAULT_BATCH, other}))


def reward_model(shape: str, folder: Path) -> dict[str, Any]:
    from trl import RewardConfig, RewardTrainer

    pairs = _pairs(shape)

    def trainer(batch_size: int, callback: Any) -> Any:
        return RewardTrainer(
            model=str(folder),
            args=RewardConfig(**_settings(batch_size), model_init_kwargs=_attention()),
            train_dataset=pairs,
            callbacks=[callback],
        )

    return _with_batches(shape, trainer, sorted({DEFAULT_BATCH, LARGE_BATCH[shape] // 2}))


def dpo(shape: str, folder: Path) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    pairs = _pairs(shape)

    def trainer(batch_size: int, callback: Any) -> Any:
        settings = {**_settings(batch_size), "precompute_ref_log_probs": True}
        return DPOTrainer(
            model=str(folder),
            args=DPOConfig(**settings, model_init_kwargs=_attention()),
            train_dataset=pairs,
            callbacks=[callback],
        )

    return _with_batches(shape, trainer, sorted({DEFAULT_BATCH, LARGE_BATCH[shape] // 2}))


def _with_batches(shape: str, trainer: Any, batch_sizes: list[int]) -> dict[str, Any]:
    """Tokens a second with TRL's default batch, and with the best of all."""
    import torch

    by_batch: dict[str, Any] = {}
    for batch_size in batch_sizes:
        clock = _clock(TIMED_SECONDS[shape])
        try:
            one = trainer(batch_size, clock)
            clock.count_tokens(one)
            one.train()
            by_batch[str(batch_size)] = {**clock.rate(), **_memory()}
        except torch.OutOfMemoryError as error:
            by_batch[str(batch_size)] = {"failed": str(error)[:200]}
        one = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    rates = {name: found.get("tokens_per_second", 0) for name, found in by_batch.items()}
    return {
        "tokens_per_second": rates[str(DEFAULT_BATCH)],
        "best_tokens_per_second": max(rates.values()),
        "best_batch": int(max(rates, key=lambda name: rates[name])),
        "batches": by_batch,
    }


def _pairs(shape: str) -> Any:
    from datasets import Dataset

    data = workloads.sequences(shape, 64 if shape == "tiny" else 512)
    sides = {"prompt": data.prompts, "chosen": data.chosen, "rejected": data.rejected}
    return Dataset.from_dict({k: [workloads.text(r) + " " for r in v] for k, v in sides.items()})


def _settings(batch_size: int, num_steps: int = 10_000) -> dict[str, Any]:
    import torch

    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": num_steps,
        "per_device_train_batch_size": batch_size,
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _attention() -> dict[str, str]:
    from transformers.utils import is_flash_attn_2_available

    return {"attn_implementation": "flash_attention_2"} if is_flash_attn_2_available() else {}


def _clock(seconds: float | None) -> Any:
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

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            self.tokens.append(self._seen)
            steps = self.times[SKIPPED_STEPS:]
            if seconds and len(steps) > MIN_STEPS and steps[-1] - steps[0] > seconds:
                control.should_training_stop = True

        def step_seconds(self, skipped: int) -> list[float]:
            times = self.times[skipped - 1 :]
            return [after - before for before, after in pairwise(times)]

        def rate(self) -> dict[str, Any]:
            spent = self.times[-1] - self.times[SKIPPED_STEPS]
            tokens = self.tokens[-1] - self.tokens[SKIPPED_STEPS]
            steps = len(self.times) - SKIPPED_STEPS - 1
            return {"tokens_per_second": round(tokens / spent), "tokens": tokens, "steps": steps}

    return Clock()


def _memory() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
