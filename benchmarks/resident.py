"""What it saves to have a model in memory already: loading one, and being handed one that was kept.

A Llama-shaped model with random weights is saved once. Then, as stages of a session would, it is
loaded from its folder; kept, which checks that nobody changed it; and taken, which checks it again.
Last it is changed, saved and kept as what it was saved to, which compares it with the files.

    python benchmarks/resident.py [--device cuda] [--layers 22 --width 2048] [--write]

`--write` records the result in benchmarks/results/resident.json.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import records
from stages.contracts.precision import Precision
from stages.engines.models import resident
from stages.engines.models.folders import load_policy, save_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--write", action="store_true", help="record the result")
    arguments = parser.parse_args()
    device = arguments.device
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=arguments.width,
            intermediate_size=11 * arguments.width // 4,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.width // 64,
            num_key_value_heads=max(1, arguments.width // 512),
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        resident.switch_on()
        result = {
            "millions_of_weights": round(
                sum(p.numel() for p in LlamaForCausalLM(config).parameters()) / 1e6
            ),
            **{precision.value: rounds(folder, device, precision) for precision in Precision},
            "hardware": records.hardware(device),
            "versions": records.versions("torch", "transformers"),
        }
    records.report("resident", result, to_file=arguments.write)


def rounds(folder: Path, device: str, precision: Precision) -> dict[str, float]:
    """Seconds of each of the ways to have the model, the files in the system's memory."""
    out = folder.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    with resident.among({folder: "a"}):
        model, _ = timed(lambda: load_policy(folder, device, precision))
        del model
    with resident.among({folder: "a"}):
        model, load_s = timed(lambda: load_policy(folder, device, precision))
        _, keep_s = timed(lambda: resident.keep({}))
    with resident.among({folder: "a"}):
        taken, take_s = timed(lambda: load_policy(folder, device, precision))
        assert taken is model
        found = {"load_s": load_s, "keep_s": keep_s, "take_s": take_s}
        if precision is not Precision.FLOAT32:
            return found  # what is saved is float32
        with torch.no_grad():
            taken.lm_head.weight += 1
        save_model(taken, out, tokenizer_from=folder)
        _, keep_saved_s = timed(lambda: resident.keep({out: "b"}))
    with resident.among({out: "b"}):
        assert load_policy(out, device, precision) is model
    return {**found, "keep_saved_s": keep_saved_s}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    value = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return value, round(time.perf_counter() - began, 3)


if __name__ == "__main__":
    main()
