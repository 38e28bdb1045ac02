"""A policy that answers while somebody waits says what the generators of rollouts say."""

import pytest

from stages.chat.policy import ChatPolicy
from stages.chat.streaming import StreamingGenerator
from stages.context import StageError
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.data.seeds import stable_hash
from stages.engines.generation.generator import GeneratorSettings, Request, Sampling
from stages.engines.generation.generators import open_generator
from tests.tiny_policy import CONTEXT, tiny_policy

PROMPTS = ([1, 5, 6], [1, 7, 8, 9, 10, 11], [1], [1, 4, 4, 4])
SAMPLED = Sampling(temperature=1.3, top_p=0.9)
ASKED = [{"role": "user", "content": "12+7="}]


@pytest.mark.parametrize("windowed", [False, True], ids=["decoder", "padded"])
def test_streamed_tokens_are_those_of_the_batch_generator(tmp_path, windowed):
    folder = tiny_policy(tmp_path, windowed=windowed)
    requests = [Request(prompt, seed) for prompt in PROMPTS for seed in (None, 7, 8)]
    streaming = StreamingGenerator("cpu", Precision.FLOAT32)
    streaming.load(folder)
    batch = open_generator(folder, Engine.TORCH, GeneratorSettings("cpu", Precision.FLOAT32, 4))
    assert streaming.policy_hash == batch.policy_hash
    answers = batch.generate(requests, max_new_tokens=24, sampling=SAMPLED)
    for request, expected in zip(requests, answers, strict=True):
        told: list[list[int]] = []
        options = {"max_new_tokens": 24, "sampling": SAMPLED}
        answer = streaming.stream(request, tell=told.append, **options)
        assert answer.ids == expected.ids
        assert answer.finish_reason == expected.finish_reason
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        # Each token was told by itself, as soon as it was there.
        beginnings = [expected.ids[:count] for count in range(1, len(expected.ids) + 1)]
        assert [ids for index, ids in enumerate(told) if ids not in told[:index]] == beginnings


def policy(folder):
    return ChatPolicy(folder, Engine.TORCH, Precision.FLOAT32, "cpu")


def ask(of, messages=ASKED, seed=None, limit=12, said=None, stops_after=None):
    pieces = [] if said is None else said
    return of.answer(
        messages,
        seed=seed,
        max_new_tokens=limit,
        sampling=Sampling(),
        said=pieces.append,
        is_stopped=lambda: stops_after is not None and len(pieces) >= stops_after,
    )


def test_an_answer_is_rendered_and_drawn_as_in_rollouts(tmp_path):
    chatting = policy(tiny_policy(tmp_path))
    batch = open_generator(tmp_path, Engine.TORCH, GeneratorSettings("cpu", Precision.FLOAT32, 4))
    dialogue = [*ASKED, {"role": "assistant", "content": "19"}, {"role": "user", "content": "a?"}]
    vocabulary = chatting._decoder.vocabulary()
    # The plain template: a start token, and an end token after what the assistant has said.
    tokens = ["<bos>", *"12+7=", *"19", "<eos>", *"a?"]
    prompt = [vocabulary[token] for token in tokens]
    for seed in (None, 5):
        drawn = None if seed is None else stable_hash(seed, "chat", len(dialogue))
        [expected] = batch.generate(
            [Request(prompt, drawn)], max_new_tokens=12, sampling=Sampling()
        )
        said: list[str] = []
        answer = ask(chatting, dialogue, seed, said=said)
        assert (answer.ids, answer.num_prompt) == (expected.ids, len(prompt))
        assert "".join(said) == answer.text != ""
        assert answer.seed == (drawn or 0)


def test_an_answer_that_is_stopped_is_what_was_said_and_leaves_nothing_behind(tmp_path):
    chatting = policy(tiny_policy(tmp_path))
    whole = ask(chatting, limit=200)
    stopped = ask(chatting, limit=200, stops_after=3)
    assert stopped.finish_reason == "stopped"
    assert stopped.ids == whole.ids[: len(stopped.ids)]
    assert 3 <= len(stopped.ids) < 30
    assert ask(chatting, limit=200) == whole


def test_an_answer_ends_where_the_context_does_and_a_full_one_is_an_error(tmp_path):
    chatting = policy(tiny_policy(tmp_path))
    question = [{"role": "user", "content": "7" * (CONTEXT - 5)}]
    assert len(ask(chatting, question, limit=100).ids) <= 4
    with pytest.raises(StageError, match=f"context of {CONTEXT}: begin a new one"):
        ask(chatting, [{"role": "user", "content": "7" * CONTEXT}])


def test_what_the_tokenizer_cannot_say_is_named(tmp_path):
    chatting = policy(tiny_policy(tmp_path))
    with pytest.raises(StageError, match="no tokens for 'É' '×'"):
        ask(chatting, [{"role": "user", "content": "É × a"}])


def test_a_policy_without_a_chat_template_is_refused(tmp_path):
    with pytest.raises(StageError, match="no chat template"):
        policy(tiny_policy(tmp_path, template=False))
