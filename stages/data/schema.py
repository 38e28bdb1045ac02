"""The Parquet schemas of everything that passes between stages.

Text is rendered to token ids once, in prepare; from there on ids are what counts, and text is
carried for people and for verifiers. Nothing is ever re-tokenised.

`row_id`        hash of the row's content; the same content has the same id everywhere
`source`        the file, or the dataset, that the row was read from, and `line` which of its lines,
                or rows where it has no lines
`template`      hash of the chat template that rendered it; null where the tokenizer has none
`prompt_id`     hash of the prompt's text, or of all messages where it is more than a question;
                the same prompt has the same id everywhere
`prompt_ids`    the prompt's token ids, as the chat template renders it
`*_ids`         a response's token ids; one that ended has its end-of-sequence token as the last id
`answer`        what a verifier compares with; null where the data have none
`extra`         the other columns of the source's row, a JSON object with sorted keys; `{}`: none
"""

import pyarrow as pa

_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())
_ADVANTAGES = pa.list_(pa.float32())
_MASK = pa.list_(pa.int8())
_BY_SOURCE = pa.map_(pa.string(), pa.float32())


_OPTIONAL = frozenset(
    {
        *("answer", "support", "margin", "advantages", "ref_logprobs", "loss_mask"),
        *("row_id", "source", "line", "template"),
        "environment_reward",
        *("correct", "task", "pass_rate", "reference_reward", "won", "vote"),
        *("accuracy", "accuracy_low", "accuracy_high", "accuracy_sampled"),
        *("win_rate", "win_rate_low", "win_rate_high", "reward_mean_error"),
    }
)


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(n, kind, nullable=n in _OPTIONAL) for n, kind in columns.items()])


_ORIGIN = {
    "row_id": pa.string(),
    "source": pa.string(),
    "line": pa.int64(),
    "template": pa.string(),
}


PROMPTS = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    prompt_ids=_TOKENS,
    answer=pa.string(),
    extra=pa.string(),
    **_ORIGIN,
)
"""prompts.parquet and held_out.parquet, sorted by prompt_id."""

DEMONSTRATIONS = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    completion=pa.string(),
    answer=pa.string(),
    extra=pa.string(),
    prompt_ids=_TOKENS,
    completion_ids=_TOKENS,
    loss_mask=_MASK,
    **_ORIGIN,
)
"""demonstrations.parquet, in the order of the source. `loss_mask` has 1 where the assistant speaks
and 0 where a user or a tool does, for each of `completion_ids`; null: all of it is the
assistant's."""

PREFERENCES = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    chosen=pa.string(),
    rejected=pa.string(),
    answer=pa.string(),
    margin=pa.float32(),
    prompt_ids=_TOKENS,
    chosen_ids=_TOKENS,
    rejected_ids=_TOKENS,
    **_ORIGIN,
)
"""preferences.parquet and held_out_preferences.parquet, in the order of the source. `margin` is by
how much the chosen response is better, where the source says so."""

FEEDBACK = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    completion=pa.string(),
    rating=pa.float32(),
    prompt_ids=_TOKENS,
    completion_ids=_TOKENS,
    **_ORIGIN,
)
"""feedback.parquet, in the order of the source: single responses, each with a rating."""

STEPS = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    prompt_ids=_TOKENS,
    completion_ids=_TOKENS,
    step_ends=_TOKENS,
    step_labels=pa.list_(pa.float32()),
    **_ORIGIN,
)
"""steps.parquet, in the order of the source: responses whose steps are right (1) or wrong (0).
`step_ends` are the positions in `completion_ids` of each step's last token."""

PAIR_LOGPROBS = _schema(
    prompt_id=pa.string(),
    chosen=pa.float32(),
    rejected=pa.float32(),
)
"""Reference log-probs of preference pairs, row by row beside them: sums over the response."""

FEEDBACK_LOGPROBS = _schema(
    prompt_id=pa.string(),
    completion=pa.float32(),
    other=pa.float32(),
)
"""Reference log-probs of feedback, row by row beside it: of the response, and of the response to
another prompt that KTO compares with."""

