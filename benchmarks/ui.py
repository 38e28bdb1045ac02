"""How soon `lockstep ui` answers about a million rollout rows, beside 299 other iterations.

The files are made up and the same in every run: short prompts and responses, eight tokens each.
Their contents repeat, so they are small on disk. They are written as stages write them, with one
row group for up to 2^20 rows, and are read as they are first, then from the copies in small row
groups that the server makes at its first look at a file (`pipelines/ui/small_groups.py`). What is
timed is the answer of the server, without a network and a browser: a page of 50 rows from the
start and from the end, with a text that one row in a thousand has, with a text that no row has,
with a reward that one row in a thousand has, the rows of one prompt, and one row with its tokens.
Each is asked a few times; the files stay in the page cache, as they do between the pages of one
user. Seconds are by the clock and of the processor: of the two, the latter do not count other work
on the machine.

    python benchmarks/ui.py [--rows 1000000] [--rounds 5] [--write]

`--write` records the result in benchmarks/results/ui.json.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from clones import make_clone, set_params
from fastapi.testclient import TestClient
from records import machine, report, versions

from pipelines.ui import small_groups
from pipelines.ui.app import create_app
from pipelines.ui.clone import Clone
from pipelines.ui.guard import TOKEN_HEADER
from pipelines.ui.rollout_files import copies_of
from stages.data import schema

ITERATIONS = 300
LAST = f"iter_{ITERATIONS:03}"
SAMPLES, TOKENS, SMALL = 8, 8, 64
AT_ONCE = 16384
AS_STAGES_WRITE = 1 << 20
TOKEN = "token"
RARE = 1000
"""One row in so many has the text and the reward that are looked for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the last iteration")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        clone = make_clone(Path(folder))
        sizes = add_results(clone, arguments.rows)
        large, small_groups.LARGE = small_groups.LARGE, arguments.rows
        as_written = measure(clone, arguments.rows, arguments.rounds)
        small_groups.LARGE = large
        copied = copy(clone)
        from_copies = measure(clone, arguments.rows, arguments.rounds)
    result = {
        "rows": arguments.rows,
        "iterations": ITERATIONS,
        "file_mib": sizes,
        "as_stages_write": as_written,
        "copying": copied,
        "from_copies": from_copies,
        "rounds": arguments.rounds,
        "machine": machine(),
        "load_average_at_start": round(load, 1),
        "others_on_the_machine": load > (os.cpu_count() or 1) / 2,
        "versions": versions("pyarrow", "fastapi"),
    }
    report("ui", result, to_file=arguments.write)


def add_results(clone: Path, rows: int) -> dict[str, float]:
    """Params with all iterations, and their files; returns the sizes of the large ones."""
    names = [f"iter_{number:03}" for number in range(1, ITERATIONS + 1)]
    parents = dict(zip(names, ("sft", *names), strict=False))
    set_params(clone, {"rl.iterations": {name: {"policy": parents[name]} for name in names}})
    for name in names:
        number = rows if name == LAST else SMALL
        files = {
            "rollouts": clone / f"artifacts/rollouts/{name}.parquet",
            "scores": clone / f"artifacts/scores/{name}.parquet",
            "experience": clone / f"artifacts/policies/{name}/experience.parquet",
        }
        for kind, path in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            first = clone / path.relative_to(clone).as_posix().replace(name, names[0])
            if name in (names[0], LAST):
                write(path, kind, number)
            else:
                path.hardlink_to(first)
    return {kind: mib(path) for kind, path in files.items()}


def mib(path: Path) -> float:
    return round(path.stat().st_size / 2**20, 1)


def copy(clone: Path) -> dict[str, Any]:
    """The copies that the server makes beside its answers, here one after the other."""
    start, cpu = time.perf_counter(), time.process_time()
    folder = copies_of(clone)
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for path in (
        clone / f"artifacts/rollouts/{LAST}.parquet",
        clone / f"artifacts/scores/{LAST}.parquet",
        clone / f"artifacts/policies/{LAST}/experience.parquet",
    ):
        target = small_groups.copy_of(path, folder)
        small_groups.write_copy(path, target)
        made[path.stem if path.stem != LAST else path.parent.name] = mib(target)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1), "file_mib": made}


KINDS: dict[str, Any] = {
    "rollouts": schema.RolloutRow,
    "scores": schema.ScoreRow,
    "experience": schema.ExperienceRow,
}


def write(path: Path, kind: str, rows: int) -> None:
    columns = schema.columns_of(KINDS[kind])
    tables = []
    for start in range(0, rows, AT_ONCE):
        values = COLUMNS[kind](np.arange(start, min(start + AT_ONCE, rows)))
        table = pa.table([values[name] for name in columns.names], names=columns.names)
        tables.append(table.cast(columns))
    whole = pa.concat_tables(tables)
    pq.write_table(
        whole, path, compression="zstd", store_schema=False, row_group_size=AS_STAGES_WRITE
    )


