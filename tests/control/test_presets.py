"""Presets: each that ships is valid, says what its origin says, and changes only what it names."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import dumps_yaml
from ruamel.yaml import YAML

from pipelines.base.errors import LockstepError
from pipelines.commands.cli import main
from pipelines.config.params import load_params
from pipelines.config.presets import (
    Preset,
    assignments,
    load_presets,
    merge,
    preset_files,
    write,
)
from stages.contracts.params import Params

ROOT = Path(__file__).resolve().parents[2]
FILES = preset_files(ROOT)
PRESETS = [name for name, path in FILES.items() if path.parent.name == "presets"]
RECIPES = [name for name in FILES if name not in PRESETS]

PEERS = ("trl", "trl-ppo", "openrlhf", "verl", "verl-grpo", "nemo-rl")
POLICY_GRADIENTS = (
    "ppo", "grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce-pp", "remax"
)  # fmt: skip
OTHERS = ("online-dpo", "spin", "best-of-n", "distill")
READ_BY_PPO_ONLY = {
    "policy_update.critic_learning_rate",
    "policy_update.critic_warmup_epochs",
    "policy_update.gae_lambda",
    "policy_update.value_clip",
}
READ_BY_GRPO_ONLY = {"policy_update.normalise_by_std"}
READ_BY_NO_POLICY_GRADIENT = {"policy_update.chosen", "policy_update.dpo_reference"}

# What the peers' own files say, by hand: each claim that a preset makes, by section.
PUBLISHED = YAML(typ="safe").load("""
trl:
  rl: {algorithm: grpo}
  rollout: {samples: 8, max_new_tokens: 512, temperature: 1.0}
  policy_update: {
    clip_low: 0.2, clip_high: 0.2, dual_clip: null,
    kl_in: loss, kl_estimator: k3_unbiased, kl_coef: 0.0,
    aggregation: token_mean, normalise_by_std: true,
    learning_rate: 1e-06, schedule: linear, warmup_steps: 0,
    beta1: 0.9, beta2: 0.999, weight_decay: 0.0, decay_norms_and_biases: false, adam_epsilon: 1e-08,
    mismatch: sequence_mask, mismatch_cap: 3.0}
trl-ppo:
  rl: {algorithm: ppo}
  rollout: {max_new_tokens: 53, temperature: 0.7}
  policy_update: {
    clip_low: 0.2, clip_high: 0.2,
    kl_in: reward, kl_estimator: k1, kl_coef: 0.05,
    learning_rate: 3e-06,
    epochs: 4,
    gamma: 1.0, gae_lambda: 0.95, value_clip: 0.2}
openrlhf:
  rl: {algorithm: ppo}
  model: {max_length: 2048}
  rollout: {prompts: 1024, samples: 1, temperature: 1.0}
  score: {clip: 10.0}
  policy_update: {
    clip_low: 0.2, clip_high: 0.2, dual_clip: null,
    kl_in: reward, kl_estimator: k1, kl_coef: 0.01,
    aggregation: token_mean,
    learning_rate: 1e-06, critic_learning_rate: 9e-06, schedule: cosine, min_learning_rate: 0.1,
    beta1: 0.9, beta2: 0.95, weight_decay: 0.0, decay_norms_and_biases: false, adam_epsilon: 1e-08,
    batch_size: 128,
    gamma: 1.0, gae_lambda: 1.0, value_clip: 0.5,
    mismatch: none, mismatch_cap: 5.0, mismatch_floor: 0.5}
verl:
  rl: {algorithm: ppo}
  rollout: {prompts: 1024, samples: 1, max_new_tokens: 512, temperature: 1.0}
  score: {clip: null}
  policy_update: {
    clip_low: 0.2, clip_high: 0.2, dual_clip: 3.0,
    kl_estimator: k3, kl_coef: 0.0,
    aggregation: token_mean,
    learning_rate: 1e-06, critic_learning_rate: 1e-05, schedule: constant, warmup_steps: 0,
    beta1: 0.9, beta2: 0.999, weight_decay: 0.01, decay_norms_and_biases: true, adam_epsilon: 1e-08,
    batch_size: 256, epochs: 1,
    gamma: 1.0, gae_lambda: 1.0, value_clip: 0.5,
    mismatch: none, mismatch_cap: 2.0}
