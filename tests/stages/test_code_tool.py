"""The environment `python`: what is a call and what an answer, what the policy reads, and that an
episode is a function of (row, seed, actions) whatever happens to its interpreter."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.contracts.episodes import EpisodeParams
from stages.contracts.rollout import RolloutParams
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.environments.asking import Asking
from stages.environments.environment import NoAnswer, Observation
from stages.environments.episodes import open_arena
from stages.environments.python import Python, shown
from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.values import IsolationKind, Limits
from tests.episodes import play_all
from tests.sandbox.attack import below
from tests.sandbox.test_sandbox import NO_ISOLATION

ROOT = Path(__file__).resolve().parents[2]
ROW = {"prompt_id": "p", "prompt": "What is 12 + 34?", "answer": "46", "extra": {}}
isolated = pytest.mark.skipif(isolation().kind is IsolationKind.NONE, reason=isolation().detail)


def call(code: str) -> str:
    return f"Let me see.\n```python\n{code}\n```"


class Quick(Python):
    limits = Limits(cpu_s=1, wall_s=60, memory_mb=128, output_kb=4)


class Short(Python):
    limits = Limits(wall_s=10)


@pytest.fixture
def begun() -> Iterator[Callable[..., Python]]:
    tools: list[Python] = []

    def begin(kind: type[Python] = Python, seed: int = 7, answer: str = "46") -> Python:
        tools.append(kind())
        tools[-1].reset({**ROW, "answer": answer}, seed)
        return tools[-1]

    yield begin
    for tool in tools:
        tool.close()


@isolated
def test_an_episode_computes_and_answers(begun: Callable[..., Python]) -> None:
    tool = begun()
    assert tool.step(call("x = 12 + 34\nprint('so')\nx")) == Observation("so\n46")
    assert tool.step(call("x - 'a'")) == Observation(
        "TypeError: unsupported operand type(s) for -: 'int' and 'str'"
    )
    assert tool.step(call("open('f.py', 'w').write('y = 1')\nimport f\nf.y + x")) == Observation(
        "47"
    )
    assert tool.step(call("y = 2")) == Observation("(no output)")
    assert tool.step("It is 46.") == Observation(reward=1.0, done=True)


@isolated
@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ("```python\n6*7\n```", "42"),
        ("thinking\n```py\n6*7\n```\n \n", "42"),
        ("``` Python3 \n6*7\n```", "42"),
        ("```python\n1\n```\nno:\n```python\n6*7\n```", "42"),
        ("```python\nx = 'a ``` b'\n6*7\n```", "42"),
        ("```python\n```", "(no output)"),
        ("```python\nx = '''\n```\n'''\n6*7\n```", None),
        ("```\n6*7\n```", None),
        ("```sh\n6*7\n```", None),
        ("```python\n6*7\n```\nis 42", None),
        ("```python\n6*7", None),
        ("```python\n6*7```", None),
        ("see ```python\n6*7\n```", None),
        ("", None),
    ],
)
def test_a_turn_that_ends_with_a_block_of_python_is_a_call(
    begun: Callable[..., Python], turn: str, text: str | None
) -> None:
    observed = begun().step(turn)
    assert observed == (Observation(done=True) if text is None else Observation(text))


@isolated
@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        ("46", "46", 1),
        (r"I get \boxed{46}, not 47", "46", 1),
        ("12 and 34 make 46.", "46", 1),
        ("#### 1,234", "so it is\n#### 1234", 1),
        ("$46.00", "46", 1),
        ("\u22125", "-5", 1),
        ("Paris", "Paris", 1),
        ("46 or 47", "46", 0),
        (r"\boxed{47}: 46", "46", 0),
        ("It is Paris since 508", "Paris", 0),
        ("no idea", "46", 0),
        ("", "46", 0),
        (r"\boxed{9**9**9**9**9}", "46", 0),
    ],
)
def test_any_other_turn_is_the_answer(
    begun: Callable[..., Python], said: str, answer: str, reward: int
) -> None:
    assert begun(answer=answer).step(said) == Observation(reward=float(reward), done=True)


def test_a_row_without_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="no `answer`"):
        Python().reset({**ROW, "answer": None}, 0)


def test_an_observation_is_no_longer_than_it_may_be() -> None:
    assert shown("x" * 40 + "\n", 40) == "x" * 40
    assert shown("a" * 50 + "b" * 50, 25) == "a" * 10 + "\n...\n" + "b" * 10
    # A tokenizer has a token for each byte, at worst.
    assert shown("\N{ROCKET}" * 100, 25) == "\N{ROCKET}" * 2 + "\n...\n" + "\N{ROCKET}" * 2
    assert len(shown("\N{ROCKET}" * 20, 25).encode()) <= 25
    assert shown("<f at 0x7f12ab>, 0x7f12ab", 99) == "<f at 0x...>, 0x7f12ab"
    assert shown("<bound f of <F object at 0x7f>>", 99) == "<bound f of <F object at 0x...>>"
    assert shown("found at 0x7f", 99) == "found at 0x7f"


@isolated
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "it took more than 1 seconds of CPU time"),
        ("import time; time.sleep(60)", "it took more than 10 seconds"),
        ("print('x' * 9999)", "it printed more than 4 kB"),
        ("import os; os._exit(0)", "it exited"),
        ("import os; os.kill(os.getpid(), 9)", "it exited"),
    ],
)
def test_a_call_that_ends_its_interpreter_is_told_and_the_next_has_a_new_one(
    begun: Callable[..., Python], code: str, why: str
) -> None:
    tool = begun(Short if "sleep" in code else Quick)
    tool.step(call("import random\nx = random.random()\nopen('f', 'w').close()"))
    lost = Observation(f"The interpreter was ended: {why}. Variables and files are lost.")
    assert tool.step(call(code)) == lost
    fresh = "import os\nprint('x' in globals(), os.listdir())\nimport random\nrandom.random()"
    state, number = tool.step(call(fresh)).text.splitlines()
    assert state == "False []"
    assert number == begun(Quick).step(call("import random\nrandom.random()")).text
    assert tool.step(call("number = 3")) == Observation("(no output)")
    assert tool.step(call("number")) == Observation("3")


def interpreters() -> list[int]:
    """Below this process those that have no children: what executes code."""
    found = [pid for pid, pages in below(os.getpid()).items() if pages]
    return [pid for pid in found if not below(pid) and _is_sandboxed(pid)]


def _is_sandboxed(pid: int) -> bool:
    with suppress(OSError):
        inside = Path(f"/proc/{pid}/ns/pid").readlink()
        return inside != Path("/proc/self/ns/pid").readlink()
    return False


@isolated
def test_an_interpreter_that_is_killed_is_made_anew_with_the_same_state(
    begun: Callable[..., Python],
) -> None:
    actions = [
        "import random\nx = [random.random()]\nopen('f', 'w').write('kept')",
        "x.append(random.random())",
        "x.append(random.random())\nx, open('f').read()",
    ]
    undisturbed = begun()
    before = [undisturbed.step(call(action)).text for action in actions]
    undisturbed.close()
    tool = begun()
    found = []
    for action in actions:
        found.append(tool.step(call(action)).text)
        [pid] = interpreters()
        os.kill(pid, signal.SIGKILL)
    assert found == before
    assert tool.step(call("len(x)")).text == "3"


@isolated
@pytest.mark.parametrize("processes", [0, 2])
def test_a_sandbox_that_is_killed_costs_a_retry_and_no_state(processes: int) -> None:
    params = EpisodeParams(retries=1, backoff=0.01, processes=processes)
    asking = Asking(params, "python", ROOT)
    try:
        seat = asking.seat(ROW, 7)
        assert asking.begin([seat]).result() == [Observation()]
        [first] = asking.step([seat], [call("import random\nx = random.random()\nx")]).result()
        before = {pid for pid in below(os.getpid()) if _is_sandboxed(pid)}
        assert len(before) >= 2
        for pid in before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        [again] = asking.step([seat], [call("x")]).result()
        assert again == first
        asking.leave([seat])
    finally:
        asking.close()


@isolated
def test_without_a_retry_a_sandbox_that_is_killed_is_an_episode_that_failed() -> None:
    asking = Asking(EpisodeParams(), "python", ROOT)
    try:
        seat = asking.seat(ROW, 7)
        asking.begin([seat]).result()
        asking.step([seat], [call("x = 1")]).result()
        sandboxed = [pid for pid in below(os.getpid()) if _is_sandboxed(pid)]
        outermost = [pid for pid in sandboxed if not _is_sandboxed(psutil.Process(pid).ppid())]
        assert outermost
        for pid in outermost:
            # With it ends all within, before that can report an interpreter that was killed alone.
            os.kill(pid, signal.SIGKILL)
        [answer] = asking.step([seat], [call("x")]).result()
        assert isinstance(answer, NoAnswer)
        assert "SandboxBroken" in str(answer)
    finally:
        asking.close()


PLAY = """
import json, sys
from stages.environments.python import Python
tool = Python()
tool.reset({"answer": "46"}, int(sys.argv[1]))
print(json.dumps([tool.step(action).text for action in json.loads(sys.argv[2])]))
tool.close()
"""


@isolated
def test_the_same_actions_get_the_same_bytes_in_every_process() -> None:
    """Each with a launcher of its own, and in the second after other episodes."""
    actions = [
        "import random, os\nrandom.random(), random.getrandbits(64), os.getpid(), os.getuid() > 0",
        "{str(n) for n in range(30)}, hash('x'), {'b', b'a', 1.5, None}",
        "class C: pass\nC(), C, len, (lambda: 1), open, random.random",
        "import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1], sorted(os.environ.items())",
        "import tempfile, uuid\nrandom.shuffle(l := list(range(20)))\nl, tempfile.gettempdir()",
        "import threading\nout = []\nt = threading.Thread(target=lambda: out.append(1))\n"
        "t.start(); t.join(); out",
        "import sys; sys.getsizeof([]), sys.path, sys.argv, sys.flags, sorted(sys.modules)[-9:]",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "del x\ndir()",
        "1 / 0",
    ]
    played = [play(7, actions), play(7, actions), play(8, actions)]
    assert played[0] == played[1]
    assert played[0][0] != played[2][0]
    assert "Error" not in " ".join(played[0][:7])
    assert played[0][7] == "MemoryError"


def play(seed: int, actions: list[str]) -> list[str]:
    words = [str(seed), json.dumps([call(action) for action in actions])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), f"NOISE_{os.urandom(3).hex()}": "x" * 99}
    command = [sys.executable, "-c", PLAY, *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_without_isolation_it_refuses_and_says_what_to_do() -> None:
    words = ["7", json.dumps([call("1")])]
    done = subprocess.run(
        [sys.executable, "-c", NO_ISOLATION + PLAY, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "untrusted code needs isolation" in done.stderr
    assert "install bubblewrap" in done.stderr


class Scripted:
    """Says the next of its texts in each episode, whatever it reads."""

    def __init__(self, policy: Tokenizer, texts: list[str], prompt: int) -> None:
        self._policy, self._texts, self._prompt = policy, texts, prompt
        self.reads: list[str] = []

    def generate(self, requests: list[Request], **_: Any) -> list[Completion]:
        return [self._said(request) for request in requests]

    def _said(self, request: Request) -> Completion:
        end = self._policy.token_to_id("<eos>")
        said = self._texts[list(request.prompt_ids).count(end)]
        self.reads.append(self._policy.decode(list(request.prompt_ids)[self._prompt :]))
        ids = [*self._policy.encode(said).ids, end]
        return Completion(ids, [0.0] * len(ids), 0.0, "stop")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A folder with a tokenizer of bytes, and no template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    saved.save_pretrained(tmp_path)
    return tmp_path


@isolated
def test_episodes_of_a_policy_are_played_to_their_reward(policy: Path) -> None:
    """With the longest observation that there is, of letters that take the most tokens."""
    texts = [call("x = 12 + 34\nprint('\\U0001f680' * 999)"), call("x"), "46"]
    limits = RolloutParams(environment="python", max_turns=4, max_observation_tokens=512)
    tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
    rows = [{**ROW, "prompt_id": str(n), "sample_index": 0, "extra": "{}"} for n in range(3)]
    requests = [Request(tokenizer.encode(ROW["prompt"]).ids, 1) for _ in rows]
    speaks = Scripted(tokenizer, texts, len(requests[0].prompt_ids))
    with open_arena(limits, EpisodeParams(), ROOT, policy, 17) as arena:
        assert arena is not None
        played = play_all(arena, speaks, rows, requests, 1000, Sampling())
    assert [(one.environment_reward, one.turns, one.finish_reason) for one in played] == [
        (1.0, 3, "stop")
    ] * 3
    assert speaks.reads[-1].endswith(f"{texts[1]}46")
    for one in played:
        observed = [i for i, own in zip(one.ids, one.loss_mask or [], strict=True) if not own]
        assert tokenizer.decode(observed[-2:]) == "46"
        assert 500 < len(observed) <= 512 + 2


@isolated
def test_many_episodes_side_by_side_keep_their_states_apart() -> None:
    asking = Asking(EpisodeParams(concurrency=64), "python", ROOT)
    try:
        seats = [asking.seat(ROW, seed) for seed in range(40)]
        asking.begin(seats).result()
        for number, action in enumerate(["x = {0}", "x += 1000", "open('f', 'w').write(str(x))"]):
            turns = [call(action.format(seat.seed)) for seat in seats]
            answers = asking.step(seats, turns).result()
            assert all(isinstance(answer, Observation) for answer in answers), (number, answers)
        answers: list[Any] = asking.step(seats, [call("open('f').read()")] * len(seats)).result()
        assert [answer.text for answer in answers] == [f"'{1000 + n}'" for n in range(40)]
        asking.leave(seats)
    finally:
        asking.close()
    assert interpreters() == []
