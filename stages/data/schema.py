"""The Parquet schemas of everything that passes between stages.

Text is rendered to token ids once, in prepare; from there on ids are what counts, and text is
carried for people and for verifiers. Nothing is ever re-tokenised.

`prompt_id`     hash of the prompt's text; the same prompt has the same id everywhere
`prompt_ids`    the prompt's token ids, as the chat template renders it
`*_ids`         a response's token ids; one that ended has its end-of-sequence token as the last id
`answer`        what a verifier compares with; null where the data have none
"""

import pyarrow as pa

_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())


def _schema(**columns: pa.DataType) -> pa.Schema:
    optional = {"answer"}
    return pa.schema([pa.field(n, kind, nullable=n in optional) for n, kind in columns.items()])


PROMPTS = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    prompt_ids=_TOKENS,
    answer=pa.string(),
)
"""prompts.parquet and held_out.parquet, sorted by prompt_id."""

DEMONSTRATIONS = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    completion=pa.string(),
    prompt_ids=_TOKENS,
    completion_ids=_TOKENS,
)
"""demonstrations.parquet, in the order of the source."""

PREFERENCES = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    chosen=pa.string(),
    rejected=pa.string(),
    answer=pa.string(),
    prompt_ids=_TOKENS,
    chosen_ids=_TOKENS,
    rejected_ids=_TOKENS,
)
"""preferences.parquet and held_out_preferences.parquet, in the order of the source."""

ROLLOUTS = _schema(
    prompt_id=pa.string(),
    sample_index=pa.int32(),
    prompt=pa.string(),
    response=pa.string(),
    answer=pa.string(),
    prompt_ids=_TOKENS,
    response_ids=_TOKENS,
    logprobs=_LOGPROBS,
    seed=pa.int64(),
    finish_reason=pa.string(),
    policy_hash=pa.string(),
)
"""rollouts, sorted by (prompt_id, sample_index). `logprobs` are those of the temperature-scaled
distribution that each token was drawn from; `finish_reason` is `stop` or `length`."""

SCORES = _schema(
    prompt_id=pa.string(),
    sample_index=pa.int32(),
    reward=pa.float32(),
    ref_logprobs=_LOGPROBS,
)
"""scores, row by row beside the rollouts they belong to."""

EVALUATION = _schema(
    prompt_id=pa.string(),
    prompt=pa.string(),
    answer=pa.string(),
    response=pa.string(),
    correct=pa.bool_(),
    reward=pa.float32(),
)
"""samples.parquet of an evaluation: the greedy response to each held-out prompt."""
