"""Models that every rank loads whole, whatever is spread afterwards: estimated, and refused."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.memory import Estimator, find_shapes
from pipelines.config.profiles import load_profile
from stages.contracts.params import Params
from stages.memory.model import GIB, Part
from stages.memory.shape import ModelShape, decoder, shape_of
from stages.memory.work import Shapes
from tests.control.test_memory import LLAMA, MIXTRAL, params_of

RANKS = 8
POLICY = LLAMA["8B"]
BFLOAT16_FILES = replace(POLICY, float32=False)
ADAPTERS = {"lora": {"rank": 8, "save": "adapter"}}
FOLDER = {"reward_model": {"start": "folder"}}
JUDGE = {
    "rewards": {"judge": {"kind": "model", "folder": "judge"}},
    "rl": {"algorithm": "grpo", "reward": "judge"},
}


@dataclass(frozen=True)
class Case:
    stage: str
    sharding: str
    bytes_per_weight: int
    """Of host memory in every rank while the model is loaded."""
    params: dict[str, Any]
    policy: ModelShape = POLICY
    reward: ModelShape | None = None
    classifier: ModelShape | None = None

    def estimator(self, folder: Path, **memory: str) -> Estimator:
        given = {"device": "cuda", "gpus_per_node": RANKS, "tasks_per_node": RANKS, **memory}
        profile = {"executor": "slurm", "defaults": {"sharding": self.sharding, **given}}
        (folder / "slurm_profiles").mkdir(exist_ok=True)
        (folder / "slurm_profiles/mine.yaml").write_text(json.dumps(profile))
        params = params_of(self.params.get("rl", {}).get("algorithm", "ppo"), **self.params)
        made = Estimator(folder, params, "mine", load_profile(folder, "mine"))
        judges = {"judge": self.classifier} if self.classifier else {}
        made.shapes = Shapes(self.policy, self.reward or self.policy, None, judges)
        return made


CASES = {
    "zero1, rounded": Case("sft", "zero1", 2, {}),
    "zero2, bfloat16 files": Case("sft", "zero2", 4 + 2, {}, policy=BFLOAT16_FILES),
    "zero2, another adapter is merged": Case(
        "policy_update",
        "zero2",
        4 + 2,
        {**ADAPTERS, "rl": {"algorithm": "ppo", "reward": "verifier"}},
    ),
    "fsdp, a critic from a merged adapter": Case(
        "policy_update", "fsdp", 4, {**ADAPTERS, "rl": {"algorithm": "ppo", "reward": "verifier"}}
    ),
    "fsdp, a reference that is an adapter": Case("score", "fsdp", 4 + 2, ADAPTERS),
    "fsdp, a classifier to learn from": Case(
        "reward_model", "fsdp", 4, FOLDER, reward=replace(BFLOAT16_FILES, classifier=True)
    ),
    "fsdp, experts": Case("sft", "fsdp", 4, {}, policy=shape_of(MIXTRAL)),
    "fsdp, a classifier that rates": Case(
        "score",
        "fsdp",
        4,
        {**JUDGE, "score": {"reference": False}, "policy_update": {"kl_coef": 0.0}},
        classifier=replace(BFLOAT16_FILES, classifier=True),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_every_rank_loads_is_counted_and_refused_by_its_name(
    tmp_path: Path, case: Case
) -> None:
    use = case.estimator(tmp_path).use(case.stage)
    assert use is not None
    host = use.needs.host
    assert host.when == "loading"
    loaded = case.classifier or case.reward or case.policy
    whole = RANKS * case.bytes_per_weight * loaded.weights
    assert host.parts[Part.LOADING] == pytest.approx(whole, rel=0.08), "a head more or less"
    enough, short = (f"{round(host.total / GIB) + more}G" for more in (2, -20))
    assert case.estimator(tmp_path, memory=enough).refusal(case.stage) is None
    said = str(case.estimator(tmp_path, memory=short).refusal(case.stage))
    assert f"of each node while loading (loading {host.parts[Part.LOADING] / GIB:.0f}G" in said


def test_what_is_read_by_rows_is_not(tmp_path: Path) -> None:
    dense = (
        Case("sft", "fsdp", 0, {}, policy=BFLOAT16_FILES),
        Case("score", "zero3", 0, {}),
        Case("policy_update", "fsdp", 0, ADAPTERS),
        Case("reward_model", "fsdp", 0, FOLDER, reward=BFLOAT16_FILES),
    )
    for case in dense:
        use = case.estimator(tmp_path).use(case.stage)
        assert use is not None
        assert Part.LOADING not in use.needs.host.parts, case.stage


@pytest.mark.parametrize("stage", ["score", "evaluate", "online"])
def test_a_classifier_that_rates_is_named_where_it_does_not_fit_a_gpu(
    tmp_path: Path, stage: str
) -> None:
    """Whole in every rank, in its own precision, beside a policy that is spread."""
    params = {**JUDGE, "rollout": {"engine": "torch", "max_new_tokens": 64, "batch_size": 8}}
    case = Case(stage, "fsdp", 0, params, policy=LLAMA["1B"], classifier=LLAMA["8B"])
    made = case.estimator(tmp_path, gpu_memory="24G")
    use = made.use(stage)
    assert use is not None
    assert use.needs.gpu is not None
    assert use.needs.gpu.parts[Part.CLASSIFIER] == 4 * LLAMA["8B"].backbone
    assert "(classifier 28G" in str(made.refusal(stage))
    assert case.estimator(tmp_path, gpu_memory="80G").refusal(stage) is None


def test_the_sizes_of_a_classifier_come_from_its_folder(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16, "vocab_size": 128_100, "model_type": "deberta-v2"}
    (tmp_path / "rewards/judge").mkdir(parents=True)
    named = {**sizes, "architectures": ["DebertaV2ForSequenceClassification"]}
    (tmp_path / "rewards/judge/config.json").write_text(json.dumps(named))
    params = Params.model_validate({**JUDGE, "score": {"folder": "rewards"}})
    shape = find_shapes(tmp_path, params).classifiers["judge"]
    assert shape.classifier
    assert shape.backbone == pytest.approx(434e6, rel=0.02)
    assert not decoder(128, 256, 2, 2, 1, 256).classifier
