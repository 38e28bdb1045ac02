"""Write the prompts of an environment that begins with an observation.

python -m stages.environments.write_prompts lake:Lake data/prompts.jsonl --number 500

The rows have `prompt` and `seed`, for the seeds from 0 on. Of equal prompts the first is written.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from stages.context import StageError
from stages.environments.environment import NoAnswer
from stages.environments.loading import find
from stages.environments.started import Started


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write an environment's prompts to a file.")
    parser.add_argument("environment", help="module:Class, as in rollout.environment")
    parser.add_argument("file", type=Path, help="a .jsonl file in prepare.folder")
    parser.add_argument("--number", type=int, required=True, help="of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="others than in another file")
    parser.add_argument("--environments", type=Path, default=Path("environments"))
    asked = parser.parse_args(argv)
    try:
        kind = find(asked.environment, asked.environments)
        if not issubclass(kind, Started):
            raise StageError(f"{asked.environment} does not begin with an observation")
        seeds = range(asked.first_seed, asked.first_seed + asked.number)
        seed_of: dict[str, int] = {}
        for seed, prompt in _prompts(kind, seeds):
            seed_of.setdefault(prompt, seed)
    except (StageError, NoAnswer) as error:
        print(error, file=sys.stderr)
        return 1
    rows = [json.dumps({"prompt": prompt, "seed": seed}) for prompt, seed in seed_of.items()]
    # DVC may have linked the file to its cache.
    asked.file.unlink(missing_ok=True)
    asked.file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"{asked.file}: {len(seed_of)} different prompts of {asked.number} seeds")
    return 0


def _prompts(kind: type[Started], seeds: range) -> Iterator[tuple[int, str]]:
    for seed in seeds:
        with closing(kind()) as environment:
            yield seed, environment.prompt(environment.begin(seed))


if __name__ == "__main__":
    sys.exit(main())
