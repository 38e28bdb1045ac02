"""What is special about vLLM. test_vllm.py runs these in a process that has it."""

import shutil
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.context import StageError
from stages.contracts.lora import LoraParams, LoraSave
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.data.artifacts import read_parquet
from stages.data.batching import collate
from stages.data.schema import RolloutRow
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.generation.generator import GeneratorSettings, Request, Sampling
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.models.folders import content_hash, folder_hash, load_policy, save_model
from stages.engines.models.lora import open_for_training
from stages.environments.turns import read_turns
from tests.stages.test_elision import ELIDES, TALKS, elided_by_hand
from tests.stages.test_generators import tiny_llama

# Longer than the blocks that vLLM caches, so that a stale cache would be used.
LONG = [1, *(4 + i % 20 for i in range(300))]
REQUESTS = [Request(prompt, seed=i) for i in range(3) for prompt in (LONG, [1, 5, 6])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def generator(one_vllm, folder):
    return one_vllm(folder)


def answers_as(generator, policy, temperature=1.5):
    """The log-probs of its answers are those that the policy gives, within rounding."""
    completions = generator.generate(
        REQUESTS, max_new_tokens=8, sampling=Sampling(temperature=temperature)
    )
    for request, completion in zip(REQUESTS, completions, strict=True):
        batch = collate([request.prompt_ids], [completion.ids], pad_id=0)
        with torch.no_grad():
            expected = response_logprobs(policy, batch, temperature).logprobs[0].tolist()
        if completion.logprobs != pytest.approx(expected, abs=2e-5):
            return False
    return generator.policy_hash == content_hash(policy)


def test_nothing_of_the_old_weights_is_in_an_answer_of_the_new(generator, folder, tmp_path):
    other = tiny_llama(tmp_path, seed=1)
    assert answers_as(generator, load_policy(folder))
    generator.load(other)
    assert answers_as(generator, load_policy(other))
    assert not answers_as(generator, load_policy(folder))


def test_a_weight_that_did_not_arrive_is_noticed_in_any_tensor(
    generator, folder, tmp_path, monkeypatch
):
    generator.load(folder)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker.reload_weights", lambda *_, **__: None)
    generator.load(folder)
    for name, tensor in weights.items():
        changed = tensor.clone()
        changed.view(-1)[-1] = changed.view(-1)[-1].nextafter(torch.tensor(9.0))
        save_file({**weights, name: changed}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(StageError, match="not what the file holds"):
            generator.load(tmp_path)
        assert not generator.policy_hash


def test_a_weight_that_did_not_come_through_memory_is_noticed_in_any_tensor(generator, folder):
    policy = load_policy(folder)
    named = dict(policy.named_parameters())
    generator.take(named.items())
    generator.compare(named.items())
    for name, tensor in named.items():
        changed = tensor.detach().clone()
        changed.view(-1)[-1] = changed.view(-1)[-1].nextafter(torch.tensor(9.0))
        with pytest.raises(StageError, match=r"tensor \S+ in memory is not what the learner holds"):
            generator.compare({**named, name: changed}.items())
    short = dict(named)
    del short["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(StageError, match=r"the policy has no tensor .*k_proj"):
        generator.compare(short.items())
    with pytest.raises(StageError, match="no place for"):
        generator.compare([*named.items(), ("model.extra.weight", torch.zeros(2))])


@pytest.mark.parametrize("change", ["without a tensor", "with one too many"])
def test_files_that_do_not_fit_the_model_are_refused(generator, folder, tmp_path, change):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    if change == "without a tensor":
        del weights["model.layers.1.self_attn.k_proj.weight"]
    else:
        weights["model.extra.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"k_proj|extra"):
        generator.load(tmp_path)
    generator.load(folder)
    assert answers_as(generator, load_policy(folder))


def test_an_adapter_answers_merged(generator, folder, tmp_path):
    lora = LoraParams(rank=2, save=LoraSave.ADAPTER)
    model = open_for_training(lambda path, _: load_policy(path), folder, "cpu", lora, seed=3)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    save_model(model, tmp_path / "adapter", tokenizer_from=folder, lora=lora)
    shutil.copytree(folder, tmp_path / "adapter/base", dirs_exist_ok=True)
    generator.load(tmp_path / "adapter")
    assert answers_as(generator, load_policy(tmp_path / "adapter"))
    assert not answers_as(generator, load_policy(folder))


def test_what_it_cannot_do_is_refused(generator, folder):
    for cut in (Sampling(top_p=0.9), Sampling(top_k=3), Sampling(min_p=0.1)):
        with pytest.raises(StageError, match=r"rollout\.engine: torch"):
            generator.generate(REQUESTS, max_new_tokens=8, sampling=cut)
    for temperature in (0.001, 3.0):
        with pytest.raises(StageError, match="temperatures from"):
            generator.generate(REQUESTS, max_new_tokens=8, sampling=Sampling(temperature))
    with pytest.raises(StageError, match="one vLLM at a time"):
        VllmGenerator(folder, GeneratorSettings("cpu", Precision.FLOAT32, 4))
    with pytest.raises(StageError, match="context of 512"):
        generator.generate(REQUESTS, max_new_tokens=300, sampling=Sampling())
    with pytest.raises(StageError, match="CUDA_VISIBLE_DEVICES"):
        VllmGenerator(folder, GeneratorSettings("cuda:1", Precision.FLOAT32, 4))


def test_the_hash_of_a_folder_is_that_of_what_is_loaded(folder, tmp_path):
    tied = tiny_llama(tmp_path, tie_word_embeddings=True)
    for path in (folder, tied):
        for precision in Precision:
            loaded = load_policy(path, "cpu", precision)
            assert folder_hash(path, precision) == content_hash(loaded)


def test_weights_through_memory_answer_as_those_of_their_folder(generator, tmp_path, monkeypatch):
    monkeypatch.setattr("stages.engines.generation.weight_pieces.PIECE_BYTES", 2000)
    for options in ({}, {"tie_word_embeddings": True}):
        paths = enumerate([tmp_path / f"first-{options}", tmp_path / f"second-{options}"])
        first, second = (tiny_llama(path, seed, **options) for seed, path in paths)
        generator.load(second)
        expected = generator.generate(REQUESTS, max_new_tokens=8, sampling=Sampling())
        generator.load(first)
        policy = load_policy(second)
        generator.take(policy.named_parameters())
        assert not generator.policy_hash, "until somebody says of which policy they are"
        generator.compare(policy.named_parameters())
        answers = generator.generate(REQUESTS, max_new_tokens=8, sampling=Sampling())
        assert answers == expected


def test_a_model_of_another_shape_takes_its_place(generator, tmp_path):
    other = tiny_llama(
        tmp_path, num_hidden_layers=1, tie_word_embeddings=True, rope_parameters={"rope_theta": 500}
    )
    generator.load(other)
    assert answers_as(generator, load_policy(other))


def test_of_a_context_only_what_is_asked_for_has_to_fit_the_cache(one_vllm, folder, tmp_path):
    """The cache has a GiB (SETTINGS): half of what the whole context of this model takes."""
    one_vllm.close()
    large = tiny_llama(
        tmp_path,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2**18,
    )
    with pytest.raises(StageError, match="does not run the model"):
        VllmGenerator(large, GeneratorSettings("cpu", Precision.FLOAT32, 4))
    # That much of it is asked for is no promise that a model has it.
    settings = GeneratorSettings("cpu", Precision.FLOAT32, 4, longest=513)
    with closing(VllmGenerator(large, settings)) as generator:
        assert answers_as(generator, load_policy(large))
        generator.load(folder)
        assert answers_as(generator, load_policy(folder))
        with pytest.raises(StageError, match="context of 512"):
            generator.generate(REQUESTS, max_new_tokens=300, sampling=Sampling())


def test_an_update_learns_from_its_rollouts(runner, one_vllm):
    """Of long episodes, whose old observations are elided; the greedy ones are torch's."""
    one_vllm.close()
    run = runner(
        # Its whole context would not fit the cache.
        model={"hidden_size": 128, "num_heads": 2, "num_layers": 4, "max_length": 2**19},
        rollout={
            "engine": "vllm", "temperature": 0.9, "greedy_baseline": True, "max_turns": 9,
            "environment": "talks:Talks", "max_new_tokens": 24, "max_observation_tokens": 16,
        },
        rl={"algorithm": "remax"},
        episodes=ELIDES,
    )  # fmt: skip
    (run.root / "environments/talks.py").write_text(TALKS)
    for address in ("prepare", "sft", "reward_model", "rollout@iter_001", "score@iter_001"):
        run.run(address)
    metrics = run.run("policy_update@iter_001")
    rollouts = run.paths("rollout@iter_001")[1]["rollouts"]
    folder = run.paths("rollout@iter_001")[0]["policy"]
    policy = load_policy(folder)
    rows = read_parquet(rollouts, RolloutRow)
    assert {row["policy_hash"] for row in rows} == {content_hash(policy)}
    assert 0 < metrics["logprob_gap_max"] < 2e-5
    turns = read_turns(folder, "user", "13579")
    for row in rows:
        segments, *_ = elided_by_hand(row, turns, run.params.episodes, 24)
        assert list(zip(row["segment_starts"], row["segment_histories"], strict=True)) == segments
    assert max(len(row["segment_starts"]) for row in rows) > 1
    with_torch = run.params.rollout.model_copy(update={"engine": Engine.TORCH})
    run.params = run.params.model_copy(update={"rollout": with_torch})
    run.run("rollout@iter_001")
    same = ("prompt_ids", "response_ids", "loss_mask", "segment_starts", "segment_histories")
    greedy = [
        [[row[name] for name in same] for row in each if row["greedy"]]
        for each in (rows, read_parquet(rollouts, RolloutRow))
    ]
    assert greedy[0] == greedy[1]
    assert any(row[3] for row in greedy[0])
