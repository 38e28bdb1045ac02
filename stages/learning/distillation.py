"""On-policy distillation: towards a teacher on the policy's own responses (Agarwal et al. 2023).

With `distill_top_k` 0 the teacher's log-prob of each sampled token, against the policy's own, is
the token's advantage in the objective of the policy gradients. Otherwise the reverse KL over the
teacher's likeliest tokens at each position, and a bucket for the rest, is the loss itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stages.algorithms.distillation import sampled_advantages, topk_reverse_kl
from stages.algorithms.loss import Loss, LossAggregation, Tokens
from stages.context import StageError
from stages.data.batching import loss_mask, pad
from stages.data.finite import check_finite, sample_name
from stages.data.segments import cut
from stages.data.tokenizer import Decoder
from stages.engines.forward.inference import (
    kept_over_responses,
    logprobs_by,
    response_batch,
    row_length,
)
from stages.engines.forward.logprobs import logprobs_of, response_topk
from stages.engines.forward.packing import pack
from stages.engines.models.lora import is_adapter_folder
from stages.engines.models.own_code import check_same_code
from stages.engines.processes.shared_pass import Group, over_groups
from stages.engines.training.loop import Rows, Step, Work, counted
from stages.engines.training.resume import Metrics
from stages.learning.experience import Measured, measure, with_advantages
from stages.learning.policy_gradient import ascend, learns_whole, rows_to_learn_from
from stages.learning.update import SampleRole, Update, UpdateResult, trained_on


def learn_from_a_teacher(update: Update) -> UpdateResult:
    """One iteration; the teacher is let go before the policy learns."""
    params = update.config.policy_update
    measured = measure(update.ctx, update.policy.model, update.rollouts, update.config)
    rows = rows_to_learn_from(update)
    if params.distill_top_k:
        history, advantages = _learn_distributions(update, rows), None
    else:
        history, advantages = _learn_samples(update, measured, rows)
    metrics = measured.metrics()
    if params.distill_top_k:
        metrics |= measured.kl_metrics()
    used = trained_on([update.rollouts[i] for i in rows], SampleRole.DISTILLED, advantages)
    return UpdateResult(history, used, metrics)


def _learn_samples(
    update: Update, measured: Measured, rows: Sequence[int]
) -> tuple[list[Metrics], torch.Tensor]:
    """The steps, and the advantages of the rows."""
    teacher_logprobs = _teacher_logprobs(update)
    advantages = sampled_advantages(measured.logprobs, teacher_logprobs) * measured.mask
    experience = with_advantages(measured, advantages)
    history = ascend(update, rows, experience, kl_coef=0.0)
    return history, experience.advantages[list(rows)]


def _teacher_logprobs(update: Update) -> torch.Tensor:
    by_teacher = logprobs_by("teacher", lambda: _load_teacher(update), update.config.temperature)
    return pad(kept_over_responses(update.ctx, "teacher", update.rollouts, by_teacher), 0.0)


def _learn_distributions(update: Update, rows: Sequence[int]) -> list[Metrics]:
    config, params = update.config, update.config.policy_update
    policy, device = update.policy.model, update.ctx.device
    likeliest = _likeliest(update, rows)

    rollouts = [update.rollouts[row] for row in rows]
    pieces, parts = cut(rollouts, range(len(rollouts)), whole=learns_whole(params))

    def loss(numbers: Rows, step: Step) -> Loss:
        some = [pieces[i] for i in numbers]
        batch = response_batch(policy, [piece.row for piece in some], device)
        num_steps = batch.response_mask.shape[1]
        ids, teacher = (
            torch.stack(
                [_to_length(likeliest[each.of][name][each.start :], num_steps) for each in some]
            ).to(device)
            for name in ("ids", "logprobs")
        )
        student = logprobs_of(policy, batch, ids, config.temperature)
        scale = params.length_scale or float(config.max_new_tokens)
        aggregation = LossAggregation(params.aggregation, scale)
        tokens = Tokens.padded(batch.loss_mask)
        return topk_reverse_kl(student, teacher, tokens, step.counts, aggregation)

    work = Work(
        counted([sum(loss_mask(row)) for row in rollouts]),
        loss,
        parts=lambda i: parts[i],
        describe=lambda i: sample_name(pieces[i].row),
        length=lambda i: row_length(pieces[i].row),
    )
    return update.train(update.plan(len(rows)), work, ["loss", "distillation_kl"])


def _likeliest(update: Update, rows: Sequence[int]) -> list[Mapping[str, torch.Tensor]]:
    """For each row the teacher's likeliest tokens, [T, K] ids and log-probs.

    A kill costs this pass again: its results are K times the size of all others, and computing
    them is one forward pass where the update itself is several, forward and backward.
    """
    by_row: dict[int, Mapping[str, torch.Tensor]] = {}
    teacher = _load_teacher(update)
    # A vocabulary may be padded to another size; past the smaller one there are no tokens.
    sizes = [m.config.get_text_config().vocab_size for m in (teacher, update.policy.model)]
    k = min(update.config.policy_update.distill_top_k, *sizes)
    lengths = [row_length(update.rollouts[row]) for row in rows]

    def compute(group: Group) -> list[Mapping[str, torch.Tensor]]:
        some = [update.rollouts[rows[i]] for i in group]
        batch = response_batch(teacher, some, update.ctx.device)
        ids, logprobs = response_topk(teacher, batch, k, update.config.temperature)
        ids = ids.clamp(max=min(sizes) - 1)
        found: list[Mapping[str, torch.Tensor]] = []
        for i, row in enumerate(some):
            length = len(row["response_ids"])
            least = logprobs[i, :length].sum(-1).tolist()
            check_finite("the teacher's log-prob", sample_name(row), least)
            found.append({"ids": ids[i, :length].cpu(), "logprobs": logprobs[i, :length].cpu()})
        return found

    groups = pack(lengths, update.ctx.micro_tokens)
    for group, found in over_groups(update.ctx, groups, compute, "teacher log-probs"):
        by_row |= zip(group, found, strict=True)
    return [by_row[i] for i in range(len(rows))]


def _to_length(values: torch.Tensor, length: int) -> torch.Tensor:
    """[length, K] the first of values [T, K], padded with zeros below."""
    return torch.nn.functional.pad(values[:length], (0, 0, 0, max(0, length - len(values))))


def _load_teacher(update: Update) -> Any:
    folder = update.inputs["teacher"]
    if not (folder / "config.json").is_file() and not is_adapter_folder(folder):
        raise StageError(
            f"rl.teacher {folder} is not a Hugging Face model folder: it has no config.json"
        )
    vocabularies = [
        Decoder(of).vocabulary()
        for of in (update.inputs["policy"], folder)
        if (of / "tokenizer.json").is_file()
    ]
    if len(vocabularies) < 2 or vocabularies[0] != vocabularies[1]:
        raise StageError(
            f"rl.teacher {folder} has another tokenizer than the policy, or none: token by token "
            "the two could not be compared. Choose a teacher that shares the policy's tokenizer"
        )
    check_same_code(folder, update.inputs["policy"])
    return update.load.policy(folder, update.ctx.device, update.config.precision)
