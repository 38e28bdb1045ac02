"""prepare: the data as token ids, the tokenizer, the base model and the verifier.

The source is either the arithmetic task, made from the seed, or a user's JSON lines. Both become
the same `Corpus` of texts; from there on there is one path. Texts are rendered to token ids here
and nowhere else. The held-out prompts are in no training set, whatever the source.

A kill costs all of it: it reads each file once and trains nothing, so it is short beside what
follows.
"""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from stages.context import Context, StageError
from stages.contracts.model import ModelParams
from stages.contracts.prepare import PrepareConfig
from stages.data import schema
from stages.data.artifacts import set_modes, write_json, write_parquet
from stages.data.corpus import (
    Example,
    Labelled,
    Pair,
    Rated,
    arithmetic_corpus,
    files_corpus,
)
from stages.data.seeds import content_id, stable_hash
from stages.data.tokenizer import Renderer, build_character_tokenizer
from stages.engines.models.base_folder import take_base_model
from stages.engines.models.lean_transformers import AutoConfig, AutoModelForCausalLM, hidden
from stages.rewards.verifier import Verifier, pairwise_accuracy


def run(
    config: PrepareConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.prepare
    if params.source == "arithmetic":
        corpus = arithmetic_corpus(params, ctx.seed)
    else:
        corpus = files_corpus(inputs["files"])
    if config.model.source == "build":
        tokenizer = build_character_tokenizer(corpus.texts())
        _build_base_model(config.model, tokenizer, out["base"], ctx.seed)
    else:
        tokenizer = take_base_model(
            config.model, config.precision, inputs["base_model"], out["base"]
        )

    rendered = _Rendered(Renderer(tokenizer), config.model.max_length)
    write_parquet(
        out["demonstrations"],
        [rendered.demonstration(example) for example in corpus.demonstrations],
        schema.DEMONSTRATIONS,
    )
    for name, pairs in (
        ("preferences", corpus.preferences),
        ("held_out_preferences", corpus.held_out_preferences),
    ):
        write_parquet(out[name], [rendered.pair(pair) for pair in pairs], schema.PREFERENCES)
    write_parquet(out["feedback"], map(rendered.rated, corpus.feedback), schema.FEEDBACK)
    write_parquet(out["steps"], map(rendered.labelled, corpus.steps), schema.STEPS)
    for name, prompts in (("prompts", corpus.prompts), ("held_out", corpus.held_out)):
        rows = {row["prompt_id"]: row for row in map(rendered.prompt, prompts)}
        write_parquet(out[name], [rows[key] for key in sorted(rows)], schema.PROMPTS)

    verifier = Verifier(after=corpus.answer_after)
    out["verifier"].mkdir()
    verifier.save(out["verifier"])
    accuracy = pairwise_accuracy(
        (verifier.reward(pair.chosen, pair.answer), verifier.reward(pair.rejected, pair.answer))
        for pair in corpus.held_out_preferences
        if pair.answer is not None
    )
    write_json(out["verifier"] / "quality.json", {"pairwise_accuracy": accuracy})

    right = [e for e in corpus.demonstrations if e.answer is not None]
    metrics: dict[str, float | int] = {
        "num_demonstrations": len(corpus.demonstrations),
        "num_preferences": len(corpus.preferences),
        "num_feedback": len(corpus.feedback),
        "num_step_labels": sum(len(labelled.labels) for labelled in corpus.steps),
        "num_prompts": len(corpus.prompts),
        "num_held_out": len(corpus.held_out),
        "num_held_out_preferences": len(corpus.held_out_preferences),
        "vocabulary": len(tokenizer),
        "longest_sequence": rendered.longest,
    }
    if right:
        correct = sum(verifier.reward(e.completion, str(e.answer)) for e in right)
        metrics["demonstration_accuracy"] = correct / len(right)
    return metrics


class _Rendered:
    """Rows with token ids; a text that does not fit the context is an error naming its place."""

    def __init__(self, renderer: Renderer, max_length: int) -> None:
        self._renderer = renderer
        self._max_length = max_length
        self.longest = 0

    def prompt(self, example: Example) -> dict[str, Any]:
        ids = self._prompt_ids(example.prompt, example.place)
        return {
            **_of_prompt(example.prompt, ids),
            "answer": example.answer,
            "extra": example.extra,
        }

    def demonstration(self, example: Example) -> dict[str, Any]:
        ids = self._prompt_ids(example.prompt, example.place)
        return {
            **_of_prompt(example.prompt, ids),
            "completion": example.completion,
            "answer": example.answer,
            "extra": example.extra,
            "completion_ids": self._response_ids(ids, example.completion, example.place),
        }

    def pair(self, pair: Pair) -> dict[str, Any]:
        ids = self._prompt_ids(pair.prompt, pair.place)
        return {
            **_of_prompt(pair.prompt, ids),
            "chosen": pair.chosen,
            "rejected": pair.rejected,
            "answer": pair.answer,
            "margin": pair.margin,
            "chosen_ids": self._response_ids(ids, pair.chosen, pair.place),
            "rejected_ids": self._response_ids(ids, pair.rejected, pair.place),
        }

    def rated(self, rated: Rated) -> dict[str, Any]:
        ids = self._prompt_ids(rated.prompt, rated.place)
        return {
            **_of_prompt(rated.prompt, ids),
            "completion": rated.completion,
            "rating": rated.rating,
            "completion_ids": self._response_ids(ids, rated.completion, rated.place),
        }

    def labelled(self, labelled: Labelled) -> dict[str, Any]:
        """Steps are rendered one by one, so that each ends with a token; the last ends the text."""
        ids = self._prompt_ids(labelled.prompt, labelled.place)
        *first, last = [self._renderer.response_ids(step) for step in labelled.steps]
        parts = [*(step[:-1] for step in first), last]
        return {
            **_of_prompt(labelled.prompt, ids),
            "completion_ids": self._fitting(ids, [i for p in parts for i in p], labelled.place),
            "step_ends": [length - 1 for length in accumulate(map(len, parts))],
            "step_labels": labelled.labels,
        }

    def _prompt_ids(self, prompt: str, place: str) -> list[int]:
        ids = self._renderer.prompt_ids(prompt)
        if len(ids) >= self._max_length:
            raise StageError(
                f"{place}: the prompt has {len(ids)} tokens and leaves no room for a response in "
                f"model.max_length {self._max_length}: shorten it or raise model.max_length"
            )
        return ids

    def _response_ids(self, prompt_ids: list[int], response: str, place: str) -> list[int]:
        return self._fitting(prompt_ids, self._renderer.response_ids(response), place)

    def _fitting(self, prompt_ids: list[int], ids: list[int], place: str) -> list[int]:
        total = len(prompt_ids) + len(ids)
        self.longest = max(self.longest, total)
        if total > self._max_length:
            raise StageError(
                f"{place}: prompt and response have {total} tokens together, more than "
                f"model.max_length {self._max_length}: shorten them or raise model.max_length"
            )
        return ids


def _of_prompt(prompt: str, ids: list[int]) -> dict[str, Any]:
    """The columns that every row has."""
    return {"prompt_id": content_id(prompt), "prompt": prompt, "prompt_ids": ids}


def _build_base_model(params: ModelParams, tokenizer: Any, folder: Path, seed: int) -> None:
    """A small Llama, its weights drawn from the seed."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=params.hidden_size,
        intermediate_size=params.intermediate_size,
        num_hidden_layers=params.num_layers,
        num_attention_heads=params.num_heads,
        num_key_value_heads=params.num_kv_heads,
        max_position_embeddings=params.max_length,
        initializer_range=params.hidden_size**-0.5 / 2,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(stable_hash(seed, "base"))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with hidden(("deepspeed",)):  # see save_model
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    set_modes(folder)
