"""Tokens a second of the torch generator: sampling, log-probs and entropies included.

Random weights: time does not depend on what they say, and without an end token every answer has its
full length, as in the peers' measurements. `--lengths uneven` lets answers end at random, as real
ones do: that is what continuous batching is for.

    python benchmarks/generation.py [--model 135m|1.1b|tiny] [--device cuda] [--write]

Seconds are the wall's on a GPU and the process's own on the CPU. `--write` records the result in
benchmarks/results/generation.json, by model, slots and lengths.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import records
from benchmarks.workloads import FIRST_WORD, SHAPES
from stages.contracts.precision import Precision
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.generation.padded import generate as generate_padded
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models.precision import DTYPES

MEAN_LENGTH = 128
"""Of uneven answers, about, if they were not cut."""
RESULTS = records.RESULTS / "generation.json"


def main() -> None:
    options = options_of(sys.argv[1:])
    result = measure(options)
    print(json.dumps(result, indent=2))
    if options.write:
        key = f"{options.model}, {options.slots} slots, {options.requests} {options.lengths}"
        records.add(RESULTS, key, result)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=[p.value for p in Precision])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8, help="requests with the same prompt")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=25)
    parser.add_argument("--lengths", choices=["full", "uneven"], default="full")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--padded", action="store_true", help="in turn with the padded batches of other models"
    )
    parser.add_argument("--profile", action="store_true", help="print where a GPU's time goes")
    parser.add_argument("--write", action="store_true")
    return parser.parse_args(words)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cuda = options.device.startswith("cuda")
    precision = Precision(options.precision or ("bfloat16" if cuda else "float32"))
    generator = TorchGenerator(options.device, precision, options.slots)
    policy = _policy(options, precision)
    generator.take(policy, "random")
    requests = _requests(options)
    asked: dict[str, Any] = {"max_new_tokens": options.new_tokens, "sampling": Sampling()}

    # On the CPU its own seconds: others may be using the machine.
    clock = time.perf_counter if cuda else time.process_time

    def padded() -> list[Completion]:
        starts = range(0, len(requests), options.slots)
        batches = [requests[start : start + options.slots] for start in starts]
        return [each for batch in batches for each in generate_padded(policy, batch, **asked)]

    def timed(generate: Callable[[], list[Completion]]) -> tuple[float, int]:
        if cuda:
            torch.cuda.synchronize()
        start = clock()
        completions = generate()
        return clock() - start, sum(len(c.ids) for c in completions)

    def continuous() -> list[Completion]:
        return generator.generate(requests, **asked)

    first, num_tokens = timed(continuous)
    seconds, seconds_padded = [], []
    for _ in range(options.rounds):
        seconds.append(timed(continuous)[0])
        if options.padded:
            seconds_padded.append(timed(padded)[0])
    best = min(seconds)
    if options.profile:
        _profile(generator, requests, asked)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {
        "model": options.model,
        "precision": precision.value,
        "requests": len(requests),
        "slots": options.slots,
        "prompt_tokens": options.prompt_tokens,
        "max_new_tokens": options.new_tokens,
        "lengths": options.lengths,
        "tokens": num_tokens,
        "tokens_per_second": round(num_tokens / best),
        "seconds": [round(value, 4) for value in seconds],
        "seconds_first_time": round(first, 3),
        "seconds_padded": [round(value, 4) for value in seconds_padded],
        "times_as_fast_as_padded": (
            round(min(seconds_padded) / best, 2) if seconds_padded else None
        ),
        "ms_per_round_of_slots": round(1000 * best * options.slots / num_tokens, 3),
        "peak_gib": None if peak is None else round(peak, 2),
        "hardware": records.hardware(options.device),
        "versions": records.versions("torch", "transformers", "triton"),
    }


def _policy(options: argparse.Namespace, precision: Precision) -> LlamaForCausalLM:
    torch.manual_seed(0)
    length = options.prompt_tokens + options.new_tokens + 8
    config = LlamaConfig(
        **SHAPES[options.model],
        max_position_embeddings=max(2048, length),
        pad_token_id=0,
        eos_token_id=1 if options.lengths == "uneven" else None,
    )
    with torch.device(options.device):
        policy = LlamaForCausalLM(config).to(DTYPES[precision]).eval()
    if options.lengths == "uneven":
        _make_likely(policy, 1, config.vocab_size / MEAN_LENGTH)
    return policy


@torch.no_grad()
def _make_likely(policy: LlamaForCausalLM, token: int, times: float) -> None:
    """Give a token so many times the average probability, whatever came before.

    One number of every hidden state is made much the same, so that the head can rely on it.
    """
    policy.model.embed_tokens.weight[:, 0] = 1.0
    ids = torch.arange(256, device=policy.device)[None]
    constant = float(policy.model(ids).last_hidden_state[..., 0].float().mean())
    policy.lm_head.weight[token, 0] += math.log(times) / constant


def _requests(options: argparse.Namespace) -> list[Request]:
    draw = torch.Generator().manual_seed(17)
    vocabulary = SHAPES[options.model]["vocab_size"]
    requests = []
    while len(requests) < options.requests:
        spread = int(torch.randint(-5, 6, (), generator=draw))
        length = max(1, options.prompt_tokens + spread)
        prompt = torch.randint(FIRST_WORD, vocabulary, (length,), generator=draw).tolist()
        for _ in range(options.samples):
            requests.append(Request(prompt, seed=len(requests)))
    return requests[: options.requests]


def _profile(generator: TorchGenerator, requests: list[Request], asked: dict[str, Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        generator.generate(requests, **{**asked, "max_new_tokens": 32})
        torch.cuda.synchronize()
    rows = sorted(taken.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"{total / 1000:.1f} ms on the GPU")
    for row in rows[:25]:
        time_us = row.self_device_time_total
        print(
            f"{time_us / total:6.1%} {row.count:6} x {time_us / row.count:8.1f} us  {row.key[:90]}"
        )


if __name__ == "__main__":
    main()
