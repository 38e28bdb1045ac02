"""Environments of verifiers for the tests: run in the Python environment that has verifiers."""

import os
import subprocess
import sys
import time
from pathlib import Path

import openai
import verifiers as vf
from datasets import Dataset


class Echo(vf.MultiTurnEnv):
    """Says how long the turn was; over after as many turns as the row says. Or does worse."""

    async def setup_state(self, state):
        if state["info"].get("does") == "raise":
            raise vf.InfraError("no more words")
        return state

    @vf.stop
    async def is_over(self, state):
        return len(state["trajectory"]) >= state["info"].get("turns", 2)

    async def env_response(self, messages, state, **_):
        said, does = messages[-1].content, state["info"].get("does")
        if does == "exit" and not (once := Path(__file__).with_name("exited")).exists():
            once.touch()
            os._exit(3)
        if does == "block":
            time.sleep(3600)
        if does == "daemon":
            # It has left all that it could be known by: parent, session and variables.
            child = subprocess.Popen(["sleep", "3600"], start_new_session=True, env={})
            return [{"role": "user", "content": str(child.pid)}]
        if does == "where":
            text = f"{sys.prefix} {openai.__version__} {sorted(os.environ)}"
            return [{"role": "user", "content": text}]
        return [{"role": "user", "content": f"{len(said) % 10}+{state['info']['name']}="}]


def said(completion, info):
    """A fourth for each character that the policy said."""
    if info.get("does") == "unscored":
        raise LookupError("no such answer")
    return sum(0.25 * len(message.content) for message in completion if message.role == "assistant")


def turns(completion):
    return sum(message.role == "assistant" for message in completion)


def compared(completions):
    return [0.0 for _ in completions]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def right(completion, answer):
    return float(completion[-1].content == answer)


def load_environment(kind: str = "echo"):
    if kind == "broken":
        raise LookupError("no data today")
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(2) for b in range(3)]
    data = Dataset.from_list([*rows, rows[0]])
    if kind == "tools":
        rubric = vf.Rubric(funcs=[right], weights=[1.0])
        system = "You add."
        held_out = Dataset.from_list([{"question": "7+8=", "answer": "15"}])
        made = {"dataset": data, "eval_dataset": held_out, "system_prompt": system}
        return vf.ToolEnv(tools=[add], rubric=rubric, max_turns=4, **made)
    functions = [said, turns] if kind == "echo" else [said, compared]
    return Echo(dataset=data, rubric=vf.Rubric(funcs=functions, weights=[1.0, 0.0]))
