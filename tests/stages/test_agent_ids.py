"""Agents that keep ids, or texts, and drive the policy with OpenAI's own client and as of vLLM."""

import json

import pytest

from stages.context import StageError
from stages.contracts.episodes import EpisodeParams
from stages.data.segments import pieces_of
from stages.data.tokenizer import Decoder
from stages.engines.models import resident
from stages.environments.asking import Asking
from stages.environments.environment import NoAnswer, Observation
from stages.environments.spoken import Sampled, Spoken
from stages.environments.turns import read_turns
from tests.stages.test_elision import playing as playing_long
from tests.stages.test_environments import ECHO, ROLLOUT, playing
from tests.stages.test_tool_record import fused, hand_over, made
from tests.waiting import TIMEOUT_S

__all__ = ["playing", "playing_long"]

AGENTS = (
    ECHO
    + '''
import json
import uuid
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from stages.environments.chat_agent import ChatAgent
from stages.environments.openai_clients import client as openai_client

HERE = Path(__file__).parent


def as_ids(text, turn):
    """What follows a turn: after a stop the text, else a message of its own."""
    words = json.loads((HERE / "words.json").read_text())
    own = [words["ids"][character] for character in text]
    return own if turn[-1] in words["stops"] else [*words["before"], *own, *words["after"]]


def posted(base_url, path, body):
    request = Request(f"{base_url}/{path}", json.dumps(body).encode())
    with urlopen(request, timeout=900) as answer:
        return json.load(answer)


class Ids(ChatAgent):
    """Echo, as an agent that keeps ids. It pays at the end, and writes down what it was told."""

    stops = (";",)

    def run(self, base_url, row, seed):
        self.client = openai_client(base_url)
        left, name, paid = 1 + seed % 4, str(seed % 100), 0.0
        self.row, self.ids, told = row, list(row["prompt_ids"]), []
        while left:
            left -= 1
            text, turn, logprobs = self.ask()
            paid += 0.25 * len(text)
            new = as_ids(f"{len(text) % 10}+{name}=", turn)
            told.append([turn, logprobs, new if left else []])
            self.ids += turn + new
        kept = {"prompt": row["prompt_id"], "prompt_ids": row["prompt_ids"], "turns": told}
        (HERE / f"kept-{uuid.uuid4()}.json").write_text(json.dumps(kept))
        return paid

    def ask(self):
        told = self.client.completions.create(
            model="any", prompt=self.ids, logprobs=0, extra_body={"return_token_ids": True}
        )
        [choice] = told.choices
        assert choice.prompt_token_ids == self.ids
        assert told.usage.prompt_tokens == len(self.ids)
        assert choice.logprobs.tokens == [f"token_id:{id}" for id in choice.token_ids]
        return choice.text, choice.token_ids, choice.logprobs.token_logprobs


class Generates(Ids):
    """By the route of vLLM that has no text at all."""

    def ask(self):
        words = json.loads((HERE / "words.json").read_text())
        body = {"token_ids": self.ids, "sampling_params": {"logprobs": 1, "max_tokens": 9}}
        base = str(self.client.base_url).rstrip("/").removesuffix("/v1")
        told = posted(base, "inference/v1/generate", body)
        [choice] = told["choices"]
        characters = {id: character for character, id in words["ids"].items()}
        text = "".join(characters.get(id, "") for id in choice["token_ids"])
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return text, choice["token_ids"], logprobs


class Mixes(Ids):
    """Begins with a message, and goes on with the ids that it is told."""

    def ask(self):
        if len(self.ids) > len(self.row["prompt_ids"]):
            return super().ask()
        told = self.client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": self.row["prompt"]}],
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        [choice] = told.choices
        logprobs = [token.logprob for token in choice.logprobs.content]
        return choice.message.content, choice.token_ids, logprobs


class Texts(ChatAgent):
    """Echo, as an agent that asks for completions of a text that grows."""

    stops = (";",)

    def run(self, base_url, row, seed):
        client = openai_client(base_url)
        left, name, paid, prompt = 1 + seed % 4, str(seed % 100), 0.0, row["prompt"]
        while left:
            left -= 1
            said = client.completions.create(model="any", prompt=prompt).choices[0].text
            paid += 0.25 * len(said)
            prompt += said + f"{len(said) % 10}+{name}="
        return paid


class Whole(ChatAgent):
    """Says a lot to the policy, as ids after all that was said so far."""

    stops = tuple("13579")
    keeps_whole = True

    def run(self, base_url, row, seed):
        client = openai_client(base_url)
        ids = row["prompt_ids"]
        for _ in range(4 + seed % 5):
            told = client.completions.create(
                model="any", prompt=ids, extra_body={"return_token_ids": True}
            )
            [choice] = told.choices
            before = ids if self.keeps_whole else choice.prompt_token_ids
            ids = before + choice.token_ids + as_ids("02468024", choice.token_ids)
        return 1.0


class AsRead(Whole):
    """The same, after what the policy has read."""

    keeps_whole = False


class Posts(ChatAgent):
    """Posts what the row says."""

    def run(self, base_url, row, seed):
        for path, body in row["extra"]["requests"]:
            try:
                posted(base_url.removesuffix("/v1"), path, body)
            except HTTPError as error:
                raise LookupError(json.load(error)["error"]["message"])
        return 1.0
'''
)
SILENT = "def run(self, base_url, row, seed):\n        raise LookupError('nobody is to ask')\n"


