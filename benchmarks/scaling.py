"""What an RL step would take for 7B, 70B and 400B: the cost model, with what was measured.

    python benchmarks/scaling.py [--json | --write | --check]

What one GPU and one process reach of their peaks is read from results/; the model is
cost_model.py's. `--write` puts the tables into docs/scaling.md between its markers, `--check` fails
where they are not those there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cost_model import BF16, CLUSTER, MODELS, WORK, Model, Rates, Work, plans
from benchmarks.records import RESULTS, recorded
from benchmarks.workloads import SHAPES
from stages.memory.shape import shape_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- benchmarks/scaling.py -->\n", "<!-- end -->\n"
MEASURED = Model("1.1b", shape_of(SHAPES["1.1b"]))


class Missing(Exception):
    """A result that a rate is read from is not there."""


def rates(results: Path = RESULTS) -> Rates:
    training = _best(
        results,
        "training.json",
        "benchmarks/training.py --model 1.1b --stages sft --compile --write",
        {"model": "1.1b", "stage": "sft", "way": "packed", "checkpoint_activations": False},
        "mfu",
    )
    decoding = _best(
        results,
        "generation.json",
        "benchmarks/generation.py --model 1.1b --write",
        {"model": "1.1b", "lengths": "full", "slots": 512},
        "tokens_per_second",
    )
    ranks = str(CLUSTER.gpus_per_node)
    measured = recorded(results / "artifacts.json").values()
    by_machine = [one["gb_per_s_by_ranks"].get(ranks) for one in measured]
    artifacts = max(filter(None, by_machine), key=lambda of: of["write_and_hash"], default=None)
    if not artifacts:
        raise Missing(
            _advice("artifacts.json", f"benchmarks/artifacts.py --ranks {ranks} --record")
        )
    online = _best(
        results,
        "online.json",
        "benchmarks/online.py --model 8b --checkpoint --offload --write",
        {"model": "8b"},
        "tokens_per_second",
    )
    transfer = recorded(results / "weight_transfer.json").get("8b:apart")
    if not transfer:
        raise Missing(
            _advice(
                "weight_transfer.json", "benchmarks/weight_transfer.py 8b:apart --in-memory --write"
            )
        )
    given = transfer["through_memory"]
    hashed = BF16 * shape_of(SHAPES["8b"]).weights / 1e9
    return Rates(
        training_mfu=training["mfu"],
        decoding_share=_decoding_share(decoding),
        write_gb_per_s=artifacts["write_and_hash"],
        read_gb_per_s=artifacts["read_from_disk"],
        cached_gb_per_s=artifacts["read_from_page_cache"],
        sampler_hash_gb_per_s=round(hashed / online["generate_seconds"], 2),
        vllm_load_gb_per_s=round(transfer["gigabytes"] / given["take_seconds"], 1),
        vllm_compare_gb_per_s=round(transfer["gigabytes"] / given["compare_seconds"], 1),
    )


def _best(
    results: Path, file: str, command: str, wanted: dict[str, Any], by: str
) -> dict[str, Any]:
    """The best of the results that are what is wanted, of a GPU."""
    found = [
        row
        for row in recorded(results / file).values()
        if all(row.get(name) == value for name, value in wanted.items())
        and row.get(by) is not None
        and "cores" not in row["hardware"]
    ]
    if not found:
        raise Missing(_advice(file, command, wanted))
    return max(found, key=lambda row: float(row[by]))


def _advice(file: str, command: str, wanted: object = "") -> str:
    what = f" with {wanted} from a GPU" if wanted else ""
    return f"benchmarks/results/{file} has no result{what}: run python {command}"


def _decoding_share(decoding: dict[str, Any]) -> float:
    """Bytes that have to be read, each step, over those that could have been in its time."""
    length = decoding["prompt_tokens"] + decoding["max_new_tokens"] / 2
    needed = BF16 * MEASURED.total + decoding["slots"] * MEASURED.kv_bytes * length
    steps_per_second = decoding["tokens_per_second"] / decoding["slots"]
    return round(needed * steps_per_second / CLUSTER.bandwidth, 3)


def tables(found: Rates, work: Work = WORK) -> str:
    """The page's tables: what was measured, what is assumed, what follows."""
    rows = [asdict(one) for model in MODELS for one in plans(model, found, work)]
    return "\n".join(
        [
            "Measured:\n",
            _table(["what", "value"], list(asdict(found).items())),
            "\nAssumed of the cluster:\n",
            _table(["what", "value"], [(k, f"{v:g}") for k, v in asdict(CLUSTER).items()]),
            f"\nA step of {work.prompts} prompts x {work.samples} samples x {work.new_tokens} new "
            f"tokens, prompts of {work.prompt_tokens} tokens:\n",
            _table(list(rows[0]), [list(row.values()) for row in rows]),
            "",
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def rewritten(page: str, found: Rates) -> str:
    """The page with these tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN.strip()} ... {END.strip()}")
    return f"{before}{BEGIN}\n{tables(found)}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true")
    how.add_argument("--write", action="store_true")
    how.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        found = rates(options.results)
    except Missing as error:
        sys.exit(str(error))
    if options.write or options.check:
        page = options.page.read_text(encoding="utf-8")
        new = rewritten(page, found)
        if options.write:
            options.page.write_text(new, encoding="utf-8")
        elif new != page:
            sys.exit(
                f"{options.page} is not what results/ say: python benchmarks/scaling.py --write"
            )
    elif options.json:
        rows = [asdict(one) for model in MODELS for one in plans(model, found)]
        print(json.dumps({"rates": asdict(found), "plans": rows}, indent=2))
    else:
        print(tables(found))


if __name__ == "__main__":
    main()
