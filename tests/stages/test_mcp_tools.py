"""Tools of real MCP servers: sessions, calls side by side, failures, and the prompts' tools."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mcp.client.stdio  # noqa: F401  (here: it keeps the stderr that it is first imported with)
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.contracts.episodes import EpisodeParams
from stages.data.offered_tools import tools_hash
from stages.data.tokenizer import build_character_tokenizer
from stages.engines.models.lean_transformers import hidden
from stages.environments import list_tools
from stages.environments.asking import Asking
from stages.environments.environment import NoAnswer, Observation
from tests import waiting
from tests.data.test_rendering import LETTERS
from tests.ports import free_port

SERVER = Path(__file__).with_name("mcp_server.py")
TOKEN = "a-secret-of-the-tests"
NAMES = ["add", "count", "die", "draw", "environment", "hang", "meet", "refuse"]
STDIO = "    command = (sys.executable, 'server.py')\n    env = ('TESTS_TOKEN',)\n"
HTTP = (
    "    url = 'http://127.0.0.1:{port}/mcp'\n"
    "    headers = {{'Authorization': 'Bearer ${{{name}}}'}}\n"
)
AT_ONCE = 150
"""More than an HTTP client allows by default."""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_module(folder: Path, server: str, more: str = "") -> None:
    (folder / "own.py").write_text(
        "import sys\n\nfrom stages.environments.mcp_tools import McpTools\n\n\n"
        f"class Own(McpTools):\n{server}    listed = False\n{more}"
    )


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_TOKEN", TOKEN)


@pytest.fixture
def stdio(tmp_path: Path) -> str:
    shutil.copy(SERVER, tmp_path / "server.py")
    return STDIO


@pytest.fixture
def port():
    number = free_port()
    process = started(number)
    yield number
    process.kill()
    process.wait()


def started(port: int) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, SERVER, str(port)])
    waiting.until(lambda: listens(port), "the MCP server listens", at_work=process)
    return process


def listens(port: int) -> bool:
    return any(each.laddr.port == port for each in psutil.net_connections("tcp") if not each.raddr)


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> str:
    if request.param == "stdio":
        return request.getfixturevalue("stdio")
    return HTTP.format(port=request.getfixturevalue("port"), name="TESTS_TOKEN")


class Episodes:
    """Some that begin together, each with its answer to the row."""

    def __init__(self, folder: Path, num: int = 1, extra: dict | None = None, **params) -> None:
        self.asking = Asking(EpisodeParams(**params), "own:Own", folder)
        row = {"prompt_id": "p", "prompt": "1+2?", "answer": " 3", "extra": extra or {}}
        self.seats = [self.asking.seat(row, 0) for _ in range(num)]

    def __enter__(self) -> "Episodes":
        self.begun = self.asking.begin(self.seats).result()
        return self

    def __exit__(self, *_) -> None:
        self.asking.leave(self.seats)
        self.asking.close()

    def say(self, *actions: str) -> list:
        return self.asking.step(self.seats, actions).result()


def test_a_turn_with_calls_is_answered_and_one_without_is_the_answer(server, tmp_path):
    write_module(tmp_path, server)
    with Episodes(tmp_path) as episodes:
        assert episodes.begun == [Observation()]
        both = f"<think>{call('die')}</think>{call('add', a=1, b=2)} {call('add', a=5, b=2)}"
        assert episodes.say(both) == [Observation("3\n7")]
        [wrong] = episodes.say(call("add", a="x"))
        assert wrong.text.startswith("error: ")
        assert "add" in wrong.text
        [wrong] = episodes.say(call("subtract"))
        assert wrong.text == f"error: there is no such tool, only {', '.join(NAMES)}"
        assert episodes.say("<think>so 4? no</think>\n3\n") == [Observation(reward=1.0, done=True)]
        assert episodes.say("4") == [Observation(reward=0.0, done=True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["own.py", *(["server.py"] if "command" in server else [])]
    )


@waiting.must_not_wait
def test_the_calls_of_many_episodes_are_under_way_at_the_same_time(server, tmp_path):
    write_module(tmp_path, server)
    with Episodes(tmp_path, AT_ONCE) as episodes:
        answers = episodes.say(*[call("meet", number=AT_ONCE)] * AT_ONCE)
    assert answers == [Observation(f"{AT_ONCE} are here")] * AT_ONCE


@pytest.mark.parametrize("own", [False, True])
def test_episodes_share_a_server_unless_it_has_state(own, stdio, tmp_path):
    write_module(tmp_path, stdio, f"    session_per_episode = {own}\n")
    before = psutil.Process().children()
    with Episodes(tmp_path, 3) as episodes:
        assert len([p for p in psutil.Process().children() if p not in before]) == (3 if own else 1)
        counts = sorted(answer.text for answer in episodes.say(*[call("count")] * 3))
        assert counts == (["1", "1", "1"] if own else ["1", "2", "3"])
    assert not [p for p in psutil.Process().children() if p not in before]


def test_a_session_of_an_episode_that_fails_is_closed(stdio, tmp_path):
    write_module(tmp_path, stdio, "    session_per_episode = True\n")
    before = psutil.Process().children()

    def servers():
        return [each for each in psutil.Process().children() if each not in before]

    with Episodes(tmp_path, 3) as episodes:
        assert len(servers()) == 3
        episodes.asking._params = EpisodeParams(answer_timeout=20)
        died = tmp_path.parent / f"{tmp_path.name}-died"
        [_, _, other] = episodes.say(call("die", file=str(died)), call("hang"), call("count"))
        assert other == Observation("1")
        waiting.until(lambda: len(servers()) == 1, "the servers of failed episodes are gone")
        assert episodes.seats[2].environment is not None
    write_module(tmp_path, stdio, "    session_per_episode = True\n    listed = True\n")
    with Episodes(tmp_path, 2) as episodes:
        assert all("rendered with other tools" in str(answer) for answer in episodes.begun)
        waiting.until(lambda: not servers(), "the servers of failed episodes are gone")


def test_an_episode_of_a_server_with_state_has_a_session_over_http(port, tmp_path):
    server = HTTP.format(port=port, name="TESTS_TOKEN")
    write_module(tmp_path, server, "    session_per_episode = True\n")
    with Episodes(tmp_path, 3) as episodes:
        assert episodes.say(*[call("add", a=1, b=1)] * 3) == [Observation("2")] * 3


def test_a_tools_error_is_told_to_the_policy_without_the_secret(server, tmp_path):
    write_module(tmp_path, server)
    with Episodes(tmp_path) as episodes:
        [answer] = episodes.say(call("refuse"))
    assert answer.text.startswith("error: ")
    assert "not with ${TESTS_TOKEN}" in answer.text


def test_a_command_gets_the_variables_that_are_named_and_no_other(stdio, tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", "another")
    write_module(tmp_path, stdio)
    with Episodes(tmp_path) as episodes:
        [answer] = episodes.say(call("environment"))
    assert {"PATH", "TESTS_TOKEN"} <= {*answer.text.split()}
    assert "OTHER_TOKEN" not in answer.text.split()


def test_what_is_no_text_fails_and_says_so(server, tmp_path):
    write_module(tmp_path, server)
    with Episodes(tmp_path) as episodes:
        [answer] = episodes.say(call("draw"))
    assert isinstance(answer, NoAnswer)
    assert "its tool draw answered with content of type image" in str(answer)


def test_a_tool_that_is_late_fails_its_own_episode_alone(server, tmp_path):
    write_module(tmp_path, server)
    with Episodes(tmp_path, 2) as episodes:
        assert episodes.begun == [Observation()] * 2
        episodes.asking._params = EpisodeParams(answer_timeout=12)
        late, other = episodes.say(call("hang"), call("add", a=1, b=2))
        assert "no answer within episodes.answer_timeout 12 seconds" in str(late)
        assert other == Observation("3")


def test_a_server_that_dies_is_named_and_a_retry_starts_another(stdio, tmp_path):
    write_module(tmp_path, stdio)
    for retries in (0, 1):
        flag = tmp_path.parent / f"{tmp_path.name}-died-{retries}"
        with Episodes(tmp_path, 2, retries=retries, backoff=0) as episodes:
            first, second = episodes.say(call("die", file=str(flag)), call("add", a=1, b=2))
            if retries:
                assert [first, second] == [Observation("alive"), Observation("3")]
            else:
                assert f"MCP server {sys.executable} server.py: " in str(first)
                assert "the log of the stage" in str(first)
                again = episodes.say(*[call("add", a=2, b=2)] * 2)
                assert again[1] == Observation("4"), "another server for the other episode"


def test_a_server_that_is_restarted_is_found_again(tmp_path):
    port = free_port()
    write_module(tmp_path, HTTP.format(port=port, name="TESTS_TOKEN"))
    process = started(port)
    with Episodes(tmp_path, retries=0) as episodes:
        assert episodes.say(call("add", a=1, b=2)) == [Observation("3")]
        process.kill()
        process.wait()
        [gone] = episodes.say(call("add", a=1, b=2))
        assert f"MCP server http://127.0.0.1:{port}/mcp: " in str(gone)
        process = started(port)
        assert episodes.say(call("add", a=1, b=2)) == [Observation("3")]
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("    command = ('no-such-program', 'x')\n", ["MCP server no-such-program x: "]),
        ("    command = (sys.executable, '-c', 'exit(7)')\n", ["-c exit(7): "]),
        ("    url = 'http://127.0.0.1:9/${TESTS_TOKEN}'\n", ["http://127.0.0.1:9/${TESTS_TOKEN}"]),
        (
            "    url = 'http://127.0.0.1:9/${NO_SUCH}'\n",
            ["variable NO_SUCH is not set"],
        ),
        ("    command = ('x',)\n    env = ('NO_SUCH',)\n", ["variable NO_SUCH is not set"]),
        ("", ["either a `command` or a `url`"]),
        (STDIO + "    tools = ('add', 'fly')\n", ["has no tool fly"]),
    ],
)
@waiting.must_not_wait
@pytest.mark.usefixtures("stdio")
def test_a_server_that_cannot_be_reached_is_named(server, says, tmp_path):
    write_module(tmp_path, server)
    with Episodes(tmp_path) as episodes:
        problem = str(episodes.begun[0])
    assert all(words in problem for words in says)
    assert TOKEN not in problem


def test_a_server_that_refuses_is_named_without_the_token(port, tmp_path, monkeypatch):
    monkeypatch.setenv("WRONG_TOKEN", "another-secret")
    write_module(tmp_path, HTTP.format(port=port, name="WRONG_TOKEN"))
    with Episodes(tmp_path) as episodes:
        problem = str(episodes.begun[0])
    assert f"MCP server http://127.0.0.1:{port}/mcp: " in problem
    assert "401" in problem
    assert "another-secret" not in problem


def test_environments_in_processes_have_servers_of_their_own(stdio, tmp_path):
    write_module(tmp_path, stdio)
    with Episodes(tmp_path, 4, processes=2) as episodes:
        assert episodes.begun == [Observation()] * 4
        counts = sorted(answer.text for answer in episodes.say(*[call("count")] * 4))
        assert counts == ["1", "1", "2", "2"]


def test_the_reward_may_be_the_users_own_and_async(stdio, tmp_path):
    more = "    async def reward(self, row, answer):\n        return 0.25 * len(answer)\n"
    write_module(tmp_path, stdio, f"    longest = 2\n{more}")
    with Episodes(tmp_path) as episodes:
        assert episodes.say(call("add", a=100, b=23)) == [Observation("12")]
        assert episodes.say("four") == [Observation(reward=1.0, done=True)]


def test_a_server_whose_tools_are_not_the_prompts_is_refused(stdio, tmp_path, capfd):
    write_module(tmp_path, stdio, "    listed = True\n    tools = ('add', 'count')\n")
    file = tmp_path / "own.tools.json"
    assert list_tools.main(["own:Own", str(file), "--environments", str(tmp_path)]) == 0
    assert "add, count" in capfd.readouterr().out
    tools = json.loads(file.read_text())
    assert [tool["function"]["name"] for tool in tools] == ["add", "count"]
    assert tools[0]["function"]["description"] == "The sum of two numbers."
    assert {*tools[0]["function"]["parameters"]["properties"]} == {"a", "b"}
    with Episodes(tmp_path, extra={"tools": tools_hash(tools)}) as episodes:
        assert episodes.begun == [Observation()]
    tools[0]["function"]["description"] = "Another."
    for extra in ({}, {"tools": tools_hash(tools)}):
        with Episodes(tmp_path, extra=extra) as episodes:
            problem = str(episodes.begun[0])
        assert "python -m stages.environments.list_tools" in problem
        assert "add, count" in problem


def test_a_file_of_tools_of_a_server_that_is_not_there_is_not_written(tmp_path, capfd):
    write_module(tmp_path, "    command = ('no-such-program',)\n")
    file = tmp_path / "own.tools.json"
    assert list_tools.main(["own:Own", str(file), "--environments", str(tmp_path)]) == 1
    assert "no-such-program" in capfd.readouterr().err
    assert not file.exists()


def test_without_the_package_the_error_says_what_to_install(tmp_path):
    """In an interpreter that does not find it."""
    program = (
        "import sys; sys.modules['mcp'] = None\n"
        "from pathlib import Path\nfrom stages.environments.loading import find\n"
        f"find('own:Own', Path({str(tmp_path)!r}))"
    )
    write_module(tmp_path, STDIO)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "mcp is not installed: pip install -c constraints.txt -e '.[tools]'" in done.stderr


QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{{ eos_token }}\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ eos_token }}\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Tools in a system message, and results in a user's, as the templates of Qwen have them."""