ROLLOUTS = _schema(
    prompt_id=pa.string(),
    sample_index=pa.int32(),
    greedy=pa.bool_(),
    prompt=pa.string(),
    response=pa.string(),
    answer=pa.string(),
    extra=pa.string(),
    prompt_ids=_TOKENS,
    response_ids=_TOKENS,
    logprobs=_LOGPROBS,
    support=pa.list_(_TOKENS),
    loss_mask=_MASK,
    seed=pa.int64(),
    finish_reason=pa.string(),
    environment_reward=pa.float32(),
    policy_hash=pa.string(),
)
"""rollouts, sorted by (prompt_id, sample_index). `logprobs` are those of the distribution that each
token was drawn from; `support` the tokens it was drawn from, where some were cut off (top-p and the
like), else null; `finish_reason` is `stop` or `length`. `loss_mask` has 0 for each token that the
policy did not say itself and is not trained on: its log-prob is 0, its support empty; null where it
said all. `environment_reward` is what an environment paid; null where there was none. A `greedy`
row is the likeliest response, to compare with and not to learn from."""

SCORES = _schema(
    prompt_id=pa.string(),
    sample_index=pa.int32(),
    reward=pa.float32(),
    by_source=_BY_SOURCE,
    ref_logprobs=_LOGPROBS,
)
"""scores, row by row beside the rollouts they belong to. `reward` is what is learnt from;
`by_source` what each source said, before weights, penalties and clipping; `ref_logprobs` are null
where nobody asked for them."""

EXPERIENCE = _schema(
    prompt_id=pa.string(),
    sample_index=pa.int32(),
    role=pa.string(),
    reward=pa.float32(),
    advantages=_ADVANTAGES,
)
"""experience.parquet of an update, sorted by (prompt_id, sample_index, role): the samples that the
policy was trained on, once for each role it had (`policy_gradient`, `chosen`, `rejected`,
`imitated`, `distilled`). `advantages`, one per response token, are those that the loss was given;
null where it was given none. Where demonstrations are chosen, only the rejected samples are here:
a demonstration is no sample and has no reward."""

EVALUATION = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    answer=pa.string(),
    response=pa.string(),
    correct=pa.bool_(),
    reward=pa.float32(),
    task=pa.string(),
    finish_reason=pa.string(),
    length=pa.int32(),
    pass_rate=pa.float32(),
    reference_reward=pa.float32(),
    won=pa.float32(),
)
"""samples.parquet of an evaluation, sorted by prompt_id: the greedy response to each held-out
prompt. `correct` is null where nothing says what is right; `task` where the data name none;
`pass_rate` is the share of the sampled responses that are right. `reference_reward` is that of the
reference's greedy response, and `won` is 1 where it is lower, 0.5 for a tie; both are null for the
reference itself."""

EVALUATION_SAMPLED = _schema(
    prompt_id=pa.string(),
    sample_index=pa.int32(),
    response=pa.string(),
    correct=pa.bool_(),
    reward=pa.float32(),
    finish_reason=pa.string(),
    length=pa.int32(),
    vote=pa.string(),
)
"""sampled.parquet of an evaluation, sorted by (prompt_id, sample_index): the sampled responses.
`vote` is the answer that counts in a majority vote; null: it abstains."""

EVALUATION_TASKS = _schema(
    task=pa.string(),
    num_prompts=pa.int32(),
    num_judged=pa.int32(),
    accuracy=pa.float64(),
    accuracy_low=pa.float64(),
    accuracy_high=pa.float64(),
    accuracy_sampled=pa.float64(),
    win_rate=pa.float64(),
    win_rate_low=pa.float64(),
    win_rate_high=pa.float64(),
    reward_mean=pa.float64(),
    reward_mean_error=pa.float64(),
    response_length=pa.float64(),
)
"""tasks.parquet of an evaluation, sorted by task: its numbers for each task that the data name, and
under null for the prompts without one. Empty where no prompt has a task."""
