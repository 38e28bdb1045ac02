"""What a slow tool costs: episodes whose environments take a second to answer, with and without
others to generate meanwhile.

    python benchmarks/episodes.py [--episodes 512] [--turns 4] [--seconds 1] [--write]

The policy says one token a turn, and a call of its generator takes a stated time and no processor:
measured is the waiting. `--write` records the result in benchmarks/results/episodes.json.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records, workloads
from stages.contracts.episodes import EpisodeParams
from stages.contracts.rollout import RolloutParams
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.generation.sampling import SamplingTask
from stages.environments.episodes import open_arena, played

ENVIRONMENT = """
import asyncio
import time

from stages.environments.environment import Environment, Observation


class Tool(Environment):
    def reset(self, row, seed):
        pass

    def step(self, action):
        time.sleep({seconds})
        return Observation("w7")


class AsyncTool(Tool):
    async def step(self, action):
        await asyncio.sleep({seconds})
        return Observation("w7")
"""


class Speaks:
    """Says one token to each request, and takes its time for it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls: list[tuple[float, float]] = []

    def generate(self, requests: Sequence[Request], **_: Any) -> list[Completion]:
        began = time.perf_counter()
        time.sleep(self.seconds)
        self.calls.append((began, time.perf_counter()))
        return [Completion([workloads.END], [0.0], 0.0, "stop") for _ in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="that a tool takes to answer")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "policy").mkdir()
        workloads.make_tokenizer(512, folder / "policy")
        code = ENVIRONMENT.format(seconds=arguments.seconds)
        (folder / "tools.py").write_text(code, encoding="utf-8")
        result = {
            "episodes": arguments.episodes,
            "turns": arguments.turns,
            "tool_seconds": arguments.seconds,
            "in_one_unit": {
                tool: played_in(folder, tool, arguments, units=1, speaking=0.0)
                for tool in ("Tool", "AsyncTool")
            },
            "in_four_units": {
                "generator_seconds": 0.5,
                **{
                    tool: played_in(folder, tool, arguments, units=4, speaking=0.5)
                    for tool in ("Tool", "AsyncTool")
                },
            },
            "machine": records.machine(),
            "versions": records.versions("torch"),
        }
    records.report("episodes", result, to_file=arguments.write)


def played_in(
    folder: Path, tool: str, arguments: argparse.Namespace, *, units: int, speaking: float
) -> dict[str, float]:
    """Seconds a turn, and the generator's share of the time from its first call to its last."""
    count = arguments.episodes
    rows = [{"prompt_id": str(i), "prompt": "w5", "sample_index": 0} for i in range(count)]
    limits = RolloutParams(environment=f"tools:{tool}", max_turns=arguments.turns)
    generator = Speaks(speaking)
    with open_arena(limits, EpisodeParams(), folder, folder / "policy", 17) as arena:
        assert arena is not None
        play = played(arena, rows)
        requests = [Request([5], 1) for _ in rows]
        task = SamplingTask(requests, 64, Sampling(), count // units, str, play)
        parts = (range(start, start + count // units) for start in range(0, count, count // units))
        began = time.perf_counter()
        done = list(task.play_all(generator, play, lambda: None, parts))
        seconds = time.perf_counter() - began
    assert sum(len(unit) for unit, _ in done) == count
    return {
        "seconds_a_turn": round(seconds / arguments.turns, 3),
        "generator_speaks": round(
            sum(end - start for start, end in generator.calls)
            / (generator.calls[-1][1] - generator.calls[0][0]),
            3,
        ),
    }


if __name__ == "__main__":
    main()
