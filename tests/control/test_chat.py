"""`lockstep chat`: the process of a policy, and the conversation in a terminal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from starlette.testclient import TestClient

from pipelines.annotations import store
from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.chat import pool
from pipelines.chat.dialogue import Answer, Options
from pipelines.chat.engine import Engine
from pipelines.chat.policies import find_policy
from pipelines.chat.terminal import Conversation, chat
from pipelines.commands.cli import main
from pipelines.config.params import load_params
from pipelines.ui.app import create_app
from pipelines.ui.clone import open_clone
from tests.control.test_planes import modules_after
from tests.tiny_policy import LONG_CONTEXT, chat_clone
from tests.waiting import TIMEOUT_S, until

ROOT = Path(__file__).resolve().parents[2]
ASKED = [{"role": "user", "content": "12+7="}]
LONG = 400
STARTS_AND_WAITS = """
import sys, time
from pathlib import Path
from pipelines.base.repository import Repository
from pipelines.chat.engine import Engine
from pipelines.chat.policies import find_policy
from pipelines.config.params import load_params
root = Path(sys.argv[1])
engine = Engine(find_policy(Repository(root), "sft"), load_params(root))
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return chat_clone(tmp_path_factory.mktemp("clone")).root


@pytest.fixture(scope="module")
def engine(root):
    engine = Engine(find_policy(Repository(root), "sft"), load_params(root))
    yield engine
    pid = engine.pid
    engine.close()
    assert not psutil.pid_exists(pid)


def options(root, **values) -> Options:
    return Options.of_rollout(load_params(root)).changed(**values)


def asked(engine, how, name, messages=ASKED) -> tuple[list[str], Answer]:
    *pieces, answer = engine.answer(messages, how, name)
    return pieces, answer


def test_the_same_seed_and_history_give_the_same_answer_piece_by_piece(root, engine):
    pieces, answer = asked(engine, options(root, seed=1), "one")
    assert len(pieces) > 3
    assert "".join(pieces) == answer.text
    assert asked(engine, options(root, seed=1), "two")[1] == answer
    assert asked(engine, options(root, seed=2), "three")[1].ids != answer.ids
    longer = [*ASKED, {"role": "assistant", "content": answer.text}, *ASKED]
    assert asked(engine, options(root, seed=1), "four", longer)[1].ids != answer.ids


def test_an_answer_can_be_stopped_even_before_it_begins(root, engine):
    how = options(root, temperature=0, max_new_tokens=LONG)
    _, whole = asked(engine, how, "whole")
    parts = engine.answer(ASKED, how, "stopped")
    said = next(parts)
    engine.stop("stopped")
    *_, stopped = parts
    assert stopped.finish_reason == "stopped"
    assert whole.text.startswith(stopped.text)
    assert stopped.text.startswith(said)
    assert len(stopped.ids) < LONG == len(whole.ids)
    engine.stop("early")
    assert len(asked(engine, how, "early")[1].ids) == 1
    # Whoever does not listen to the end has stopped it, too: the next has its own answer.
    next(engine.answer(ASKED, how, "left"))
    assert asked(engine, how, "next")[1] == whole


def test_what_cannot_be_answered_is_refused_and_the_next_is_answered(root, engine):
    with pytest.raises(LockstepError, match=r"sft: the dialogue has .* leaves no room"):
        asked(engine, options(root), "full", [{"role": "user", "content": "7" * LONG_CONTEXT}])
    assert asked(engine, options(root), "again")[1].ids


def test_a_damaged_policy_answers_nothing(root):
    policy = find_policy(Repository(root), "iter_001")
    path = root / "artifacts/policies/iter_001/model/config.json"
    before = path.read_text()
    path.chmod(0o644)
    path.write_text(before + " ")
    try:
        with pytest.raises(LockstepError, match=r"iter_001: .* was recorded: `lockstep verify`"):
            Engine(policy, load_params(root))
    finally:
        path.write_text(before)


def test_a_process_ends_with_whoever_started_it(root):
    words = [sys.executable, "-c", STARTS_AND_WAITS, str(root)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        assert process.is_running()
        parent.kill()
    process.wait(TIMEOUT_S)


def typing(monkeypatch, *lines):
    """Somebody who types these lines, and then Ctrl-D."""
    left = iter(lines)

    def typed(_prompt):
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)


def test_a_conversation_in_a_terminal(root, engine, monkeypatch, capsys):
    typing(monkeypatch, "12+7=", "/reset", "/seed 3", "/seed", "/sede", "/system 1", "12+7=")
    chat(Conversation([engine], options(root, max_new_tokens=4)))
    shown = capsys.readouterr()
    assert "/sede is no command" in shown.err
    assert [line for line in shown.out.splitlines() if line.startswith("seed")] == ["seed 3"] * 2
    assert "with that system prompt" in shown.out
    how = options(root, max_new_tokens=4, seed=3)
    last = asked(engine, how, "last", [{"role": "system", "content": "1"}, *ASKED])[1]
    assert shown.out.endswith(f"{last.text} [cut off]\n\n")


def test_two_policies_are_asked_the_same_and_go_on_from_their_own_answers(
    root, engine, monkeypatch, capsys
):
    conversation = Conversation([engine, engine], options(root, max_new_tokens=4))
    typing(monkeypatch, "12+7=", "ab")
    chat(conversation)
    first = asked(engine, conversation.options, "first")[1].text
    history = [*ASKED, {"role": "assistant", "content": first}, {"role": "user", "content": "ab"}]
    second = asked(engine, conversation.options, "second", history)[1].text
    said = [f"[sft]\n{text} [cut off]\n" for text in (first, first, second, second)]
    assert capsys.readouterr().out == "".join(said) + "\n"


