"""Environments of verifiers (the Environments Hub's), played in a Python environment of their own.

A process of that environment (verifiers_process.py) runs the rollout as verifiers does, against the
policy's address, as any other agent (chat_agent.py). Its rubric's reward is the episode's. The rows
that `write_prompts.py` writes have the messages and the tools of the first request, and the row of
the environment's dataset as `example`: an episode is played from the row alone.
"""

import asyncio
import sys
from asyncio import AbstractEventLoop
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from stages.environments.chat_agent import ChatAgent
from stages.environments.environment import NoAnswer
from stages.environments.verifiers_process import Order, Process


class Verifiers(ChatAgent):
    """One episode. Subclasses say of which environment."""

    python: ClassVar[str] = ""
    """The interpreter that has verifiers and the environment, or the folder of its virtual
    environment, from the file's folder; `${NAME}` stands for an environment variable."""
    id: ClassVar[str] = ""
    """Of the environment, as in `load_environment`."""
    arguments: ClassVar[Mapping[str, Any]] = {}
    """Of `load_environment`."""
    weights: ClassVar[Mapping[str, float]] = {}
    """Of the rubric's reward functions, by name; others count 0. Empty: the rubric's own."""
    env: ClassVar[Sequence[str]] = ()
    """Names of environment variables that the process gets, besides PATH, HOME and their like."""

    _processes: ClassVar[dict[tuple[AbstractEventLoop, type], Process]] = {}

    async def run(self, base_url: str, row: Mapping[str, Any], seed: int) -> float:  # type: ignore[override]  # noqa: ARG002
        example = row["extra"].get("example")
        if not isinstance(example, Mapping):
            raise NoAnswer(
                "the row has no `example` of the environment's dataset: write the prompts with "
                "`python -m stages.environments.write_prompts`"
            )
        answer = await self._process().ask({"play": example, "base_url": base_url})
        reward: float = answer["reward"]
        return reward

    @classmethod
    def rows(cls, places: range, *, evaluation: bool = False) -> Iterator[Mapping[str, Any]]:
        """Rows of its dataset, as data for `prepare`: fewer where it ends before."""

        async def asked(place: int) -> Mapping[str, Any] | None:
            question = {"example": place, "evaluation": evaluation}
            row: Mapping[str, Any] | None = (await cls._process().ask(question))["row"]
            return row

        async def closed() -> None:
            process = cls._processes.pop((asyncio.get_running_loop(), cls), None)
            await process.close() if process else None

        with asyncio.Runner() as runner:
            try:
                for place in places:
                    if (row := runner.run(asked(place))) is None:
                        return
                    yield row
            finally:
                runner.run(closed())

    @classmethod
    def _process(cls) -> Process:
        """Which all episodes share; another one where it has ended."""
        for place in [place for place, process in cls._processes.items() if not process.usable]:
            del cls._processes[place]
        place = asyncio.get_running_loop(), cls
        if place not in cls._processes:
            folder = Path(str(sys.modules[cls.__module__].__file__)).absolute().parent
            cls._processes[place] = Process(
                Order(cls.python, cls.id, cls.arguments, cls.weights, cls.env, folder)
            )
        return cls._processes[place]
