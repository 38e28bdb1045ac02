"""A finished reward model with a tokenizer of its own: it reads a response as text.

The prompt and the response become one text by the reward model's own chat template, or a pair of
texts where it was trained on such. The reward is what transformers' own forward pass says of that
text alone: texts of the same number of tokens go through the model together, and none is padded.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.context import Context, StageError
from stages.contracts.rewards import Form, Model, Read
from stages.data.chat_templates import as_text, check_it_reads, choose_template
from stages.engines.models.base_folder import load_tokenizer
from stages.engines.models.given_folder import ModelKind, check_folder
from stages.engines.models.labels import choose_label, labels_of
from stages.engines.models.loaders import Load
from stages.rewards.given import Row, name_of


def check_model(name: str, params: Model, folder: Path) -> int:
    """The label whose number is read; StageError where the folder is no such model."""
    where, path = f"rewards.{name}.folder {params.folder}", folder / params.folder
    if not path.is_dir():
        raise StageError(f"{where}: there is no such folder in score.folder ({folder})")
    check_folder(path, where, ModelKind.SCORER, "", trust_code=False)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if not any(str(n).endswith("Classification") for n in config.get("architectures") or ()):
        raise StageError(
            f"{where} holds a {(config.get('architectures') or ['model'])[0]}, which has no head "
            "that rates a text: train one from it with reward_model.start: folder, or ask it as a "
            "judge"
        )
    _tokenizer(name, params, folder)
    return choose_label(where, params.label, labels_of(path))


@dataclass(frozen=True)
class _Context:
    """A model's context length."""

    num_tokens: float
    said_by: str


class ModelScorer:
    def __init__(self, ctx: Context, name: str, params: Model, folder: Path, load: Load) -> None:
        self._name, self._params = name, params
        self._device = ctx.device
        self._label = check_model(name, params, folder)
        self._tokenizer = _tokenizer(name, params, folder)
        self._model = load(folder / params.folder, ctx.device, params.precision)
        self._context = _context(self._model, self._tokenizer)

    def score(self, rows: Sequence[Row]) -> list[float]:
        encoded = [self._encode(row) for row in rows]
        of_length: dict[int, list[int]] = {}
        for index, inputs in enumerate(encoded):
            of_length.setdefault(len(inputs["input_ids"]), []).append(index)
        rewards = [0.0] * len(rows)
        for together in of_length.values():
            for start in range(0, len(together), self._params.batch_size):
                some = together[start : start + self._params.batch_size]
                for index, reward in zip(some, self._rate([encoded[i] for i in some]), strict=True):
                    rewards[index] = reward
        return rewards

    def close(self) -> None:
        self._model = None

    def _encode(self, row: Row) -> dict[str, list[int]]:
        prompt, response = row["prompt"], row["response"]
        if self._params.form is Form.PAIR:
            inputs = dict(self._tokenizer(prompt, response))
        else:
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": response},
            ]
            text = as_text(self._tokenizer, messages)
            inputs = dict(self._tokenizer(text, add_special_tokens=False))
        if len(inputs["input_ids"]) > self._context.num_tokens:
            raise StageError(
                f"rewards.{self._name}: {name_of(row)} and its response have "
                f"{len(inputs['input_ids'])} tokens for this model, whose context is "
                f"{self._context.num_tokens} ({self._context.said_by}): lower "
                "rollout.max_new_tokens, or shorten the prompts"
            )
        return inputs

    @torch.inference_mode()
    def _rate(self, encoded: Sequence[dict[str, list[int]]]) -> list[float]:
        inputs = {
            key: torch.tensor([each[key] for each in encoded], device=self._device)
            for key in encoded[0]
        }
        logits = self._model(**inputs).logits.float()
        if self._params.read is Read.PROBABILITY:
            logits = logits.softmax(-1) if logits.shape[1] > 1 else logits.sigmoid()
        rewards: list[float] = logits[:, self._label].tolist()
        return rewards


def _context(model: Any, tokenizer: Any) -> _Context:
    """The smaller of what the model and its tokenizer say; either may say nothing."""
    positions = getattr(model.config, "max_position_embeddings", None) or math.inf
    limits = [
        _Context(positions - _unused_positions(model), "config.json's max_position_embeddings"),
        # One that nobody has set is a number beyond all texts.
        _Context(tokenizer.model_max_length, "tokenizer_config.json's model_max_length"),
    ]
    return min(limits, key=lambda limit: limit.num_tokens)


def _unused_positions(model: Any) -> int:
    """RoBERTa and its like count positions from the one after that of padding."""
    tables = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    paddings = (getattr(table, "padding_idx", None) for table in tables)
    return next((padding + 1 for padding in paddings if padding is not None), 0)


def _tokenizer(name: str, params: Model, folder: Path) -> Any:
    path, where = folder / params.folder, f"rewards.{name}"
    tokenizer = load_tokenizer(path, f"{where}.folder {params.folder}")
    if params.form is Form.CHAT:
        key = f"{where}.chat_template"
        choose_template(tokenizer, params.chat_template, path, where, key)
        check_it_reads(tokenizer, where, "assistant", key)
    return tokenizer
