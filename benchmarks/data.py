"""Rows a second of prepare, beside TRL's preprocessing of the same file.

    python benchmarks/data.py [--rows 20000] [--model FOLDER] [--write]

One file of dialogues in JSON lines, two to six messages of some fifty words, all different. Ours is
prepare's work on demonstrations: reading, detecting the format, duplicates, rendering by the chat
template with a mask over the assistant's turns, and Parquet. TRL's is what SFTTrainer does before
it trains, called as its constructor calls it: `datasets` reads the file, then each row is rendered
and tokenised, with `assistant_only_loss`, labelled and cut. Both have the same tokenizer and
template and one process each; starting it is left out, and so are TRL's Trainer and model. The
tokenizer uses all cores where rows are handed to it in batches, which TRL does not do. On a machine
that others use too, rows per CPU second are the ones to compare. `--model` is a folder with a
tokenizer and a chat template; without one, a byte-pair tokenizer is trained on the file first.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records

RESULTS = records.RESULTS / "data.json"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] + eos_token + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 8000
MAX_LENGTH = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--write", action="store_true", help="record the result")
    parser.add_argument("--child", choices=("lockstep", "trl"))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        measure = {"lockstep": of_lockstep, "trl": of_trl}[arguments.child]
        print(json.dumps(measure(arguments.folder, arguments.model)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "data/demonstrations.jsonl"
        path.parent.mkdir()
        write_dialogues(path, arguments.rows)
        model = arguments.model or make_tokenizer(path, folder / "tokenizer")
        result: dict[str, Any] = {
            "rows": arguments.rows,
            "file_mb": round(path.stat().st_size / 1e6, 1),
            "tokenizer": str(arguments.model or f"byte-pair, {VOCABULARY} tokens"),
        }
        for child in ("lockstep", "trl"):
            result[child] = in_a_process(child, folder, model)
    ours, theirs = result["lockstep"], result["trl"]
    for clock in ("second", "cpu_second"):
        rates = [side[f"rows_per_{clock}"] for side in (ours, theirs)]
        result[f"times_as_many_rows_per_{clock}"] = round(rates[0] / rates[1], 2)
    result["cpu_minutes_for_a_million_rows"] = round(1e6 / ours["rows_per_cpu_second"] / 60, 1)
    names = ("torch", "transformers", "tokenizers", "pyarrow", "trl", "datasets")
    result["hardware"] = records.machine()
    result["versions"] = records.versions(*names)
    print(json.dumps(result, indent=2))
    if arguments.write:
        records.add(RESULTS, f"{arguments.rows} rows", result)


def in_a_process(child: str, folder: Path, model: Path) -> dict[str, Any]:
    """A child's own numbers: what one took in memory does not count for the other."""
    words = [sys.executable, __file__, "--child", child, "--folder", folder, "--model", model]
    done = subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def of_lockstep(folder: Path, model: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from stages.contracts.prepare import PrepareParams
    from stages.contracts.sources import Role
    from stages.data.parquet_stream import streaming
    from stages.data.rendering import Rendered, render
    from stages.data.schema import DemonstrationRow, columns_of
    from stages.data.selection import FilesCorpus
    from stages.data.tokenizer import Renderer
    from stages.prepare import ROWS_AT_A_TIME

    tokenizer = AutoTokenizer.from_pretrained(model)
    params = PrepareParams(source="files", held_out=0)
    out = folder / "out.parquet"
    start, cpu = time.perf_counter(), cpu_seconds()
    corpus = FilesCorpus(params, folder / "data", seed=1)
    renderer = Renderer(tokenizer)
    num_rows = num_tokens = 0
    with streaming(out, columns_of(DemonstrationRow), None, folder) as stream:
        for batch in batches(corpus.rows(Role.DEMONSTRATIONS), ROWS_AT_A_TIME):
            rows = [row for _, row in render(batch, renderer, MAX_LENGTH)]
            values = [row.values for row in rows if isinstance(row, Rendered)]
            stream.write(values)
            num_rows += len(values)
            num_tokens += sum(len(v["prompt_ids"]) + len(v["completion_ids"]) for v in values)
    return numbers(start, cpu, num_rows, num_tokens)


def of_trl(folder: Path, model: Path) -> dict[str, Any]:
    """SFTTrainer's own preparation of a dataset, called as its constructor calls it."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = object.__new__(SFTTrainer)
    trainer.completion_only_loss = False
    trainer._tokenizer = tokenizer
    trainer.chat_template = tokenizer.chat_template
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=True,
        max_length=MAX_LENGTH,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    start, cpu = time.perf_counter(), cpu_seconds()
    dataset = load_dataset(
        "json",
        data_files=str(folder / "data/demonstrations.jsonl"),
        split="train",
        cache_dir=str(folder / "cache"),
    )
    ready = trainer._prepare_dataset(dataset, tokenizer, config, False, None, "train")
    measured = numbers(start, cpu, len(ready), 0)
    return {**measured, "tokens": sum(map(len, ready["input_ids"]))}


def numbers(start: float, cpu: float, num_rows: int, num_tokens: int) -> dict[str, Any]:
    seconds, of_cpu = time.perf_counter() - start, cpu_seconds() - cpu
    return {
        "rows": num_rows,
        "tokens": num_tokens,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(of_cpu, 2),
        "rows_per_second": round(num_rows / seconds),
        "rows_per_cpu_second": round(num_rows / of_cpu),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(islice(items, size)):
        yield batch


def write_dialogues(path: Path, num_rows: int) -> None:
    """Words of made-up syllables, so that a tokenizer has something to merge."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstv" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(5000)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            messages = [
                {
                    "role": "assistant" if index % 2 else "user",
                    "content": " ".join(rng.choices(words, k=rng.randint(20, 80))),
                }
                for index in range(2 * rng.randint(1, 3))
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def make_tokenizer(data: Path, folder: Path) -> Path:
    """A byte-pair tokenizer of the file's own text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with data.open(encoding="utf-8") as file:
        made.train_from_iterator(list(islice(file, 500)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=special[0], pad_token=special[2], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