@pytest.mark.slow
def test_a_policy_calls_the_tools_that_its_prompts_list(runner):
    """From prepare to a rollout: a policy that was taught a call reads the result and says it."""
    asks = [{"role": "user", "content": "3?"}]
    says = [
        {"role": "assistant", "content": call("add", a=1, b=2)},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    rows = [{"messages": [*asks, *says], "answer": "3", "line": number} for number in range(2)]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 2}
    run = runner(
        model={"source": "folder", "max_length": 600},
        prepare={"source": "files", "tools": "own.tools.json", "duplicates": "keep", "held_out": 0},
        sft={"epochs": 80, "batch_size": 2, "learning_rate": 5e-3},
        rollout={
            "environment": "own:Own", "prompts": 1, "samples": 4, "max_new_tokens": 120,
            "temperature": 0.2, "max_observation_tokens": 90, "max_turns": 2, "batch_size": 4,
        },
        rl={"reward": "game"},
        rewards={"game": {"kind": "environment"}},
    )  # fmt: skip
    save_model(run.root / "models", sizes)
    (run.root / "data/demonstrations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (run.root / "data/prompts.jsonl").write_text('{"prompt": "3?", "answer": "3"}\n')
    (run.root / "data/held_out.jsonl").write_text('{"prompt": "4?", "answer": "4"}\n')
    folder = run.root / "environments"
    shutil.copy(SERVER, folder / "server.py")
    write_module(folder, STDIO, "    listed = True\n    tools = ('add',)\n")
    file = run.root / "data/own.tools.json"
    assert list_tools.main(["own:Own", str(file), "--environments", str(folder)]) == 0
    run.run("prepare")
    run.run("sft")
    metrics = run.run("rollout@iter_001")
    assert metrics["episodes_failed"] == 0
    responses = [row["response"] for row in run.rows("rollouts/iter_001")]
    assert metrics["environment_reward"] == 1.0, responses
    assert metrics["turns"] == 2, responses


def save_model(folder: Path, sizes: dict) -> None:
    tokenizer = build_character_tokenizer([LETTERS])
    tokenizer.chat_template = QWEN
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        max_position_embeddings=600,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    torch.manual_seed(0)
    with hidden(("deepspeed",)):  # see save_model of the stages
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
