"""Many requests, batch after batch, with what is done kept in scratch."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stages.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from stages.context import Context, StageError, Stopped
from stages.data.seeds import stable_hash
from stages.engines.generation import Completion, Request, generate


def sample_seed(run_seed: int, iteration: str, prompt_id: str, sample_index: int) -> int:
    """The seed of one sample: it depends on what the sample is, not on when it is made."""
    return stable_hash(run_seed, iteration, prompt_id, sample_index)


def generate_all(
    ctx: Context,
    policy: Any,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
) -> list[Completion]:
    """Complete all requests in their order; stops and resumes between batches."""
    _check_context(policy, requests, max_new_tokens)
    checkpoint = load_checkpoint(ctx.scratch)
    done = [Completion(**row) for row in checkpoint.values["completions"]] if checkpoint else []
    saved_at = time.monotonic()
    for start in range(len(done), len(requests), batch_size):
        if ctx.should_stop():
            _save(ctx, done)
            raise Stopped(f"stopped after {len(done)} of {len(requests)} responses")
        done += generate(
            policy,
            requests[start : start + batch_size],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        num_tokens = sum(len(completion.ids) for completion in done)
        ctx.progress(len(done), len(requests), response_length=num_tokens / len(done))
        if time.monotonic() - saved_at >= ctx.checkpoint_seconds and len(done) < len(requests):
            _save(ctx, done)
            saved_at = time.monotonic()
    return done


def _save(ctx: Context, done: list[Completion]) -> None:
    values = {"completions": [asdict(completion) for completion in done]}
    save_checkpoint(ctx.scratch, Checkpoint(len(done), {}, values))


def _check_context(policy: Any, requests: Sequence[Request], max_new_tokens: int) -> None:
    context = getattr(policy.config, "max_position_embeddings", None)
    longest = max(len(request.prompt_ids) for request in requests)
    if context is not None and longest + max_new_tokens > context:
        raise StageError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens {max_new_tokens} do not fit "
            f"the model's context of {context}: lower rollout.max_new_tokens or shorten the prompts"
        )
