"""The rows of everything that passes between stages: a type for each kind.

A kind is declared once: its Parquet schema (`columns_of`) has the fields of the type, in their
order, and a column is nullable where its field may be None. A field that is not required has a
column only in files whose rows have it.

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

from collections.abc import Collection, Sequence
from types import NoneType
from typing import Annotated, Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints

import pyarrow as pa

Text = Annotated[str, pa.string()]
Flag = Annotated[bool, pa.bool_()]
Int32 = Annotated[int, pa.int32()]
Int64 = Annotated[int, pa.int64()]
Float32 = Annotated[float, pa.float32()]
Float64 = Annotated[float, pa.float64()]
Tokens = Annotated[Sequence[int], pa.list_(pa.int32())]
Mask = Annotated[Sequence[int], pa.list_(pa.int8())]
Numbers = Annotated[Sequence[float], pa.list_(pa.float32())]
Supports = Annotated[Sequence[Sequence[int]], pa.list_(pa.list_(pa.int32()))]
Histories = Annotated[Sequence[Sequence[int]], pa.list_(pa.list_(pa.int32()))]
BySource = Annotated[Sequence[tuple[str, float]], pa.map_(pa.string(), pa.float32())]


def as_kept(numbers: Sequence[float]) -> list[float]:
    """As they are read from a column of `Numbers`, so that rows in memory are those of a file."""
    kept: list[float] = pa.array(numbers, pa.float32()).to_pylist()
    return kept


def columns_of(kind: type[Any], present: Collection[str] = ()) -> pa.Schema:
    """The Parquet schema of a kind of rows; `present` names what there is of its fields that are
    not required."""
    fields = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is NotRequired:
            if name not in present:
                continue
            (hint,) = get_args(hint)
        nullable = NoneType in get_args(hint)
        _, column = get_args(get_args(hint)[0] if nullable else hint)
        fields.append(pa.field(name, column, nullable=nullable))
    # Where a row comes from is what it ends with.
    return pa.schema(sorted(fields, key=lambda field: field.name in RowOrigin.__annotations__))


def optional_fields(kind: type[Any]) -> frozenset[str]:
    """The fields that are not required."""
    optional: frozenset[str] = kind.__optional_keys__
    return optional


class RowOrigin(TypedDict):
    """Where a row of the data comes from."""

    row_id: Text | None
    source: Text | None
    line: Int64 | None
    template: Text | None


class PromptRow(RowOrigin):
    """prompts.parquet and held_out.parquet, sorted by prompt_id."""

    prompt_id: Text
    prompt: Text
    prompt_ids: Tokens
    answer: Text | None
    extra: Text


class DemonstrationRow(RowOrigin):
    """demonstrations.parquet, in the order of the source.

    `loss_mask` has 1 where the assistant speaks and 0 where a user or a tool does, for each of
    `completion_ids`; null: all of it is the assistant's.
    """

    prompt_id: Text
    prompt: Text
    completion: Text
    answer: Text | None
    extra: Text
    prompt_ids: Tokens
    completion_ids: Tokens
    loss_mask: Mask | None


class PreferenceRow(RowOrigin):
    """preferences.parquet and held_out_preferences.parquet, in the order of the source.

    `margin` is by how much the chosen response is better, where the source says so.
    """

    prompt_id: Text
    prompt: Text
    chosen: Text
    rejected: Text
    answer: Text | None
    margin: Float32 | None
    prompt_ids: Tokens
    chosen_ids: Tokens
    rejected_ids: Tokens


class FeedbackRow(RowOrigin):
    """feedback.parquet, in the order of the source: single responses, each with a rating."""

    prompt_id: Text
    prompt: Text
    completion: Text
    rating: Float32
    prompt_ids: Tokens
    completion_ids: Tokens


class StepsRow(RowOrigin):
    """steps.parquet, in the order of the source: responses whose steps are right (1) or wrong (0).

    `step_ends` are the positions in `completion_ids` of each step's last token.
    """

    prompt_id: Text
    prompt: Text
    prompt_ids: Tokens
    completion_ids: Tokens
    step_ends: Tokens
    step_labels: Numbers


class PairLogprobsRow(TypedDict):
    """Reference log-probs of preference pairs, row by row beside them: sums over the response."""

    prompt_id: Text
    chosen: Float32
    rejected: Float32


class FeedbackLogprobsRow(TypedDict):
    """Reference log-probs of feedback, row by row beside it: of the response, and of the response
    to another prompt that KTO compares with."""

    prompt_id: Text
    completion: Float32
    other: Float32


class ResponseIds(TypedDict):
    """A prompt and a response to it, as a model reads them: part of a rollout."""

    prompt_ids: Tokens
    response_ids: Tokens
    support: Supports | None
    loss_mask: Mask | None
    segment_starts: NotRequired[Tokens]
    segment_histories: NotRequired[Histories]


class ResponseRow(ResponseIds):
    """A response as rewards read it: part of a rollout, or of an evaluation."""

    prompt_id: Text
    prompt: Text
    response: Text
    answer: Text | None
    extra: Text
    finish_reason: Text
    environment_reward: Float32 | None


class RolloutRow(TypedDict):
    """rollouts, sorted by (prompt_id, sample_index).

    `logprobs` are those of the distribution that each token was drawn from; `support` the tokens it
    was drawn from, where some were cut off (top-p and the like), else null; `finish_reason` is
    `stop`, `length`, or `failed` where an environment did. `loss_mask` has 0 for each token that
    the policy did not say itself and is not trained on: its log-prob is 0, its support empty; null
    where it said all. `environment_reward` is what an environment paid; null where there was none.
    A `greedy` row is the likeliest response, to compare with and not to learn from.

    Where there was an environment, `turn_ends` are the positions in `response_ids` of the last
    token of each of the policy's turns, and `turn_rewards` what was paid for each: their sum is
    `environment_reward`, but for rounding.

    Where old observations may be elided, `segment_starts` are the positions in `response_ids` from
    which the policy read a shorter context, empty where it never did, and `segment_histories` what
    it read there: after the prompt, and in place of all tokens of the response before.
    """

    prompt_id: Text
    sample_index: Int32
    greedy: Flag
    prompt: Text
    response: Text
    answer: Text | None
    extra: Text
    prompt_ids: Tokens
    response_ids: Tokens
    logprobs: Numbers
    support: Supports | None
    loss_mask: Mask | None
    seed: Int64
    finish_reason: Text
    environment_reward: Float32 | None
    policy_hash: Text
    turn_ends: NotRequired[Tokens]
    turn_rewards: NotRequired[Numbers]
    segment_starts: NotRequired[Tokens]
    segment_histories: NotRequired[Histories]


class ToolAnswerRow(TypedDict):
    """tool_answers, in the order of the samples and their turns: what environments were asked, and
    what they answered.

    Turn 0 is the start of an episode, which has no action. `seed` is the environment's; `request`
    the id of what was asked: environment, row, seed and all actions so far. `error` says why there
    was no answer; null: there was one. `iteration` is `evaluation of POLICY` in an evaluation.
    `ids`, of agents alone: what was answered where that was ids; null: the text was.
    """

    iteration: Text
    prompt_id: Text
    sample_index: Int32 | None
    turn: Int32
    seed: Int64
    request: Text
    action: Text | None
    text: Text
    reward: Float64
    done: Flag
    error: Text | None
    ids: NotRequired[Tokens | None]


class ScoreRow(TypedDict):
    """scores, row by row beside the rollouts they belong to.

    `reward` is what is learnt from; `by_source` what each source said, before weights, penalties
    and clipping; `ref_logprobs` are null where nobody asked for them. `reward_by_turn` is `reward`
    shared out over the turns of an episode, where `rl.turn_credit` is `turn`.
    """

    prompt_id: Text
    sample_index: Int32
    reward: Float32
    by_source: BySource
    ref_logprobs: Numbers | None
    reward_by_turn: NotRequired[Numbers]


class ScoredRollout(RolloutRow):
    """A rollout with its score: in memory only."""

    reward: Float32
    by_source: BySource
    ref_logprobs: Numbers | None
    reward_by_turn: NotRequired[Numbers]


class ExperienceRow(TypedDict):
    """experience.parquet of an update, sorted by (prompt_id, sample_index, role).

    The samples that the policy was trained on, once for each role it had (`policy_gradient`,
    `chosen`, `rejected`, `imitated`, `distilled`). `advantages`, one per response token, are those
    that the loss was given; null where it was given none. Where demonstrations are chosen, only the
    rejected samples are here: a demonstration is no sample and has no reward.
    """

    prompt_id: Text
    sample_index: Int32
    role: Text
    reward: Float32
    advantages: Numbers | None


class EvaluationRow(TypedDict):
    """samples.parquet of an evaluation, sorted by prompt_id: the greedy response to each held-out
    prompt.

    The `response` of an episode of several turns is a transcript of them.
    `correct` is null where nothing says what is right; `task` where the data name none; `pass_rate`
    is the share of the sampled responses that are right. `reference_reward` is that of the
    reference's greedy response, and `won` is 1 where it is lower, 0.5 for a tie; both are null for
    the reference itself.
    """

    prompt_id: Text
    prompt: Text
    answer: Text | None
    response: Text
    correct: Flag | None
    reward: Float32
    task: Text | None
    finish_reason: Text
    length: Int32
    pass_rate: Float32 | None
    reference_reward: Float32 | None
    won: Float32 | None


class EvaluationSampledRow(TypedDict):
    """sampled.parquet of an evaluation, sorted by (prompt_id, sample_index): the sampled responses.

    `vote` is the answer that counts in a majority vote; null: it abstains.
    """

    prompt_id: Text
    sample_index: Int32
    response: Text
    correct: Flag | None
    reward: Float32
    finish_reason: Text
    length: Int32
    vote: Text | None


class EvaluationTaskRow(TypedDict):
    """tasks.parquet of an evaluation, sorted by task: its numbers for each task that the data name,
    and under null for the prompts without one. Empty where no prompt has a task."""

    task: Text | None
    num_prompts: Int32
    num_judged: Int32
    accuracy: Float64 | None
    accuracy_low: Float64 | None
    accuracy_high: Float64 | None
    accuracy_sampled: Float64 | None
    win_rate: Float64 | None
    win_rate_low: Float64 | None
    win_rate_high: Float64 | None
    reward_mean: Float64
    reward_mean_error: Float64 | None
    response_length: Float64
