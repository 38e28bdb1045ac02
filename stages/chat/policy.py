"""A policy that answers dialogues: its chat template, its end tokens, its generator.

An answer is a function of the policy, the dialogue, the seed and how tokens are drawn: nothing is
left over from earlier answers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.chat.streaming import StreamingGenerator
from stages.context import StageError
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.data.dialogue import Dialogue
from stages.data.row_error import RowError
from stages.data.seeds import stable_hash
from stages.data.tokenizer import Decoder, Renderer
from stages.engines.generation.generator import GeneratorSettings, Request, Sampling
from stages.engines.generation.generators import choose
from stages.engines.models.folders import weights_folder
from stages.engines.models.lean_transformers import AutoConfig
from stages.engines.models.own_code import may_run

if TYPE_CHECKING:
    from stages.chat.streaming_vllm import StreamingVllm

HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Halted(Exception):
    """Somebody asked for the end of an answer."""


@dataclass(frozen=True)
class Answer:
    """What the policy said."""

    text: str
    ids: list[int]
    num_prompt: int
    """Tokens of the dialogue."""
    finish_reason: str
    """`stop`: an end token; `length`: the limit; `stopped`: somebody asked for it."""
    seed: int
    """The seed that the tokens were drawn with, as in a row of rollouts; 0 where greedily."""

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "num_tokens": len(self.ids)}


class ChatPolicy:
    """A policy of a folder, loaded and checked as rollout does."""

    def __init__(self, folder: Path, engine: Engine, precision: Precision, device: str) -> None:
        """StageError where it has no chat template, or does not load."""
        self._renderer, self._unknown = _renderer(folder)
        self._decoder = Decoder(folder)
        self.engine = choose(folder, device, engine)
        self.context = _context(folder, self.engine)
        """Tokens that a dialogue and its answer have at most together; None: no limit is known."""
        self._generator = _open(folder, self.engine, precision, device, self.context)
        self.device = device

    @property
    def policy_hash(self) -> str:
        """Of the weights, as rows of rollouts have it."""
        return self._generator.policy_hash

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        seed: int | None,
        max_new_tokens: int,
        sampling: Sampling,
        said: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> Answer:
        """Answer a dialogue; `said` hears the text piece by piece. Without a seed, greedily."""
        prompt = self._prompt(messages)
        room = self._room(len(prompt))
        limit = max_new_tokens if room is None else min(max_new_tokens, room)
        # Each turn has random numbers of its own.
        drawn = None if seed is None else stable_hash(seed, "chat", len(messages))
        request = Request(prompt, drawn)
        heard: list[int] = []
        told = ""

        def tell(ids: list[int]) -> None:
            nonlocal told
            heard[:] = ids
            whole = self._decoder.text(ids).rstrip(HALF_A_CHARACTER)
            if whole.startswith(told) and whole != told:
                said(whole[len(told) :])
                told = whole
            if is_stopped():
                raise Halted

        options: dict[str, Any] = {"max_new_tokens": limit, "sampling": sampling}
        try:
            completion = self._generator.stream(request, tell=tell, **options)
            ids, reason = completion.ids, str(completion.finish_reason)
        except Halted:
            ids, reason = heard, "stopped"
        return Answer(self._decoder.text(ids), ids, len(prompt), reason, drawn or 0)

    def _prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        [text] = self._renderer.prompt_texts([Dialogue(tuple(messages))])
        if isinstance(text, RowError):
            raise StageError(f"the dialogue cannot be put to the policy: {text}")
        [ids] = self._renderer.ids([text])
        if self._unknown is not None and self._unknown in ids:
            lacking = self._without_tokens(messages)
            raise StageError(
                f"the policy's tokenizer has no tokens for {lacking}: say it in other words"
            )
        ids = self._renderer.prompt_ids(ids)
        if not ids:
            raise StageError("there is nothing to answer: the dialogue has no tokens")
        return ids

    def _without_tokens(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the tokenizer does not know, character by character where that tells it."""
        characters = sorted(set("".join(str(message["content"]) for message in messages)))
        all_ids = self._renderer.ids(characters) if characters else []
        lacking = [c for c, ids in zip(characters, all_ids, strict=True) if self._unknown in ids]
        return " ".join(map(repr, lacking[:8])) or "all of the dialogue"

    def _room(self, num_prompt: int) -> int | None:
        if self.context is None:
            return None
        if num_prompt >= self.context:
            raise StageError(
                f"the dialogue has {num_prompt} tokens, which leaves no room for an answer in the "
                f"policy's context of {self.context}: begin a new one (/reset), or say less"
            )
        return self.context - num_prompt


def _renderer(folder: Path) -> tuple[Renderer, int | None]:
    """What renders dialogues, and the token for what the tokenizer does not know."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.chat_template is None:
        raise StageError(
            "the policy's tokenizer has no chat template, so nothing says how a dialogue is to be "
            "put: policies that start from a base with model.chat_template set have one"
        )
    return Renderer(tokenizer), tokenizer.unk_token_id


def _open(
    folder: Path, engine: Engine, precision: Precision, device: str, context: int | None
) -> "StreamingGenerator | StreamingVllm":
    if engine is Engine.VLLM:
        from stages.chat.streaming_vllm import MEMORY_SHARE, StreamingVllm

        settings = GeneratorSettings(device, precision, 1, 1, MEMORY_SHARE, context)
        return StreamingVllm(folder, settings)
    generator = StreamingGenerator(device, precision)
    with ExitStack() as failed:
        failed.callback(generator.close)
        generator.load(folder)
        failed.pop_all()
    return generator


def _context(folder: Path, engine: Engine) -> int | None:
    weights = weights_folder(folder)
    trusted = may_run(weights)
    config = AutoConfig.from_pretrained(weights, local_files_only=True, trust_remote_code=trusted)
    length: int | None = getattr(config, "max_position_embeddings", None)
    if engine is not Engine.VLLM:
        return length
    from stages.chat.streaming_vllm import LONGEST

    return min(length or LONGEST, LONGEST)