verl-grpo:
  rl: {algorithm: grpo}
  policy_update: {
    dual_clip: 3.0,
    kl_in: loss, kl_estimator: k3, kl_coef: 0.001,
    normalise_by_std: true}
nemo-rl:
  rl: {algorithm: grpo}
  model: {max_length: 512}
  rollout: {prompts: 32, samples: 16, temperature: 1.0}
  policy_update: {
    clip_low: 0.2, clip_high: 0.2, dual_clip: null,
    kl_in: loss, kl_estimator: k3, kl_coef: 0.01,
    aggregation: token_mean, normalise_by_std: true, leave_one_out: true,
    learning_rate: 5e-06, schedule: constant, warmup_steps: 50,
    weight_decay: 0.01, decay_norms_and_biases: true, adam_epsilon: 1e-08,
    batch_size: 512,
    mismatch: none}
""")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that passes for a clone: the shipped params.yaml, presets and recipes."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "presets", tmp_path / "presets")
    for path in (ROOT / "recipes").glob("*/params.yaml"):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "dvc.yaml").write_text("")
    return tmp_path


@pytest.fixture
def here(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(root)
    return root


def flat(params: Params) -> dict[str, Any]:
    found = {}
    for name, value in params.model_dump(mode="json").items():
        inner = value if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{key}".rstrip("."): each for key, each in inner.items()}
    return found


@functools.cache
def shipped(name: str) -> Preset:
    return load_presets(ROOT, [name])[0]


@functools.cache
def applied(*names: str) -> dict[str, Any]:
    """What the shipped params become, by dotted key; without the detour by a file. To be read."""
    values = Params().model_dump(mode="json")
    for name in names:
        for key, value in assignments(shipped(name)):
            within = values[key[0]] if len(key) > 1 else values
            within[key[-1]] = value
    return flat(Params.model_validate(values))


def write_preset(root: Path, name: str, text: str) -> None:
    (root / "presets" / f"{name}.yaml").write_text(text)


def refused(root: Path, *names: str) -> str:
    before = (root / "params.yaml").read_bytes()
    with pytest.raises(LockstepError) as caught:
        write(root, merge(root, load_presets(root, names)))
    assert (root / "params.yaml").read_bytes() == before
    return str(caught.value)


def test_the_lists_above_name_every_preset_that_ships() -> None:
    assert sorted([*PEERS, *POLICY_GRADIENTS, *OTHERS]) == PRESETS


@pytest.mark.parametrize("name", FILES)
def test_every_preset_applies_and_then_has_nothing_left_to_change(root: Path, name: str) -> None:
    presets = load_presets(root, [name])
    merged = merge(root, presets)
    write(root, merged)
    assert flat(load_params(root)) == applied(name)
    again = merge(root, presets)
    assert again.changes == []
    assert again.text == merged.text


def test_ppo_is_what_params_yaml_ships_with() -> None:
    assert merge(ROOT, load_presets(ROOT, ["ppo"])).changes == []


@pytest.mark.parametrize("peer", PUBLISHED)
def test_peers_say_what_the_peers_default_to(peer: str) -> None:
    result = applied(peer)
    for section, values in PUBLISHED[peer].items():
        assert {key: result[f"{section}.{key}"] for key in values} == values


@pytest.mark.parametrize("peer", ["trl", "trl-ppo", "openrlhf"])
def test_decays_end_with_the_iterations_that_ship(peer: str) -> None:
    result = applied(peer)
    responses = result["rollout.prompts"] * result["rollout.samples"]
    steps = responses * result["policy_update.epochs"] // result["policy_update.batch_size"]
    assert result["policy_update.decay_steps"] == steps * len(Params().rl.iterations)


@pytest.mark.parametrize("last", [*PEERS, *POLICY_GRADIENTS, *RECIPES])
def test_nothing_that_is_read_is_left_of_an_earlier_preset(last: str) -> None:
    earlier = [*POLICY_GRADIENTS, *OTHERS, *(PEERS if last in PEERS else ())]
    if last in RECIPES:
        earlier += RECIPES
    alone = applied(last)
    unread = set(READ_BY_NO_POLICY_GRADIENT)
    if alone["rl.algorithm"] != "ppo":
        unread |= READ_BY_PPO_ONLY
    if alone["rl.algorithm"] != "grpo":
        unread |= READ_BY_GRPO_ONLY
    if alone["sft.epochs"] == 0:
        unread |= {"sft.learning_rate", "sft.batch_size"}
    if alone["rollout.environment"] is None:
        unread |= {"rollout.max_turns", "rollout.max_observation_tokens"}
    if alone["rl.reward"] != "reward_model":
        unread |= {key for key in alone if key.startswith("reward_model.")}
    for first in earlier:
        after = applied(first, last)
        left = {key for key in alone if after[key] != alone[key]} - unread
        assert not left, f"{first} before {last} leaves {left}"


@pytest.mark.parametrize("last", PRESETS)
def test_any_two_presets_go_together(last: str) -> None:
    for first in PRESETS:
        wanted = shipped(last)
        result = applied(first, last)
        for section, key in wanted.settings():
            assert result[f"{section}.{key}"] == wanted.params[section][key]


def test_comments_order_and_other_values_survive(root: Path) -> None:
    before = (root / "params.yaml").read_text().splitlines()
    merged = merge(root, load_presets(root, ["trl"]))
    write(root, merged)
    after = (root / "params.yaml").read_text().splitlines()
    assert [line.partition(":")[0] for line in before] == [line.partition(":")[0] for line in after]
    assert [line.partition("#")[2] for line in before] == [line.partition("#")[2] for line in after]
    changed = [old for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == len(merged.changes)
    assert "  learning_rate: 1.0e-6" in after


def test_keys_that_params_yaml_leaves_out_are_added(root: Path) -> None:
    (root / "params.yaml").write_text("seed: 3   # mine\n\nrollout:\n  samples: 4\n\nsft: {}\n")
    write(root, merge(root, load_presets(root, ["grpo"])))
    text = (root / "params.yaml").read_text()
    assert text.startswith("seed: 3   # mine\n\nrollout:\n")
    params = load_params(root)
    assert (params.seed, params.rollout.samples, params.rl.algorithm) == (3, 8, "grpo")


def test_a_file_without_changes_is_left_byte_for_byte(root: Path) -> None:
    odd = "rl:   {algorithm: ppo}\n"
    (root / "params.yaml").write_text(odd)
    assert merge(root, load_presets(root, ["ppo"])).text == odd


def test_a_mapping_is_replaced_as_a_whole(root: Path) -> None:
    write_preset(
        root, "one", "description: one\nparams: {rl: {iterations: {only: {policy: sft}}}}\n"
    )
    write(root, merge(root, load_presets(root, ["one"])))
    assert list(load_params(root).rl.iterations) == ["only"]


def test_unknown_key_in_a_preset_is_refused_with_file_line_and_the_nearest(root: Path) -> None:
    write_preset(root, "bad", "description: bad\nparams:\n  policy_update:\n    clip_hihg: 0.3\n")
    message = refused(root, "bad")
    assert "presets/bad.yaml:4: unknown key `params.policy_update.clip_hihg`" in message
    assert "did you mean `params.policy_update.clip_high`?" in message


def test_wrong_type_and_missing_description_are_refused(root: Path) -> None:
    write_preset(root, "bad", "params:\n  rollout:\n    samples: many\n")
    message = refused(root, "bad")
    assert "key `description` is missing" in message
    assert "`params.rollout.samples` is 'many' (str)" in message


def test_contradiction_is_refused_with_file_and_key(root: Path) -> None:
    write_preset(
        root, "bad", "description: bad\nparams: {rl: {algorithm: grpo}, rollout: {samples: 1}}\n"
    )
    message = refused(root, "bad")
    assert "presets/bad.yaml" in message
    assert "rollout.samples is 1: set it to 2 or more" in message


def test_what_contradicts_the_defaults_may_agree_with_params_yaml(root: Path) -> None:
    write_preset(root, "long", "description: long\nparams: {rollout: {max_new_tokens: 200}}\n")
    assert "leaves no room for a prompt in model.max_length 48" in refused(root, "long")
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(text.replace("max_length: 48", "max_length: 512"))
    assert [change.new for change in merge(root, load_presets(root, ["long"])).changes] == [200]


def test_mistakes_of_params_yaml_itself_are_said_of_it(root: Path) -> None:
    (root / "params.yaml").write_text("sede: 1\n")
    assert "params.yaml:1: unknown key `sede`" in refused(root, "grpo")
    (root / "params.yaml").write_text("rl: 3\n")
    assert "params.yaml: `rl` must be a section" in refused(root, "grpo")


def test_a_preset_mends_params_that_contradict_each_other(root: Path) -> None:
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(text.replace("algorithm: ppo ", "algorithm: remax "))
    write(root, merge(root, load_presets(root, ["remax"])))
    assert load_params(root).rollout.greedy_baseline


def test_unknown_names_are_refused_with_the_nearest_and_all(root: Path) -> None:
    message = refused(root, "dappo")
    assert "unknown preset 'dappo'; did you mean 'dapo'?" in message
    assert "best-of-n, cispo, dapo" in message
    assert "unknown preset '../params'" in refused(root, "../params")


def test_the_command_lists_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preset"]) == 0
    listed = capsys.readouterr().out
    for preset in load_presets(here):
        assert preset.description in listed
    assert main(["preset", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(preset_files(here))
    assert rows[0]["params"]["rl"] == {"algorithm": "best_of_n"}


def test_the_command_says_what_changes_and_dry_run_changes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (here / "params.yaml").read_bytes()
    assert main(["preset", "dapo", "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert "policy_update.clip_high     0.2 -> 0.28" in dry
    assert (here / "params.yaml").read_bytes() == before

    assert main(["preset", "dapo"]) == 0
    wet = capsys.readouterr().out
    assert wet.splitlines()[:-1] == dry.splitlines()[:-1]
    assert "lockstep plan" in wet
    assert load_params(here).policy_update.clip_high == 0.28

    assert main(["preset", "dapo"]) == 0
    assert "nothing to change" in capsys.readouterr().out


def test_later_presets_go_over_earlier_ones(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preset", "trl", "grpo", "--json"]) == 0
    changes = {row["key"]: (row["old"], row["new"]) for row in json.loads(capsys.readouterr().out)}
    assert changes["policy_update.learning_rate"] == (2e-4, 1e-6)
    assert changes["policy_update.kl_coef"] == (0.3, 0.04)
    assert load_params(here).policy_update.kl_coef == 0.04


@pytest.mark.usefixtures("here")
def test_a_refusal_ends_the_command_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preset", "nope"]) == 2
    assert "unknown preset 'nope'" in capsys.readouterr().err


def test_the_command_needs_neither_torch_nor_dvc(clone: Any) -> None:
    program = (
        "import sys; from pipelines.commands.cli import main; main(['preset', 'trl']); "
        "print({'torch', 'dvc', 'prefect', 'mlflow'} & set(sys.modules))"
    )
    assert "set()" in clone.run("python", "-c", program).stdout


def peer_table() -> str:
    """The peers' presets side by side, as docs/presets.md shows them."""
    presets = load_presets(ROOT, PEERS)
    known = flat(Params())
    keys = [key for key in known if any(_said(preset, key) for preset in presets)]
    rows = [["", "ships", *PEERS], ["---"] * (2 + len(PEERS))]
    rows += [
        [f"`{key}`", _cell(known[key]), *(_said(preset, key) for preset in presets)] for key in keys
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _said(preset: Preset, key: str) -> str:
    section, _, name = key.partition(".")
    values = preset.params.get(section, {})
    return _cell(values[name]) if isinstance(values, dict) and name in values else ""


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_table_in_the_docs_is_what_the_files_say() -> None:
    page = (ROOT / "docs/presets.md").read_text()
    shown = page.split("<!-- peers -->\n")[1].split("<!-- end of peers -->")[0]
    assert shown == peer_table(), f"put this between the marks in docs/presets.md:\n{peer_table()}"


def test_the_docs_name_every_algorithm() -> None:
    page = (ROOT / "docs/presets.md").read_text()
    for preset in load_presets(ROOT, [*POLICY_GRADIENTS, *OTHERS]):
        assert f"| `{preset.name}` | {preset.description} |" in page


def test_what_dvc_writes_stays_as_it_was(tmp_path: Path) -> None:
    """Representers belong to classes, and a process may write params.yaml and dvc.lock."""
    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    assert "dual_clip: null" in merge(tmp_path, load_presets(ROOT, ["trl"])).text
    assert dumps_yaml({"nothing": None}) == "nothing:\n"
