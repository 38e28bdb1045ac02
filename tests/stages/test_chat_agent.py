"""Agents that drive the policy with OpenAI's own client: the episodes of an environment."""

import http.client
import json
import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from contextlib import closing

import pytest

from stages.context import StageError
from stages.contracts.episodes import EpisodeParams
from stages.data.dialogue import Dialogue
from stages.data.offered_tools import tools_hash
from stages.environments.asking import Asking
from stages.environments.chat_agent import ChatAgent
from stages.environments.chat_server import ChatServer
from stages.environments.environment import NoAnswer, Observation
from tests.stages.test_environments import ECHO, ROLLOUT, playing
from tests.waiting import TIMEOUT_S, answers, until

__all__ = ["playing"]

AGENTS = (
    ECHO
    + '''
import asyncio
import json
import time
from pathlib import Path

from openai import AsyncOpenAI, OpenAI

from stages.environments.chat_agent import ChatAgent


class Repeats(ChatAgent):
    """Echo, as an agent. It pays at the end."""

    stops = (";",)

    def run(self, base_url, row, seed):
        client = OpenAI(base_url=base_url, api_key="none")
        left, name, paid = 1 + seed % 4, str(seed % 100), 0.0
        messages = [{"role": "user", "content": row["prompt"]}]
        while left:
            left -= 1
            said = client.chat.completions.create(model="any", messages=messages).choices[0].message
            paid += 0.25 * len(said.content)
            text = f"{len(said.content) % 10}+{name}="
            messages += [said, {"role": "user", "content": text}]
        return paid


class Awaits(ChatAgent):
    stops = (";",)

    async def run(self, base_url, row, seed):
        left, name, paid = 1 + seed % 4, str(seed % 100), 0.0
        messages = [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            while left:
                left -= 1
                answer = await client.chat.completions.create(model="any", messages=messages)
                said = answer.choices[0].message.content
                paid += 0.25 * len(said)
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": f"{len(said) % 10}+{name}="},
                ]
        return paid


class Keeps(Repeats):
    """Writes down the ids that it is told, as one that trains on them would."""

    def run(self, base_url, row, seed):
        client = OpenAI(base_url=base_url, api_key="none")
        messages = [{"role": "user", "content": row["prompt"]}]
        asked = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        while True:
            told = client.chat.completions.create(model="any", messages=messages, **asked)
            [choice] = told.choices
            kept = {
                "context": told.prompt_token_ids,
                "ids": choice.token_ids,
                "logprobs": [token.logprob for token in choice.logprobs.content],
                "tokens": [token.token for token in choice.logprobs.content],
                "counts": [told.usage.prompt_tokens, told.usage.completion_tokens],
            }
            with (Path(__file__).parent / "kept.jsonl").open("a") as file:
                file.write(json.dumps(kept) + "\\n")
            if len(messages) > 2:
                return 1.0
            messages += [choice.message, {"role": "user", "content": "1+"}]


class Asks(ChatAgent):
    """Asks what the row says, once for each entry."""

    role = "tool"

    async def run(self, base_url, row, seed):
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            for request in row["extra"]["requests"]:
                await client.chat.completions.create(model="any", **request)
        return 1.0


class Together(ChatAgent):
    """Two questions at the same time."""

    async def run(self, base_url, row, seed):
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            messages = [{"role": "user", "content": row["prompt"]}]
            create = client.chat.completions.create
            asked = [create(model="any", messages=messages) for _ in range(2)]
            await asyncio.gather(*asked)
        return 1.0


class Ends(ChatAgent):
    def run(self, base_url, row, seed):
        return 1.0


class Breaks(ChatAgent):
    def run(self, base_url, row, seed):
        client = OpenAI(base_url=base_url, api_key="none")
        client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": row["prompt"]}]
        )
        raise LookupError("no such page")


class Exits(ChatAgent):
    def run(self, base_url, row, seed):
        raise SystemExit(2)


class ExitsLater(ChatAgent):
    async def run(self, base_url, row, seed):
        raise SystemExit(f"no {base_url}")


class Cancels(ChatAgent):
    async def run(self, base_url, row, seed):
        raise asyncio.CancelledError


class Sleeps(ChatAgent):
    """Asks again when nobody waits for it any more; notes what it is told."""

    def run(self, base_url, row, seed):
        client = OpenAI(base_url=base_url, api_key="none")
        messages = [{"role": "user", "content": row["prompt"]}]
        try:
            # The first may be too late already.
            client.chat.completions.create(model="any", messages=messages)
            while not (Path(__file__).parent / "given-up").exists():
                time.sleep(0.01)
            client.chat.completions.create(model="any", messages=messages)
        except Exception as error:
            (Path(__file__).parent / "told").write_text(str(error))
        return 1.0
'''
)
ROW = {"prompt_id": "p", "prompt": "1+2=", "answer": "3", "extra": {}}
QUESTION = {"role": "user", "content": "1+2="}
SAID = {"role": "assistant", "content": "hm"}
TOLD = {"role": "tool", "tool_call_id": "call_0_0", "content": "3"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def ask(tmp_path):
    """Tell an agent of this file several turns; its answers."""
    (tmp_path / "agents.py").write_text(AGENTS)

    def heard(name, turns, requests=(), extra=None, processes=0, seconds=TIMEOUT_S, prompt="1+2="):
        asking = Asking(
            EpisodeParams(answer_timeout=seconds, processes=processes), f"agents:{name}", tmp_path
        )
        row = {**ROW, "prompt": prompt, "extra": {"requests": list(requests), **(extra or {})}}
        try:
            seats = [asking.seat(row, 3)]
            said = asking.begin(seats).result()
            for turn in turns:
                if isinstance(said[-1], NoAnswer):
                    break
                said += asking.step(seats, [turn]).result()
            asking.leave(seats)
        finally:
            asking.close()
        return said

    return heard


@pytest.mark.parametrize("agent", ["Repeats", "Awaits"])
def test_an_agent_makes_the_rollouts_of_the_environment_that_it_is(playing, agent):
    """Its rewards are paid at the end, so their sums are the same; so is every other byte."""
    environment, driven = playing(), playing("agent", {"environment": f"agents:{agent}"})
    (driven.root / "environments/agents.py").write_text(AGENTS)
    environment.run(ROLLOUT)
    driven.run(ROLLOUT)
    rows, same = (run.rows("rollouts/iter_001") for run in (environment, driven))
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        # An agent that is cut returns nothing; the environment was paid for each turn.
        paid = row["environment_reward"] if row["finish_reason"] == "stop" else 0.0
        row["environment_reward"] = paid
        row["turn_rewards"] = [0.0] * (len(row["turn_ends"]) - 1) + [paid]
    assert same == rows


@pytest.mark.parametrize("processes", [0, 1])
def test_it_hears_the_policy_and_the_policy_hears_it(ask, processes):
    heard = ask("Repeats", ["four", "two", "one", "1"], processes=processes)
    texts = [Observation("4+3="), Observation("3+3="), Observation("3+3=")]
    assert heard == [Observation(), *texts, Observation("", 0.25 * 11, True)]


@pytest.mark.parametrize("processes", [0, 1])
def test_an_agent_that_keeps_ids_gets_those_that_are_trained_on(playing, processes):
    """With OpenAI's client: what the policy had read, what it sampled, and the log-probs."""
    run = playing(
        rollout={"environment": "agents:Keeps"}, episodes={"processes": processes, "concurrency": 1}
    )
    (run.root / "environments/agents.py").write_text(AGENTS)
    run.run(ROLLOUT)
    lines = (run.root / "environments/kept.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    sampled = {}
    for row in run.rows("rollouts/iter_001"):
        start = 0
        for end in row["turn_ends"]:
            # After the first turn, an observation is before it.
            start += row["loss_mask"][start:].index(1)
            context = (*row["prompt_ids"], *row["response_ids"][:start])
            ids = tuple(row["response_ids"][start : end + 1])
            sampled[context, ids] = row["logprobs"][start : end + 1]
            start = end + 1
    assert len(kept) > len(run.rows("rollouts/iter_001")) / 2
    assert any(len(told["context"]) > 8 for told in kept)
    for told in kept:
        logprobs = sampled[tuple(told["context"]), tuple(told["ids"])]
        assert told["logprobs"] == pytest.approx(logprobs, rel=1e-6)
        assert told["tokens"] == [f"token_id:{id}" for id in told["ids"]]
        assert told["counts"] == [len(told["context"]), len(told["ids"])]


def test_calls_of_tools_are_handed_over_as_such(ask):
    tools = {"tools": [ADD]}
    calls = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    called = {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [
            {
                "id": f"call_0_{number}",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1}'},
            }
            for number in range(2)
        ],
    }
    told = [{**TOLD, "content": text, "tool_call_id": f"call_0_{text}"} for text in "01"]
    requests = [
        {"messages": [QUESTION], **tools},
        {"messages": [QUESTION, called, *told], **tools},
    ]
    heard = ask("Asks", [f"I ask. {calls} {calls}", "3"], requests, {"tools": tools_hash([ADD])})
    assert heard == [Observation(), Observation("0\n1"), Observation(reward=1.0, done=True)]


def test_a_question_with_tools_of_its_own_is_asked_with_them(ask):
    prompt = Dialogue((QUESTION,), (ADD,)).text
    request = {"messages": [QUESTION], "tools": [ADD]}
    extra = {"tools": tools_hash([ADD])}
    assert prompt != QUESTION["content"]
    assert ask("Asks", ["3"], [request], extra, prompt=prompt)[-1] == Observation("", 1.0, True)


OTHER = "is not what was said before"
REFUSED = {
    "another prompt": ([{"messages": [{**QUESTION, "content": "1+3="}]}], "not the row's prompt"),
    "nothing": ([{"messages": []}], "not the row's prompt"),
    "a stream": ([{"messages": [QUESTION], "stream": True}], "`stream` True is not supported"),
    "other tokens": (
        [{"messages": [QUESTION], "logprobs": True, "top_logprobs": 2}],
        "`top_logprobs` 2 is not supported",
    ),
    "several": ([{"messages": [QUESTION], "n": 2}], "`n` 2 is not supported"),
    "tools": ([{"messages": [QUESTION], "tools": [ADD]}], "not those that the prompt offers"),
    "an image": (
        [{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}],
        "a policy reads text alone, not image_url",
    ),
    "another question": (
        [
            {"messages": [QUESTION]},
            {"messages": [{**QUESTION, "content": "2+2="}, SAID, TOLD]},
        ],
        f"message 0 of the request {OTHER}",
    ),
    "another answer": (
        [{"messages": [QUESTION]}, {"messages": [QUESTION, {**SAID, "content": "no"}, TOLD]}],
        f"message 1 of the request {OTHER}",
    ),
    "less": (
        [{"messages": [QUESTION]}, {"messages": [QUESTION]}],
        "asks the same again",
    ),
    "nothing new": ([{"messages": [QUESTION]}, {"messages": [QUESTION, SAID]}], "this one with []"),
    "another role": (
        [{"messages": [QUESTION]}, {"messages": [QUESTION, SAID, QUESTION]}],
        "role 'tool', this one with ['user']",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_the_policys_next_context_is_refused(ask, case):
    requests, why = REFUSED[case]
    heard = ask("Asks", ["hm"], requests)
    assert isinstance(heard[-1], NoAnswer)
    assert why in str(heard[-1])
    assert len(heard) == len(requests)


@pytest.mark.parametrize(
    ("agent", "turns", "why"),
    [
        ("Together", ["1"], "asks the same again"),
        ("Exits", [], "SystemExit: 2"),
        ("ExitsLater", [], "SystemExit: no the policy's address"),
        ("Cancels", [], "it was cancelled"),
        ("Ends", [], "returned before it asked the policy anything"),
        ("Breaks", ["1"], "LookupError: no such page"),
    ],
)
def test_an_agent_that_fails_fails_its_episode(ask, agent, turns, why):
    assert why in str(ask(agent, turns)[-1])


def test_an_agent_that_is_given_up_is_told_when_it_asks_again(ask, tmp_path, monkeypatch):
    server = ChatServer()
    monkeypatch.setattr(ChatAgent, "_server", server)
    other = server.open(lambda request: request.refuse("no"))  # which keeps the server there
    assert "no answer within" in str(ask("Sleeps", ["1"], seconds=1)[-1])
    (tmp_path / "given-up").touch()
    until((tmp_path / "told").exists, "it asks again")
    until(lambda: "this episode is over" in (tmp_path / "told").read_text(), "it is told")
    server.shut(other)


def test_a_stage_names_the_agents_episode(playing):
    run = playing(rollout={"environment": "agents:Breaks"})
    (run.root / "environments/agents.py").write_text(AGENTS)
    with pytest.raises(StageError, match=r"prompt .*LookupError: no such page"):
        run.run(ROLLOUT)


def test_an_address_answers_for_its_episode_alone_and_only_while_it_is_open():
    server, asked = ChatServer(), []
    one, other = server.open(asked.append), server.open(lambda request: request.refuse("no"))

    def posted(url):
        request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
        try:
            return json.load(urllib.request.urlopen(request, timeout=TIMEOUT_S))
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    assert posted(f"{other}/chat/completions") == (400, "no")
    assert asked == []
    with urllib.request.urlopen(f"{one}/models", timeout=TIMEOUT_S) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["policy"]
    server.shut(other)
    assert posted(f"{other}/chat/completions") == (410, "this episode is over")
    assert posted(f"{one}/embeddings")[0] == 404
    guessed = re.sub(r"/[^/]+/v1", "/guess/v1", one)
    assert posted(f"{guessed}/chat/completions")[0] == 410
    server.shut(one)
    until(lambda: not answers(f"{one}/models"), "the server has ended")
    again = server.open(lambda request: request.refuse("no"))
    assert posted(f"{again}/chat/completions") == (400, "no")
    server.shut(again)


def test_a_client_that_goes_away_is_no_news(capfd):
    """Between two requests of a connection, and before it is answered."""
    server, asked = ChatServer(), []
    address = server.open(asked.append)
    port, path = re.fullmatch(r"http://127.0.0.1:(\d+)(.*)", address).groups()
    others = set(threading.enumerate())

    def gone():
        return not any("request" in each.name for each in set(threading.enumerate()) - others)

    for method, what in (("GET", "models"), ("POST", "chat/completions")):
        with closing(http.client.HTTPConnection("127.0.0.1", int(port))) as client:
            client.request(method, f"{path}/{what}", "{}")
            if method == "GET":
                assert client.getresponse().read()
            else:
                until(lambda: asked, "it is asked")
            # As where a process is killed: what is sent to it comes back.
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for each in asked:
            each.refuse("no")
        until(gone, "nobody waits for it any more")
    server.shut(address)
    assert capfd.readouterr().err == ""
