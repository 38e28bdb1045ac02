"""Chat with vLLM. test_vllm.py runs these in a process that has it, on the one engine there."""

import pytest

from stages.chat.policy import ChatPolicy
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.data.seeds import stable_hash
from stages.engines.generation.generator import Request, Sampling
from tests.tiny_policy import tiny_policy

ASKED = [{"role": "user", "content": "12+7="}]
HEAD = 64
"""Those of the other tiny policies are too small for its attention on a CPU."""


@pytest.fixture
def policy(one_vllm, tmp_path, monkeypatch):
    folder = tiny_policy(tmp_path, head_dim=HEAD)
    monkeypatch.setattr("stages.chat.policy._open", lambda folder, *_: one_vllm(folder))
    return ChatPolicy(folder, Engine.VLLM, Precision.FLOAT32, "cpu")


def ask(of, seed=None, limit=12, said=None, stops_after=None, sampling=None):
    pieces = [] if said is None else said
    return of.answer(
        ASKED,
        seed=seed,
        max_new_tokens=limit,
        sampling=sampling or Sampling(),
        said=pieces.append,
        is_stopped=lambda: stops_after is not None and len(pieces) >= stops_after,
    )


def test_what_is_streamed_is_what_rollouts_would_have(policy):
    prompt = policy._prompt(ASKED)
    for seed in (None, 5):
        drawn = None if seed is None else stable_hash(seed, "chat", len(ASKED))
        options = {"max_new_tokens": 12, "sampling": Sampling()}
        [expected] = policy._generator.generate([Request(prompt, drawn)], **options)
        said: list[str] = []
        answer = ask(policy, seed, said=said)
        assert (answer.ids, answer.finish_reason) == (expected.ids, expected.finish_reason)
        assert "".join(said) == answer.text
        assert len(said) > len(answer.ids) / 2, "token by token"


def test_one_that_is_stopped_ends_at_once_and_leaves_nothing_behind(policy):
    whole = ask(policy, limit=200)
    stopped = ask(policy, limit=200, stops_after=3)
    assert stopped.finish_reason == "stopped"
    assert stopped.ids == whole.ids[: len(stopped.ids)]
    assert 3 <= len(stopped.ids) < 30
    assert ask(policy, limit=200) == whole


def test_what_is_unlikely_may_be_cut_off(policy):
    likeliest = ask(policy)
    assert ask(policy, seed=3).ids != likeliest.ids
    assert ask(policy, seed=3, sampling=Sampling(top_k=1)).ids == likeliest.ids
