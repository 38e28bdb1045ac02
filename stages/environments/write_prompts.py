"""Write the prompts of an environment that begins with an observation, or that has a dataset.

python -m stages.environments.write_prompts lake:Lake data/prompts.jsonl --number 500

Where it begins with an observation, the rows have `prompt` and `seed`, for the seeds from 0 on. Of
a dataset (verifiers_env.py) they are its first rows. Of equal prompts the first is written.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.environments.environment import Environment, NoAnswer
from stages.environments.loading import find
from stages.environments.started import Started
from stages.environments.verifiers_env import Verifiers


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write an environment's prompts to a file.")
    parser.add_argument("environment", help="module:Class, as in rollout.environment")
    parser.add_argument("file", type=Path, help="a .jsonl file in prepare.folder")
    parser.add_argument(
        "--number", type=int, required=True, help="of seeds, or of a dataset's rows at most"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="others than in another file")
    evaluation = "rows of the dataset for evaluation"
    parser.add_argument("--evaluation", action="store_true", help=evaluation)
    parser.add_argument("--environments", type=Path, default=Path("environments"))
    asked = parser.parse_args(argv)
    try:
        kind = find(asked.environment, asked.environments)
        numbers = range(asked.first_seed, asked.first_seed + asked.number)
        row_of: dict[str, str] = {}
        count = 0
        for row in _rows(kind, asked.environment, numbers, evaluation=asked.evaluation):
            prompt = json.dumps([row["prompt"], row.get("tools")])
            row_of.setdefault(prompt, json.dumps(row))
            count += 1
    except (StageError, NoAnswer) as error:
        print(error, file=sys.stderr)
        return 1
    # DVC may have linked the file to its cache.
    asked.file.unlink(missing_ok=True)
    asked.file.write_text("".join(f"{row}\n" for row in row_of.values()), encoding="utf-8")
    what = "seeds" if issubclass(kind, Started) else "rows"
    print(f"{asked.file}: {len(row_of)} different prompts of {count} {what}")
    return 0


def _rows(
    kind: type[Environment], name: str, numbers: range, *, evaluation: bool
) -> Iterator[Mapping[str, Any]]:
    if issubclass(kind, Verifiers):
        yield from kind.rows(numbers, evaluation=evaluation)
    elif not issubclass(kind, Started):
        raise StageError(f"{name} does not begin with an observation, and has no dataset")
    elif evaluation:
        raise StageError(f"--evaluation is for environments with a dataset, and {name} has none")
    else:
        for seed in numbers:
            with closing(kind()) as environment:
                yield {"prompt": environment.prompt(environment.begin(seed)), "seed": seed}


if __name__ == "__main__":
    sys.exit(main())