def test_ctrl_c_ends_an_answer_and_not_the_chat(root, engine, monkeypatch, capsys):
    typing(monkeypatch, "12+7=", "ab")
    answer, presses = engine.answer, iter([True])

    def interrupted(*words):
        for part in answer(*words):
            yield part
            if next(presses, False):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(engine, "answer", interrupted)
    chat(Conversation([engine], options(root, temperature=0, max_new_tokens=LONG)))
    shown = capsys.readouterr().out
    assert shown.count("[stopped]") == 1
    assert shown.count("[cut off]") == 1


def test_a_policy_of_another_commit_answers_once_as_json(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    words = ["first:iter_001", "--prompt", "12+7=", "--json", "--temperature", "0"]
    assert main(["chat", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    [answer] = said["answers"]
    assert said["options"]["temperature"] == 0
    assert (answer["policy"], answer["messages"]) == ("first:iter_001", ASKED)
    names = ("first:iter_001", "iter_001")
    then, now = (find_policy(Repository(root), name).artifact.hash for name in names)
    assert answer["artifact"] == then != now
    assert answer["finish_reason"] in ("stop", "length")


def test_chatting_imports_no_torch_here() -> None:
    modules = "pipelines.chat.terminal, pipelines.chat.pool, pipelines.ui.chat_api"
    assert not modules_after(f"import {modules}") & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["iter_9"], "'iter_9' is no finished policy: in dvc.lock of the workspace there are sft"),
        (["first:iter_9"], "there are sft, iter_001"),
        (["sft", "iter_001", "first:iter_001"], "3 policies are named: chat with one or two"),
        (["sft", "--json"], "add --prompt TEXT"),
        (["sft", "--temperature", "-1"], "the temperature is a number from 0 up"),
        (["sft", "--top-p", "0"], "top-p is a number above 0"),
    ],
)
def test_what_cannot_be_chatted_with_is_explained(root, monkeypatch, capsys, words, said):
    monkeypatch.chdir(root)
    assert main(["chat", *words]) == 2
    assert said in capsys.readouterr().err


class Started:
    """Stands for an engine, whose start takes seconds."""

    def __init__(self, policy, _params) -> None:
        self.policy, self.is_alive = policy, True

    def close(self) -> None:
        self.is_alive = False


def test_a_server_holds_two_engines_and_lets_idle_ones_go(root, monkeypatch):
    monkeypatch.setattr(pool, "Engine", Started)
    names = ("sft", "iter_001", "first:iter_001")
    sft, new, old = (find_policy(Repository(root), name) for name in names)
    engines = pool.Engines(Repository(root), idle_s=TIMEOUT_S)
    with engines.lent(sft) as first, engines.lent(new) as second:
        with pytest.raises(LockstepError, match="sft and iter_001 are answering just now"):
            engines.lent(old).__enter__()
        with engines.lent(sft) as same:
            assert same is first
    with engines.lent(old):
        # The one that was idle longest has made room.
        assert [first.is_alive, second.is_alive] == [True, False]
    engines.close()
    engines = pool.Engines(Repository(root), idle_s=0.5)
    with engines.lent(sft) as idle:
        pass
    with engines.lent(old) as busy:
        until(lambda: not idle.is_alive, "the idle engine ends")
        assert engines.names() == ["first:iter_001"]
        assert busy.is_alive
    engines.close()


class Answering(Started):
    """Stands for one that answers."""

    policy_hash = "of its weights"

    def answer(self, messages, options, _name):
        text = f"{self.policy.name} at {options.temperature:g}: {messages[-1]['content']}"
        yield text
        yield Answer(text, [1], 1, 1, "stop", 7)


def test_a_preference_is_between_two_answers_that_the_server_gave_to_one_conversation(
    root, monkeypatch
):
    monkeypatch.setattr(pool, "Engine", Answering)
    opened = open_clone(Repository(root))
    headers = {"X-Lockstep-Token": opened.token}
    with TestClient(create_app(opened), "http://127.0.0.1", headers=headers) as client:

        def ask(name, policy, text):
            messages = [{"role": "user", "content": text}]
            body = {"id": name, "policy": policy, "messages": messages}
            said = client.post("/api/chat/answer", json={**body, "options": {"temperature": 0.5}})
            return [json.loads(line) for line in said.text.splitlines()]

        def prefer(left, right, **more):
            body = {"left": left, "right": right, "chosen": "left", "annotator": "Ann", **more}
            answer = client.post("/api/chat/preference", json=body)
            return answer.status_code, answer.json().get("error", "")

        assert ask("answer-1", "sft", "a?")[1:] == [
            {"said": "sft at 0.5: a?"},
            {"answer": vars(Answer("sft at 0.5: a?", [1], 1, 1, "stop", 7))},
        ]
        ask("answer-2", "iter_001", "a?")
        ask("answer-3", "iter_001", "b?")
        assert "were not asked the same" in prefer("answer-1", "answer-3")[1]
        assert "does not know that answer" in prefer("answer-1", "answer-9")[1]
        assert prefer("answer-1", "answer-2", text="better")[0] == 400
        assert store.read(root).judgements == ()
        assert prefer("answer-1", "answer-2") == (200, "")
        assert "has judged pair" in prefer("answer-1", "answer-2")[1]
    [kept] = store.read(root).judgements
    assert (kept.left.policy, kept.left.text) == ("sft", "sft at 0.5: a?")
    assert (kept.left.policy_hash, kept.left.seed) == ("of its weights", 7)
    assert kept.left.sampling["temperature"] == 0.5
