"""prepare: the data as token ids, the tokenizer, the base model and the verifier.

The source is either the arithmetic task, made from the seed, or a user's data in any of several
formats. Both become the same rows of text, a stream for each role; from there on there is one path.
Texts are rendered to token ids here and nowhere else. The held-out prompts are in no training set,
whatever the source. No row is left out without being counted in report.json, with the reason.

A kill costs all of it: it reads each file a few times and trains nothing, so it is short beside
what follows.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch

from stages.context import Context, StageError, Stopped
from stages.contracts.model import ModelParams
from stages.contracts.prepare import PrepareConfig, Unfit
from stages.contracts.sources import Role
from stages.data import schema
from stages.data.artifacts import set_modes, write_json
from stages.data.corpus import ArithmeticCorpus, Corpus
from stages.data.dialogue import Message, response_text
from stages.data.items import Demonstration, Example, Labelled, Pair
from stages.data.parquet_stream import streaming
from stages.data.rendering import Rendered, TooLong, render
from stages.data.seeds import stable_hash
from stages.data.selection import FilesCorpus
from stages.data.sources import unreadable
from stages.data.tally import Dropped, shown
from stages.data.tokenizer import Renderer, build_character_tokenizer
from stages.data.tools_file import read_tools
from stages.engines.models.base_folder import take_base_model
from stages.engines.models.lean_transformers import AutoConfig, AutoModelForCausalLM, hidden
from stages.rewards.verifier import Verifier, pairwise_accuracy

ROWS_AT_A_TIME = 512
KINDS = {
    Role.HELD_OUT: schema.PromptRow,
    Role.HELD_OUT_PREFERENCES: schema.PreferenceRow,
    Role.DEMONSTRATIONS: schema.DemonstrationRow,
    Role.PREFERENCES: schema.PreferenceRow,
    Role.FEEDBACK: schema.FeedbackRow,
    Role.STEPS: schema.StepsRow,
    Role.PROMPTS: schema.PromptRow,
}
"""In the order in which they are written: answers to held-out prompts are known for their pairs."""


def run(
    config: PrepareConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    params = config.prepare
    corpus: Corpus = (
        ArithmeticCorpus(params, ctx.seed)
        if params.source == "arithmetic"
        else FilesCorpus(params, inputs["files"], ctx.seed)
    )
    if config.model.source == "build":
        tokenizer = build_character_tokenizer(corpus.texts())
        _build_base_model(config.model, tokenizer, out["base"], ctx.seed)
    else:
        tokenizer = take_base_model(
            config.model, config.precision, inputs["base_model"], out["base"]
        )

    renderer = Renderer(tokenizer, read_tools(params.tools, inputs["files"]))
    watch = _Watch(Verifier(after=corpus.answer_after))
    for index, (role, kind) in enumerate(KINDS.items()):
        sorted_by = "prompt_id" if role.asks else None
        with streaming(out[role], schema.columns_of(kind), sorted_by, ctx.scratch) as stream:
            rows = corpus.rows(role)
            while batch := list(islice(rows, ROWS_AT_A_TIME)):
                if ctx.should_stop():
                    raise Stopped(f"stopped while writing {role}")
                items = [watch.with_its_answer(role, item) for item in batch]
                rendered = _rendered(role, items, renderer, config, corpus)
                kept = [(item, watch.seen(role, item, row)) for item, row in rendered]
                stream.write(list(chain.from_iterable(repeat(v, item.copies) for item, v in kept)))
                ctx.progress(index, len(KINDS), "files", rows=corpus.tally.num_written(role))
        _refuse_nothing_left(corpus, role)
    ctx.progress(len(KINDS), len(KINDS), "files")

    out["verifier"].mkdir()
    watch.verifier.save(out["verifier"])
    write_json(
        out["verifier"] / "quality.json", {"pairwise_accuracy": pairwise_accuracy(watch.rewards)}
    )
    table = corpus.tally.table()
    write_json(
        out["data_report"],
        {"template": renderer.template_hash, "sources": table, "unused_files": corpus.unused},
    )
    ctx.table("data", [{**row, "dropped": str(row["dropped"])} for row in table])
    print(shown(table), flush=True)
    if corpus.unused:
        print(f"read by no role: {', '.join(corpus.unused)}", flush=True)

    written = {f"num_{role}": corpus.tally.num_written(role) for role in Role}
    written["num_step_labels"] = watch.num_step_labels
    del written["num_steps"]
    metrics: dict[str, float | int] = {
        **written,
        **corpus.tally.metrics(),
        "vocabulary": len(tokenizer),
        "longest_sequence": watch.longest,
    }
    if watch.num_answered:
        metrics["demonstration_accuracy"] = watch.num_right / watch.num_answered
    return metrics


def _rendered(
    role: Role, items: list[Example], renderer: Renderer, config: PrepareConfig, corpus: Corpus
) -> Iterator[tuple[Example, Rendered]]:
    """The rows that can be used; the others are counted, or refused."""
    params = config.prepare
    for item, row in render(items, renderer, config.model.max_length):
        counts = corpus.tally.of(role, item.place.source)
        if isinstance(row, Rendered):
            counts.num_kept += 1
            counts.num_written += item.copies
            yield item, row
        elif not isinstance(row, TooLong):
            unreadable(item.place, row, params, counts)
        elif params.too_long is Unfit.REFUSE or params.source == "arithmetic":
            raise StageError(f"{item.place}: {row}")
        else:
            counts.dropped[Dropped.TOO_LONG] += 1


def _refuse_nothing_left(corpus: Corpus, role: Role) -> None:
    counts = [counts for counts in corpus.tally.all() if counts.role is role]
    if counts and not corpus.tally.num_written(role):
        dropped = sum((Counter(one.dropped) for one in counts), Counter())
        why = ", ".join(f"{number} {reason}" for reason, number in dropped.items())
        raise StageError(
            f"no row of the {role} is left ({why}): of what docs/data.md says of these reasons, "
            "change what applies, or give the role no source"
        )


@dataclass
class _Watch:
    """What is told of the rows while they pass."""

    verifier: Verifier
    longest: int = 0
    num_step_labels: int = 0
    num_answered: int = 0
    """Demonstrations whose answer is known."""
    num_right: float = 0.0
    rewards: list[tuple[float, float]] = field(default_factory=list)
    """The verifier's, of both sides of held-out pairs whose answer is known."""
    _answers: dict[str, str] = field(default_factory=dict)

    def with_its_answer(self, role: Role, item: Example) -> Example:
        """A held-out pair may leave its answer to the held-out prompt."""
        if role is Role.HELD_OUT_PREFERENCES and item.answer is None:
            return replace(item, answer=self._answers.get(item.prompt.id))
        return item

    def seen(self, role: Role, item: Example, row: Rendered) -> Mapping[str, Any]:
        self.longest = max(self.longest, row.length)
        if isinstance(item, Labelled):
            self.num_step_labels += len(item.labels) * item.copies
        if item.answer is None:
            return row.values
        if role is Role.HELD_OUT:
            self._answers[item.prompt.id] = item.answer
        elif role is Role.HELD_OUT_PREFERENCES and isinstance(item, Pair):
            better, worse = (self._reward([side], item) for side in (item.chosen, item.rejected))
            self.rewards.append((better, worse))
        elif isinstance(item, Demonstration):
            self.num_answered += item.copies
            self.num_right += self._reward(item.completion, item) * item.copies
        return row.values

    def _reward(self, response: Sequence[Message], item: Example) -> float:
        return self.verifier.reward(response_text(response), str(item.answer))


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