def with_agents(run, source=AGENTS, stops=";"):
    """The run, with what its agents need to speak in ids."""
    policy = run.root / "artifacts/policies/sft/model"
    turns = read_turns(policy, "user", stops)
    ids = {word: id for word, id in Decoder(policy).vocabulary().items() if len(word) == 1}
    words = {"ids": ids, "stops": turns.stop_ids, "before": turns.before, "after": turns.after}
    (run.root / "environments/words.json").write_text(json.dumps(words))
    (run.root / "environments/agents.py").write_text(source)
    return run


def episodes_kept(run):
    """What each agent that came to its end was told: masks and log-probs by hand."""
    kept = []
    for path in (run.root / "environments").glob("kept-*.json"):
        episode = json.loads(path.read_text())
        row = {"prompt_ids": episode["prompt_ids"], "response_ids": [], "loss_mask": []}
        row["logprobs"] = []
        for turn, logprobs, new in episode["turns"]:
            row["response_ids"] += turn + new
            row["loss_mask"] += [1] * len(turn) + [0] * len(new)
            row["logprobs"] += logprobs + [0.0] * len(new)
        kept.append(row)
    return kept


def key(row):
    """Of a row, with log-probs as its file has them."""
    lists = [row[name] for name in ("prompt_ids", "response_ids", "loss_mask")]
    return (*map(tuple, lists), tuple(round(x, 4) for x in row["logprobs"]))


def test_ids_and_texts_make_the_rollouts_of_the_environment_that_they_are(playing):
    """Every byte but where rewards are paid; and masks and log-probs are those that agents had."""
    environment = playing()
    environment.run(ROLLOUT)
    rows = environment.rows("rollouts/iter_001")
    assert any(len(row["turn_ends"]) > 1 for row in rows)
    for row in rows:
        # An agent that is cut returns nothing; the environment was paid for each turn.
        paid = row["environment_reward"] if row["finish_reason"] == "stop" else 0.0
        row["environment_reward"] = paid
        row["turn_rewards"] = [0.0] * (len(row["turn_ends"]) - 1) + [paid]
    over = sorted(key(row) for row in rows if row["finish_reason"] == "stop")
    cases = [("Ids", 0), ("Ids", 1), ("Generates", 0), ("Mixes", 0), ("Texts", 0)]
    for agent, processes in cases:
        name = f"{agent}-{processes}"
        changes = {"episodes": {"processes": processes}}
        run = with_agents(playing(name, {"environment": f"agents:{agent}"}, **changes))
        run.run(ROLLOUT)
        assert run.rows("rollouts/iter_001") == rows, name
        if agent != "Texts":
            assert sorted(map(key, episodes_kept(run))) == over, name