def prompt_ids(numbers: np.ndarray) -> list[str]:
    """Sorted, as in every file."""
    return [f"{number:016x}" for number in numbers // SAMPLES]


def rollouts(numbers: np.ndarray) -> dict[str, Any]:
    size = len(numbers)
    said = ["needle" if number % RARE == 7 else f"{number % 199}" for number in numbers]
    return {
        "prompt_id": prompt_ids(numbers),
        "sample_index": numbers % SAMPLES,
        "greedy": np.zeros(size, bool),
        "prompt": [f"{number // SAMPLES % 99}+{number % 97}=" for number in numbers],
        "response": [f"it is {word}, I think" for word in said],
        "answer": ["42"] * size,
        "extra": ["{}"] * size,
        "prompt_ids": lists(np.full(size * 4, 5, np.int32), 4),
        "response_ids": lists(np.tile(np.arange(TOKENS, dtype=np.int32), size), TOKENS),
        "logprobs": lists(-0.001 * (np.arange(size * TOKENS) % 997).astype(np.float32), TOKENS),
        "support": pa.nulls(size),
        "loss_mask": pa.nulls(size),
        "seed": numbers * 7919,
        "finish_reason": ["length" if number % 50 == 0 else "stop" for number in numbers],
        "environment_reward": pa.nulls(size),
        "policy_hash": ["f" * 64] * size,
    }


def scores(numbers: np.ndarray) -> dict[str, Any]:
    size = len(numbers)
    # In every row group there is the whole range, so statistics rule none out.
    rewards = (numbers * 7919 % RARE / RARE).astype(np.float32)
    offsets = np.arange(0, 2 * size + 1, 2, dtype=np.int32)
    by_source = pa.MapArray.from_arrays(
        offsets, pa.array(["reward_model", "verifier"] * size), np.repeat(rewards, 2)
    )
    return {
        "prompt_id": prompt_ids(numbers),
        "sample_index": numbers % SAMPLES,
        "reward": rewards,
        "by_source": by_source,
        "ref_logprobs": lists(np.full(size * TOKENS, -0.5, np.float32), TOKENS),
    }


def experience(numbers: np.ndarray) -> dict[str, Any]:
    size = len(numbers)
    return {
        "prompt_id": prompt_ids(numbers),
        "sample_index": numbers % SAMPLES,
        "role": ["policy_gradient"] * size,
        "reward": np.full(size, 0.5, np.float32),
        "advantages": lists(np.full(size * TOKENS, 0.25, np.float32), TOKENS),
    }


COLUMNS: dict[str, Any] = {"rollouts": rollouts, "scores": scores, "experience": experience}


def lists(values: np.ndarray, length: int) -> pa.Array:
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values))


def measure(clone: Path, rows: int, rounds: int) -> dict[str, Any]:
    app, headers = create_app(Clone(clone, TOKEN)), {TOKEN_HEADER: TOKEN}
    ask = TestClient(app, base_url="http://127.0.0.1", headers=headers)
    page = {"iteration": LAST}
    questions: dict[str, tuple[str, dict[str, Any]]] = {
        "names": ("names", {}),
        "first_page": ("rollouts", page),
        "last_page": ("rollouts", {**page, "start": rows - 50}),
        "text_in_a_thousandth": ("rollouts", {**page, "text": "NEEDLE"}),
        "text_in_none": ("rollouts", {**page, "text": "nowhere"}),
        "reward_of_a_thousandth": ("rollouts", {**page, "reward_min": 0.9985}),
        "trained_and_cut_off": ("rollouts", {**page, "trained": True, "finish": "length"}),
        "one_prompt": ("rollouts", {**page, "prompt": f"{rows // SAMPLES // 2:016x}"}),
        "one_row": ("rollout", {**page, "row": rows // 2}),
    }
    return {name: timed(ask, path, asked, rounds) for name, (path, asked) in questions.items()}


def timed(ask: TestClient, path: str, asked: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The medians, after one answer that does not count."""
    taken, found = [], {}
    for _ in range(rounds + 1):
        start, cpu = time.perf_counter(), time.process_time()
        answer = ask.get(f"/api/samples/{path}", params=asked)
        taken.append((time.perf_counter() - start, time.process_time() - cpu))
        answer.raise_for_status()
        found = answer.json()
    seconds, cpu_seconds = (statistics.median(each) for each in zip(*taken[1:], strict=True))
    counted = {name: found[name] for name in ("searched",) if name in found}
    listed = {"rows": len(found["rows"])} if "rows" in found else {}
    return {"seconds": round(seconds, 3), "cpu_s": round(cpu_seconds, 3), **listed, **counted}


if __name__ == "__main__":
    main()
