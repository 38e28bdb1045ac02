"""The memory estimate: what was measured, what the profiles promise, and what is refused."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workloads import SHAPES
from pipelines.base.errors import LockstepError
from pipelines.config.memory import Estimator, refuse_what_cannot_fit
from pipelines.config.profiles import load_profile
from stages.contracts.params import Params
from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload, Sharding
from stages.memory import model as estimate
from stages.memory import stage as of_stages
from stages.memory.model import (
    CUDA_CONTEXT,
    CUDA_LIBRARIES,
    GIB,
    Layout,
    Model,
    Part,
    Sampling,
    learner_state,
    learning,
    read_weights,
    reading,
    torch_sampler,
)
from stages.memory.shape import ModelShape, decoder, read_shape, shape_of
from stages.memory.stage import needs
from stages.memory.work import TORCH_WEIGHTS, Shapes, Work

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
TOLERANCE = 0.15
BF16 = Precision.BFLOAT16


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / name).read_text()))


CELLS = [
    (shape, cell) for shape, of in recorded("memory.json")["models"].items() for cell in of["cells"]
]
MEASURED = [(shape, cell) for shape, cell in CELLS if "peak_gib" in cell]
TOO_LARGE = [(shape, cell) for shape, cell in CELLS if "does_not_fit" in cell]


def named(case: tuple[str, dict[str, Any]]) -> str:
    shape, cell = case
    return " ".join(filter(None, [shape, cell["stage"], cell["way"], str(cell["context"])]))


def gibibytes(shape: str, cell: dict[str, Any]) -> float:
    """What torch allocates at the peak of a cell of benchmarks/memory.py."""
    sizes, context, stage = shape_of(SHAPES[shape]), cell["context"], cell["stage"]
    layout = Layout(
        micro_tokens=context,
        checkpoint_activations=cell["way"].endswith("checkpointed"),
        offload=Offload.OPTIMIZER if "offloaded" in cell["way"] else Offload.NONE,
    )
    model = Model(
        sizes,
        BF16,
        scalar=stage == "reward_model",
        adapter=sizes.adapter_weights(16) if "LoRA" in cell["way"] else 0,
    )
    weights = Counter({Part.WEIGHTS: model.bytes})
    if stage == "rollout":
        # Eight samples of one prompt, by a model that somebody else holds.
        sampling = Sampling(slots=8, samples=8, longest=context)
        peaks = [weights + torch_sampler(model, sampling, layout, owns_weights=False)]
    elif stage == "score (log-probs)":
        peaks = [weights + reading(model, context, layout)]
    else:
        tokens = context * (2 if stage in ("dpo", "reward_model") else 1)
        kept = learner_state(model, layout).gpu
        # An update of two responses, one in each pass; all others are one pass.
        accumulated = stage == "policy_update"
        steps = learning([model], tokens, layout, accumulated=accumulated)
        peaks = [kept + parts for parts in steps]
    return (max(peak.total() for peak in peaks) + CUDA_LIBRARIES) / GIB


@pytest.mark.parametrize("case", MEASURED, ids=named)
def test_a_measured_peak_is_met(case: tuple[str, dict[str, Any]]) -> None:
    assert gibibytes(*case) == pytest.approx(case[1]["peak_gib"], rel=TOLERANCE)


@pytest.mark.parametrize("case", TOO_LARGE, ids=named)
def test_what_did_not_fit_the_gpu_is_more_than_it_has(case: tuple[str, dict[str, Any]]) -> None:
    assert gibibytes(*case) > recorded("memory.json")["gpu_gib"]


def test_all_shapes_and_kinds_of_work_were_compared() -> None:
    assert {shape for shape, _ in MEASURED} == {"135m", "1.1b", "7b", "8b"}
    assert len(MEASURED) > 80
    assert TOO_LARGE


@pytest.mark.parametrize("name", recorded("training.json"))
def test_peaks_of_training_with_many_passes_are_met_compiled_or_not(name: str) -> None:
    run = recorded("training.json")[name]
    layout = Layout(
        micro_tokens=run["micro_tokens"],
        compile=run["compile"],
        checkpoint_activations=run.get("checkpoint_activations", False),
        offload=Offload.OPTIMIZER if run.get("offload") else Offload.NONE,
    )
    model = Model(shape_of(SHAPES[run["model"]]), BF16, scalar=run["stage"] == "reward_model")
    kept = learner_state(model, layout).gpu
    steps = learning([model], run["micro_tokens"], layout, accumulated=True)
    total = max((kept + parts).total() for parts in steps) + CUDA_LIBRARIES
    assert total / 1e9 == pytest.approx(run["peak_gigabytes"], rel=TOLERANCE)


FULL = {k: v for k, v in recorded("generation.json").items() if "full" in k and v.get("peak_gib")}


@pytest.mark.parametrize("name", FULL)
def test_peaks_of_generation_are_met(name: str) -> None:
    run = FULL[name]
    model = Model(shape_of(SHAPES[run["model"]]), BF16)
    sampling = Sampling(run["slots"], 1, run["prompt_tokens"] + run["max_new_tokens"])
    parts = torch_sampler(model, sampling, Layout(), owns_weights=True)
    total = parts.total() + model.bytes + CUDA_LIBRARIES
    assert total / GIB == pytest.approx(run["peak_gib"], rel=TOLERANCE)


GPU_STEPS = {k: v for k, v in recorded("online.json").items() if v.get("peak_memory_gib")}


@pytest.mark.parametrize("name", GPU_STEPS)
def test_peaks_of_fused_steps_are_met_by_the_estimate_of_the_whole_stage(name: str) -> None:
    run = GPU_STEPS[name]
    settings = run["settings"]
    params = Params.model_validate(
        {
            "precision": "bfloat16",
            "model": {"max_length": 281},
            "rl": {"algorithm": "grpo", "reward": "verifier"},
            "rollout": {
                "samples": 8,
                "max_new_tokens": 256,
                "batch_size": 512,
                "engine": "torch",
            },
            "score": {"reference": False},
            "policy_update": {"batch_size": 512, "kl_coef": 0.0},
            "lora": {"rank": settings.get("lora", 0), "save": "adapter"},
        }
    )
    layout = Layout(
        micro_tokens=settings["micro_tokens"],
        compile=settings["compile"],
        checkpoint_activations=settings.get("checkpoint", False),
        offload=Offload.OPTIMIZER if settings.get("offload") else Offload.NONE,
    )
    found = needs("online", params, Shapes(shape_of(SHAPES[settings["model"]])), layout)
    assert found is not None
    assert found.gpu is not None
    allocated = (found.gpu.total - CUDA_CONTEXT) / GIB
    assert allocated == pytest.approx(run["peak_memory_gib"], rel=TOLERANCE)


LLAMA = {
    "1B": decoder(2048, 5632, 22, 32, 4, 32_000),
    "8B": decoder(4096, 14_336, 32, 32, 8, 128_256),
    "70B": decoder(8192, 28_672, 80, 64, 8, 128_256),
}


PER_WEIGHT = {
    "none": (18, 0),
    "zero1": (6, 12),
    "zero2": (2, 16),
    "zero3": (0, 18),
    "fsdp": (0, 16),
}
"""Bytes that every rank holds, and bytes that the ranks share (docs/engines.md)."""


@pytest.mark.parametrize("sharding", list(Sharding))
def test_a_rank_holds_the_bytes_per_weight_of_the_docs(sharding: Sharding) -> None:
    whole, shared = PER_WEIGHT[sharding.value]
    layout = Layout(nodes=4, tasks_per_node=8, sharding=sharding)
    model = Model(LLAMA["8B"], BF16)
    state = learner_state(model, layout)
    held = state.total - state.gpu[Part.GATHERED]
    assert held == pytest.approx((whole + shared / 32) * model.weights)


@pytest.mark.parametrize("kind", list(Sharding))
def test_a_model_that_only_answers_is_counted_by_parts_where_weights_are_spread(
    kind: Sharding,
) -> None:
    model, layout = Model(LLAMA["70B"], BF16), Layout(tasks_per_node=8, sharding=kind)
    assert read_weights(model, Layout(sharding=kind)) == model.bytes
    held = read_weights(model, layout)
    if not kind.spreads_weights:
        assert held == model.bytes
        return
    embedding, layer = 128_256 * 8192, LLAMA["70B"].layer_weights
    gathered = 2 * (2 * embedding + 2 * layer)
    assert held == pytest.approx(model.bytes / 8 + gathered)
    scalar = Model(LLAMA["70B"], BF16, scalar=True)
    assert read_weights(scalar, layout) == pytest.approx(
        scalar.bytes / 8 + gathered - 2 * embedding
    )


def test_a_stage_that_reads_a_spread_model_needs_a_part_of_it_and_no_copy_on_the_host() -> None:
    layout = Layout(tasks_per_node=8, sharding=Sharding.FSDP)
    shapes = Shapes(LLAMA["70B"], LLAMA["70B"])
    params = params_of("ppo")
    whole, spread = (needs("score", params, shapes, each) for each in (Layout(), layout))
    assert whole is not None
    assert spread is not None
    assert whole.gpu is not None
    assert spread.gpu is not None
    assert spread.gpu.total < whole.gpu.total / 3
    assert Part.LOADING in whole.host.parts
    assert Part.LOADING not in spread.host.parts
    adapters = params_of("ppo", lora={"rank": 8, "save": "adapter"})
    merged = needs("score", adapters, shapes, layout)
    assert merged is not None
    assert merged.host.parts[Part.LOADING] > 8 * 2 * LLAMA["70B"].backbone


def test_offloaded_moments_are_on_the_host_and_come_to_the_gpu_in_pieces() -> None:
    model = Model(LLAMA["8B"], BF16)
    here, there = (learner_state(model, Layout(offload=each)) for each in list(Offload)[:2])
    moved = here.total - there.total
    assert moved == there.host[Part.MOMENTS] == 8 * model.weights
    steps = learning([model], 1024, Layout(offload=Offload.OPTIMIZER), accumulated=True)
    assert max(parts[Part.MOMENTS] for parts in steps) == 2 * estimate.PIECE_BYTES


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "dtype": "bfloat16",
}


def test_all_experts_are_stored_and_two_compute() -> None:
    shape = shape_of(MIXTRAL)
    assert shape.weights == pytest.approx(46.7e9, rel=0.01)
    assert shape.inner == 2 * 14_336
    assert not shape.float32


def params_of(algorithm: str = "grpo", **changes: Any) -> Params:
    """A policy that computes in bfloat16 and answers with up to 1,024 tokens."""
    reward = "reward_model" if algorithm == "ppo" else "verifier"
    given = {
        "precision": "bfloat16",
        "model": {"max_length": 2048},
        "rl": {"algorithm": algorithm, "reward": reward},
        "rollout": {"samples": 8, "max_new_tokens": 1024},
    }
    return Params.model_validate({**given, **changes})


def estimator(root: Path, profile: str, params: Params, shape: ModelShape | None) -> Estimator:
    made = Estimator(root, params, profile, load_profile(root, profile))
    made.shapes = Shapes(shape, shape, shape)
    return made


SHIPPED = sorted(path.stem for path in (ROOT / "slurm_profiles").glob("*.yaml"))
SMALL = {"1M": decoder(128, 256, 2, 2, 1, 256), "135M": shape_of(SHAPES["135m"])}
ASSUMED_GPU = "80G"
"""Of a profile that leaves the GPU to the machine."""
STAGED = [name for name in of_stages.STAGES if name != "online"]
MODELS = {name: str(load_profile(ROOT, name).for_model) for name in SHIPPED}
FUSED = [
    (name, engine)
    for name, model in MODELS.items()
    # The torch generator has one GPU, which is too small for 70B.
    for engine in (["vllm"] if model == "70B" else ["torch", "vllm"])
]


def params_for(model: str, algorithm: str, engine: str, **rollout: Any) -> Params:
    """A model of 1M answers as it ships; larger ones with up to 1,024 tokens."""
    if model == "1M":
        given = {"rl": {"algorithm": algorithm}, "rollout": {"engine": engine}}
        return Params.model_validate(given)
    rollout |= {"samples": 8, "max_new_tokens": 1024, "engine": engine}
    return params_of(algorithm, rollout=rollout)


def assert_fits(made: Estimator, stage: str) -> None:
    resources = made.profile.resources(stage)
    assumed = ASSUMED_GPU if resources.device.startswith("cuda") else None
    use = made.use(stage, {"gpu_memory": resources.gpu_memory or assumed})
    assert use is not None, stage
    assert use.fits, f"{made.name}: {stage}: {use}\n" + "\n".join(use.breakdown())


def large_engine(shape: ModelShape) -> dict[str, Any]:
    engine = "vllm" if shape.weights > TORCH_WEIGHTS else "auto"
    return {"rollout": {"samples": 8, "max_new_tokens": 1024, "engine": engine}}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_fits_the_model_that_it_is_for(name: str, algorithm: str) -> None:
    shape = (LLAMA | SMALL)[MODELS[name]]
    params = Params() if MODELS[name] == "1M" else params_of(algorithm, **large_engine(shape))
    made = estimator(ROOT, name, params, shape)
    for stage in STAGED:
        assert_fits(made, stage)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(("name", "engine"), FUSED)
def test_every_shipped_profile_fits_fused_steps(name: str, engine: str, algorithm: str) -> None:
    model = MODELS[name]
    # A profile says how many slots the torch generator may have, where not those of the default.
    text = (ROOT / f"slurm_profiles/{name}.yaml").read_text()
    named = re.search(r"rollout\.batch_size at (\d+)", text) if engine == "torch" else None
    slots = {"batch_size": int(named[1])} if named else {}
    params = params_for(model, algorithm, engine, **slots)
    assert_fits(estimator(ROOT, name, params, (LLAMA | SMALL)[model]), "online")


def test_without_a_critic_a_node_has_twice_the_slots() -> None:
    text = (ROOT / "slurm_profiles/slurm-8gpu.yaml").read_text()
    assert "at 16 for 8B (32 without a critic)" in text
    params = params_for("8B", "grpo", "torch", batch_size=32)
    assert_fits(estimator(ROOT, "slurm-8gpu", params, LLAMA["8B"]), "online")


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_fused_steps_of_a_70b_policy_fit_ranks_that_sample_as_one(algorithm: str) -> None:
    shape = LLAMA["70B"]
    made = estimator(ROOT, "slurm-70b", params_of(algorithm, **large_engine(shape)), shape)
    assert made.refusal("online") is None
    alone = made.use("online", {"tensor_parallel": 1})
    assert alone is not None
    assert alone.lacks_gpu


def test_each_rank_has_its_share_of_a_sampler_that_ranks_have_together() -> None:
    def least(width: int) -> Counter[Part]:
        layout = Layout(nodes=2, tasks_per_node=8, sharding=Sharding.FSDP, tensor_parallel=width)
        work = Work(params_of(**large_engine(LLAMA["70B"])), Shapes(LLAMA["70B"]), layout)
        [(_, vllm), *_] = of_stages.STAGES["online"](work)
        assert work.on_host[Part.SAMPLER] == Model(LLAMA["70B"], BF16).bytes // 16
        return vllm

    assert least(8)[Part.WEIGHTS] == least(1)[Part.WEIGHTS] // 8


def test_only_a_tensor_parallel_that_ranks_can_have_is_advised(tmp_path: Path) -> None:
    def said(tasks: int) -> str:
        ranks = f"nodes: 8, tasks_per_node: {tasks}, gpus_per_node: 8, sharding: fsdp"
        small = "device: cuda, gpu_memory: 139G, generator_memory: 0.4, micro_tokens: 2048"
        (tmp_path / "slurm_profiles").mkdir(exist_ok=True)
        path = tmp_path / "slurm_profiles/mine.yaml"
        path.write_text(
            f"executor: slurm\ndefaults: {{checkpoint_activations: true, {small}}}\n"
            f"stages: {{online: {{{ranks}}}}}\n"
        )
        shape = LLAMA["70B"]
        made = estimator(tmp_path, "mine", params_of(**large_engine(shape)), shape)
        return str(made.refusal("online"))

    assert "Set `stages.online.tensor_parallel` to " in said(8)
    assert "`stages.online.tasks_per_node` to 8, `stages.online.tensor_parallel` to 8" in said(7)


def test_a_vllm_over_nodes_is_advised_where_the_gpus_of_one_do_not_hold_the_weights(
    tmp_path: Path,
) -> None:
    """And nodes are not, where one is enough."""
    shape = decoder(16_384, 53_248, 126, 128, 8, 128_256)
    assert shape.weights == pytest.approx(405e9, rel=0.01)

    def advised(stage: str, gpu: str, **more: Any) -> str:
        given = {"device": "cuda", "gpus_per_node": 8, "gpu_memory": gpu, **more}
        given |= {"memory": "2000G", "micro_tokens": 2048, "checkpoint_activations": True}
        text = json.dumps({"executor": "slurm", "defaults": given})
        name = profile_of(tmp_path, text)
        return str(
            estimator(tmp_path, name, params_of(**large_engine(shape)), shape).refusal(stage)
        )

    together = "`stages.{0}.nodes` to 2, `stages.{0}.tasks_per_node` to 8, "
    together += "`stages.{0}.tensor_parallel` to 16"
    for stage in ("rollout", "evaluate"):
        assert f"Set {together.format(stage)}" in advised(stage, "80G")
        assert f"`stages.{stage}.nodes`" not in advised(stage, "139G")
    changes = re.findall(r"`stages.online.(\w+)` to ([\w.]*\w)", advised("online", "139G"))
    more: dict[str, Any] = {key: json.loads(of) if of[0].isdigit() else of for key, of in changes}
    assert more["nodes"] > 1
    more["checkpoint_activations"] = True
    assert advised("online", "139G", **more) == "None"


def test_samplers_take_their_copy_of_the_policy_off_the_ranks_that_learn() -> None:
    def peaks(samplers: int) -> dict[str, Counter[Part]]:
        layout = Layout(tasks_per_node=10, sharding=Sharding.FSDP, samplers=samplers)
        params = params_of(rollout={"engine": "torch", "samples": 8, "max_new_tokens": 1024})
        work = Work(params, Shapes(LLAMA["8B"]), layout)
        return dict(of_stages.STAGES["online"](work))

    apart, of_eight = peaks(2), Layout(tasks_per_node=8, sharding=Sharding.FSDP)
    policy = Model(LLAMA["8B"], BF16)
    assert apart["sampling"][Part.WEIGHTS] == policy.bytes
    assert Part.MOMENTS not in apart["sampling"]
    assert peaks(0)["learning"][Part.SAMPLER] > 0 == apart["learning"][Part.SAMPLER]
    assert apart["learning"][Part.MOMENTS] == learner_state(policy, of_eight).gpu[Part.MOMENTS]


def test_samplers_with_vllm_have_their_part_of_it_alone() -> None:
    layout = Layout(
        nodes=2, tasks_per_node=8, sharding=Sharding.FSDP, samplers=8, tensor_parallel=4
    )
    work = Work(params_of(**large_engine(LLAMA["70B"])), Shapes(LLAMA["70B"]), layout)
    peaks = list(of_stages.STAGES["online"](work))
    policy = Model(LLAMA["70B"], BF16)
    [sampling] = [parts for when, parts in peaks if when == "sampling"]
    assert sampling[Part.WEIGHTS] == policy.bytes // 4
    assert Part.MOMENTS not in sampling
    assert all(not parts[Part.SAMPLER] for _, parts in peaks)
    assert work.on_host[Part.SAMPLER] == policy.bytes // 8


def profile_of(folder: Path, text: str) -> str:
    (folder / "slurm_profiles").mkdir(exist_ok=True)
    (folder / "slurm_profiles/mine.yaml").write_text(text)
    return "mine"


ONE_GPU = "executor: slurm\ndefaults: {device: cuda, gpus_per_node: 8, gpu_memory: 80G%s}\n"


@pytest.mark.parametrize("size", ["1B", "8B"])
@pytest.mark.parametrize("stage", ["sft", "policy_update", "rollout", "score"])
@pytest.mark.parametrize("gpu", [16, 24, 40, 80])
def test_what_a_refusal_advises_fits(tmp_path: Path, stage: str, size: str, gpu: int) -> None:
    text = ONE_GPU % ", micro_tokens: 65536, memory: 2000G"
    name = profile_of(tmp_path, text.replace("80G", f"{gpu}G"))
    made = estimator(tmp_path, name, params_of(**large_engine(LLAMA[size])), LLAMA[size])
    said = made.refusal(stage)
    use = made.use(stage)
    assert use is not None
    assert (said is None) == use.fits
    if said is None or "No setting" in said:
        return
    assert f"needs about {use.gpu_needed / GIB:.0f}G of each GPU" in said
    assert f"`gpu_memory` is {gpu}G" in said
    advised = said.split("Set ")[1].split(". If you know better")[0]
    lines = [part.split(" to ") for part in advised.split(", ")]
    keys = [key.strip("`").removeprefix(f"stages.{stage}.") for key, _ in lines]
    of = ", ".join(f"{key}: {value}" for key, (_, value) in zip(keys, lines, strict=True))
    profile_of(tmp_path, text.replace("80G", f"{gpu}G") + f"stages: {{{stage}: {{{of}}}}}\n")
    changed = estimator(tmp_path, name, made.params, LLAMA[size])
    assert changed.refusal(stage) is None, said


def test_a_node_without_room_for_the_state_is_refused_with_the_memory_it_needs(
    tmp_path: Path,
) -> None:
    offloaded = ", memory: 64G, tasks_per_node: 8, sharding: zero3, offload: optimizer"
    name = profile_of(tmp_path, ONE_GPU % offloaded)
    said = estimator(tmp_path, name, params_of(), LLAMA["8B"]).refusal("policy_update")
    assert said is not None
    assert f"moments {8 * LLAMA['8B'].weights / GIB:.0f}G" in said
    assert "`memory` is 64G" in said
    assert "Set `stages.policy_update.memory` to 1" in said


def test_a_base_that_is_not_float32_is_read_by_every_rank_unless_it_is_spread(
    tmp_path: Path,
) -> None:
    eight = ", memory: 200G, tasks_per_node: 8, micro_tokens: 4096, sharding: "
    name = profile_of(tmp_path, ONE_GPU % f"{eight}zero2")
    stored = decoder(4096, 14_336, 32, 32, 8, 128_256, float32=False)
    assert estimator(tmp_path, name, params_of(), LLAMA["8B"]).refusal("sft") is None
    said = estimator(tmp_path, name, params_of(), stored).refusal("sft")
    assert said is not None
    assert "save the model's files in float32" in said
    assert "or set `stages.sft.sharding` to fsdp: each reads its part alone" in said
    for kind in ("zero3", "fsdp"):
        name = profile_of(tmp_path, ONE_GPU % f"{eight}{kind}")
        made = estimator(tmp_path, name, params_of(), stored)
        for stage in ("sft", "reward_model", "policy_update"):
            assert made.refusal(stage) is None
            use = made.use(stage)
            assert use is not None
            assert Part.LOADING not in use.needs.host.parts


def test_on_a_cpu_all_of_it_is_the_hosts(tmp_path: Path) -> None:
    name = profile_of(tmp_path, "executor: slurm\ndefaults: {memory: 16G, tasks_per_node: 2}\n")
    use = estimator(tmp_path, name, Params(), LLAMA["1B"]).use("sft")
    assert use is not None
    assert use.needs.gpu is None
    # Weights, gradients and moments in float32, of two ranks.
    assert use.needs.host.total > 2 * 16 * LLAMA["1B"].weights
    assert use.lacks_host


def test_without_the_profiles_word_nothing_is_refused(tmp_path: Path) -> None:
    name = profile_of(tmp_path, "executor: slurm\ndefaults: {device: cuda, gpus_per_node: 1}\n")
    made = estimator(tmp_path, name, params_of(), LLAMA["70B"])
    for stage in of_stages.STAGES:
        assert made.use(stage) is not None
        assert made.refusal(stage) is None


def test_a_model_that_is_not_there_is_not_estimated(tmp_path: Path) -> None:
    name = profile_of(tmp_path, ONE_GPU % "")
    params = params_of(model={"source": "folder", "folder": "nowhere", "max_length": 2048})
    made = Estimator(tmp_path, params, name, load_profile(tmp_path, name))
    assert made.unknown is not None
    assert "nowhere" in made.unknown
    assert [made.use(stage) for stage in of_stages.STAGES] == [None] * len(of_stages.STAGES)
    given = refuse_what_cannot_fit(tmp_path, params, name, made.profile, ["sft", "rollout@a"])
    assert given == []


@pytest.mark.parametrize("check", ["refuse", "warn", "off"])
def test_who_knows_better_is_warned_or_left_alone(tmp_path: Path, check: str) -> None:
    (tmp_path / "big").mkdir()
    config = {**MIXTRAL, "num_local_experts": 0}
    (tmp_path / "big/config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path / "big") is not None
    params = params_of(model={"source": "folder", "folder": "big", "max_length": 2048})
    name = profile_of(tmp_path, ONE_GPU % f", memory_check: {check}")
    profile = load_profile(tmp_path, name)
    asked = (tmp_path, params, name, profile, ["sft", "sft", "report", "code"])
    if check == "refuse":
        with pytest.raises(LockstepError, match=r"mine\.yaml: sft needs about .* `gpu_memory` is"):
            refuse_what_cannot_fit(*asked)
    else:
        assert len(refuse_what_cannot_fit(*asked)) == (check == "warn")
