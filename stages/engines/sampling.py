"""Many requests, decoded batch after batch; each batch is a unit that shards share out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stages.context import Context, StageError
from stages.data.finite import check_finite
from stages.data.seeds import stable_hash
from stages.engines.generation import generate
from stages.engines.generator import Completion, Request, Sampling
from stages.engines.models import content_hash
from stages.engines.parts import Pass, collect, fill, missing, pass_names

RESPONSES = "responses-"
"""A pass is named so, with the hash of the weights that sample."""


@dataclass(frozen=True)
class Samples:
    """Completions of all requests, in their order, and the hash of the weights that made them."""

    completions: list[Completion]
    policy_hash: str


def sample_seed(run_seed: int, iteration: str, prompt_id: str, sample_index: int) -> int:
    """The seed of one sample: it depends on what the sample is, not on when it is made."""
    return stable_hash(run_seed, iteration, prompt_id, sample_index)


def generate_all(
    ctx: Context,
    load: Callable[[], Any],
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    batch_size: int,
    describe: Callable[[int], str],
) -> Samples:
    """Complete all requests with the policy that `load` loads; ShareDone if other shards owe some.

    Parts lie under the hash of the weights that sampled them, so those of two policies never mix.
    A process that finds its share done under the one hash there is takes that, and loads no policy.
    `describe` names a request where its log-probs are not finite.
    """

    def responses(name: str, policy: Any = None) -> Pass:
        def decode(unit: range) -> list[dict[str, Any]]:
            batch = requests[unit.start : unit.stop]
            completions = generate(policy, batch, max_new_tokens=max_new_tokens, sampling=sampling)
            for index, completion in zip(unit, completions, strict=True):
                check_finite("the sampler's log-prob", describe(index), completion.logprobs)
                check_finite("the entropy of the samples", describe(index), completion.entropy)
            return [asdict(completion) for completion in completions]

        return Pass(name, len(requests), batch_size, lambda: decode, _response_length)

    found = pass_names(ctx, RESPONSES)
    work = responses(found[0] if len(found) == 1 else RESPONSES)
    if missing(ctx, work):
        policy = load()
        _check_context(policy, requests, max_new_tokens)
        work = responses(RESPONSES + content_hash(policy), policy)
        fill(ctx, work)
    completions = [Completion(**row) for row in collect(ctx, work)]
    return Samples(completions, work.name.removeprefix(RESPONSES))


def _response_length(completions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    num_tokens = sum(len(completion["ids"]) for completion in completions)
    return {"response_length": num_tokens / len(completions)}


def _check_context(policy: Any, requests: Sequence[Request], max_new_tokens: int) -> None:
    context = getattr(policy.config, "max_position_embeddings", None)
    longest = max(len(request.prompt_ids) for request in requests)
    if context is not None and longest + max_new_tokens > context:
        raise StageError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens {max_new_tokens} do not fit "
            f"the model's context of {context}: lower rollout.max_new_tokens or shorten the prompts"
        )
