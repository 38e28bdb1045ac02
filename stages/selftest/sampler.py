"""Whether a sampler's log-probs are the trainer's: answers of the tiny model, computed twice."""

from pathlib import Path
from statistics import fmean
from typing import Any

from stages.context import Context
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.data.schema import ResponseIds
from stages.engines.forward.inference import logprobs_by, over_responses
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.generators import opened
from stages.engines.models.folders import load_policy
from stages.selftest.tiny import CONTEXT, make_rows

NUM_REQUESTS = 8
NEW_TOKENS = 24


def sampler_gap(ctx: Context, base: Path, engine: Engine) -> dict[str, Any]:
    """The mean and the largest difference of the log-probs of sampled tokens."""
    precision = Precision.BFLOAT16 if ctx.device.startswith("cuda") else Precision.FLOAT32
    prompts, _ = make_rows(NUM_REQUESTS)
    requests = [Request(prompt, seed=number) for number, prompt in enumerate(prompts)]
    with opened(ctx, base, engine, precision, NUM_REQUESTS, CONTEXT) as generator:
        completions = generator.generate(requests, max_new_tokens=NEW_TOKENS, sampling=Sampling())
    rows = [
        ResponseIds(
            prompt_ids=prompt,
            response_ids=completion.ids,
            support=completion.support,
            loss_mask=completion.loss_mask,
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    trainer = logprobs_by("trainer", lambda: load_policy(base, ctx.device, precision), 1.0)
    gaps = [
        abs(ours - theirs)
        for completion, logprobs in zip(
            completions, over_responses(ctx, rows, trainer), strict=True
        )
        for ours, theirs in zip(completion.logprobs, logprobs, strict=True)
    ]
    return {
        "engine": str(engine),
        "precision": str(precision),
        "tokens": len(gaps),
        "mean": fmean(gaps),
        "largest": max(gaps),
    }