def in_a_session(run, *names):
    """Iterations, in a process that keeps its models from stage to stage."""
    resident.switch_on()
    try:
        for name in names:
            for stage in ("rollout", "score", "policy_update"):
                inputs, outs = run.paths(f"{stage}@{name}")
                with resident.among({path: str(path) for path in inputs.values()}):
                    run.run(f"{stage}@{name}")
                    resident.keep({path: str(path) for path in outs.values()})
        assert resident.names()
    finally:
        resident.switch_off()


def test_fused_steps_learn_from_ids_what_a_session_does_that_replays_them(playing):
    """With no agent to ask: what it inserted comes from the record, as ids."""
    first = with_agents(playing("first", {"environment": "agents:Ids"}, rl=fused()))
    first.run("online@fast")
    told = [row for row in first.rows("tool_answers/fast") if row["ids"] is not None]
    decoder = Decoder(first.root / "artifacts/policies/sft/model")
    assert told
    assert all(row["text"] == decoder.text(row["ids"]) for row in told)
    silent = AGENTS[: AGENTS.index("def run(")] + SILENT
    again = playing("again", {"environment": "agents:Ids", "tools": "replay"}, rl=fused())
    with_agents(again, silent)
    hand_over(first, again)
    in_a_session(again, "fast_001", "fast_002")
    for step in (1, 2):
        for name in ("rollouts", "tool_answers"):
            together = [row for row in first.rows(f"{name}/fast") if row.pop("step") == step]
            assert again.rows(f"{name}/fast_00{step}") == together
    policies = (first.root / "artifacts/policies/fast", again.root / "artifacts/policies/fast_002")
    assert len({str(first.contents(path / "model")) for path in policies}) == 1
    again.run("online@fast")
    names = ("rollouts/fast.parquet", "tool_answers/fast.parquet", "policies/fast/model")
    assert made(again, *names) == made(first, *names)


def test_ids_go_on_after_what_was_elided_or_after_all_of_it(playing_long):
    """Whichever of the two the agent keeps, the policy reads the same."""
    rows = {}
    for agent in ("Whole", "AsRead"):
        run = playing_long(agent, rollout={"environment": f"agents:{agent}"})
        with_agents(run, stops="13579").run(ROLLOUT)
        rows[agent] = run.rows("rollouts/iter_001")
    assert rows["Whole"] == rows["AsRead"]
    assert max(len(pieces_of(row)) for row in rows["Whole"]) > 2


PROMPT, TURN = [1, 5, 6], [7, 2]
FIRST = ["v1/completions", {"prompt": PROMPT}]
CHAT = ["v1/chat/completions", {"messages": [{"role": "user", "content": "1+2="}]}]


def ids(*new, before=(*PROMPT, *TURN)):
    return ["v1/completions", {"prompt": [*before, *new]}]


def text(prompt, **more):
    return ["v1/completions", {"prompt": prompt, **more}]


