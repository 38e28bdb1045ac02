"""A stage that cannot fit is refused before anything is queued, by every way to start it."""

import json
from typing import Any

LARGE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
PROFILE = """\
executor: local
defaults: {device: cuda, gpus_per_node: 1, gpu_memory: 80G}
stages: {prepare: {device: cpu, gpus_per_node: 0}, report: {device: cpu, gpus_per_node: 0}}
"""


def test_what_cannot_fit_is_shown_and_refused_before_a_job_is_made(clone: Any) -> None:
    clone.without_tracking()
    (clone.root / "large").mkdir()
    (clone.root / "large/config.json").write_text(json.dumps(LARGE))
    (clone.root / "slurm_profiles/mine.yaml").write_text(PROFILE)
    clone.set_params(model__source="folder", model__folder="large", model__max_length=2048)
    mine = ("--profile", "mine")

    plan = clone.run("lockstep", "plan", *mine).stdout
    (sft,) = [line for line in plan.splitlines() if line.startswith("run     sft")]
    assert " of 80G, host " in sft
    assert "does not fit: slurm_profiles/mine.yaml: sft needs about" in plan
    by_disk = "rl.iterations: a policy of 8B weights goes from job to job by the disk"
    assert by_disk in plan
    assert by_disk in clone.run("lockstep", "doctor", check=False).stdout
    parts = clone.run("lockstep", "plan", *mine, "--memory").stdout
    assert "GPU while learning: " in parts
    assert "moments 60G" in parts
    assert "for sequences of up to 2048 tokens" in parts
    rows = {
        r["address"]: r for r in json.loads(clone.run("lockstep", "plan", *mine, "--json").stdout)
    }
    memory = rows["sft"]["memory"]
    assert not memory["fits"]
    assert memory["gpu"]["given"] == 80 << 30
    assert sum(memory["gpu"]["parts"].values()) == memory["gpu"]["bytes"] > memory["gpu"]["given"]
    assert rows["prepare"]["memory"] is None

    refused = clone.run("lockstep", "run", *mine, check=False)
    assert refused.returncode
    said = " ".join(refused.stdout.split())
    for stage in ("sft", "reward_model", "policy_update"):
        assert f"mine.yaml: {stage} needs about" in said
    assert "`gpu_memory` is 80G" in said
    assert "set `stages.sft.memory_check` to warn" in said

    # What DVC checks before it runs a stage's command.
    (clone.root / "artifacts/data").mkdir(parents=True)
    (clone.root / "artifacts/data/demonstrations.parquet").touch()
    (clone.root / "artifacts/base").mkdir()
    (clone.root / "artifacts/base/config.json").write_text(json.dumps(LARGE))
    repro = ("dvc", "repro", "--single-item", "sft")
    refused = clone.run(*repro, check=False, LOCKSTEP_PROFILE="mine")
    assert refused.returncode
    assert "sft needs about" in " ".join(refused.stdout.split())
    assert not list((clone.root / ".lockstep/jobs").glob("*/*")), "nothing was submitted"