REFUSED = {
    "another prompt": ([ids(before=[1, 5])], "are not those of the row's prompt, from place 2 on"),
    "no ids": ([text([1, "a"])], "a prompt is a text or a list of ids"),
    "nothing": ([text(None)], "a prompt is a text or a list of ids"),
    "no object": ([["v1/completions", [1]]], "a request is an object of JSON"),
    "several prompts": ([text([PROMPT, PROMPT])], "one prompt, not 2"),
    "several answers": ([text(PROMPT, n=2)], "`n` 2 is not supported"),
    "the prompt again": ([text(PROMPT, echo=True)], "`echo` True is not supported"),
    "other tokens": ([text(PROMPT, logprobs=5)], "`logprobs` 5 is not supported"),
    "other tokens of vLLM": (
        [["inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"logprobs": 5}}]],
        "`logprobs` 5 is not supported",
    ),
    "what was read is changed": (
        [FIRST, ids(8, before=[1, 9, 6, 7, 2])],
        "id 1 of the request is 9, and the policy had read 5 there",
    ),
    "what was sampled is changed": (
        [FIRST, ids(8, before=[*PROMPT, 8, 2])],
        "id 3 of the request is 8, and the policy sampled 7 there",
    ),
    "the end token is left out": (
        [FIRST, ids(8, before=[*PROMPT, 7])],
        "id 4 of the request is 8, and the policy sampled 2 there",
    ),
    "the answer is left out": (
        [FIRST, ids(before=[*PROMPT, 7])],
        "id 4 of the request is left out, and the policy sampled 2 there",
    ),
    "the same": ([FIRST, FIRST], "asks the same again"),
    "nothing new": ([FIRST, ids()], "nothing new for the policy to read"),
    "no such token": ([FIRST, ids(4096)], "the policy's tokenizer has no token 4096"),
    "no such number": ([FIRST, ids(-1)], "the policy's tokenizer has no token -1"),
    "a message": ([FIRST, CHAT], "goes on in another way than it has begun"),
    "another text": ([text("1+3=")], "the agent's first prompt is not the row's '1+2='"),
    "the same text": ([text("1+2="), text("1+2=")], "asks the same again"),
    "no more text": ([text("1+2="), text("1+2=hm")], "nothing new for the policy to read"),
    "text that was changed": (
        [text("1+2="), text("1+2=ho 4+4=")],
        "from character 5 on the prompt is not what was said before, 'm'",
    ),
}


@pytest.fixture
def heard(tmp_path, trained):
    """What an environment says to turns of the policy, to an agent that posts these."""
    (tmp_path / "agents.py").write_text(AGENTS)
    decoder = Decoder(trained.root / "artifacts/policies/sft/model")

    def play(requests):
        row = {"prompt_id": "p", "prompt": "1+2=", "prompt_ids": PROMPT, "answer": "3"}
        params = EpisodeParams(answer_timeout=TIMEOUT_S)
        asking = Asking(params, "agents:Posts", tmp_path, text_of=decoder.known_text)
        try:
            seats = [asking.seat({**row, "extra": {"requests": requests}}, 3)]
            said = asking.begin(seats).result()
            while len(said) <= len(requests) and not isinstance(said[-1], NoAnswer):
                turn = Sampled(PROMPT, TURN, [-0.5, -0.25], 0, 2)
                said += asking.step(seats, [Spoken.of("hm", turn)]).result()
            asking.leave(seats)
        finally:
            asking.close()
        return said

    return play


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_the_policys_next_context_is_refused(heard, case):
    requests, why = REFUSED[case]
    said = heard(requests)
    assert isinstance(said[-1], NoAnswer)
    assert why in str(said[-1])
    assert len(said) == len(requests)


def test_what_is_asked_in_any_of_the_ways_is_the_same(heard):
    """One prompt in a list is one prompt; texts may follow texts, and ids any."""
    over = Observation(reward=1.0, done=True)
    new = Observation("", ids=(7,))
    for first in (FIRST, text([PROMPT]), text("1+2="), text(["1+2="]), CHAT):
        [begun, after, end] = heard([first, ids(7)])
        assert (begun, after.ids, end) == (Observation(), new.ids, over)
    assert heard([text("1+2="), text("1+2=hm4+4=")])[1] == Observation("4+4=")


def test_too_many_ids_fail_their_episode_and_none_is_cut(playing):
    episodes = {"long_observation": "cut"}
    rollout = {"environment": "agents:Ids", "max_observation_tokens": 3}
    run = with_agents(playing("run", rollout, episodes=episodes))
    with pytest.raises(StageError, match=r"its answer is \d+ ids, more than .* 3"):
        run.run(ROLLOUT)
