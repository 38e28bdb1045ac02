"""Shards share out rollout and score: same bytes however many there are and whatever happens."""

import importlib
import random
import shutil
import sys

import pytest
import torch

import stages.engines.models.folders
import stages.rewards.model
import stages.rollout
from stages.context import Context, ShareDone, Stopped
from stages.contracts.catalog import bind
from stages.data.artifacts import read_parquet
from stages.data.schema import RolloutRow
from stages.engines.forward import inference
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.processes import parts
from tests.stages.conftest import Runner, rewrite_weights
from tests.stages.forks import FORKS

ROLLOUT, SCORE = "rollout@iter_001", "score@iter_001"
SMALL_BATCHES = {"batch_size": 4}
"""18 rows make five units, the last one smaller, in rollout and, with units of four, in score."""
NUM_UNITS = 5


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    monkeypatch.setattr("stages.engines.forward.inference.UNIT_ROWS", 4)
    monkeypatch.setattr("stages.rewards.source.UNIT_ROWS", 4)


@pytest.fixture
def runner(copied):
    """A copy of the trained run, with many small units."""
    return copied(rollout=SMALL_BATCHES)


@pytest.fixture
def expected(runner, tmp_path):
    """What one process that is left in peace writes, with its metrics."""

    def alone(address):
        result = share(runner, address, tmp_path / "alone")
        shutil.rmtree(runner.root / "jobs" / address)
        return result

    return alone


def context(runner, address, **options):
    return runner.context(address, **{"micro_tokens": 50, **options})


def share(runner, address, out_folder, ctx=None, **options):
    """Run one shard: the contents of its outputs and its metrics. Scratch is left as it is."""
    bound = bind(address, runner.params)
    out_folder.mkdir(parents=True, exist_ok=True)
    outs = {name: out_folder / name for name in bound.outs}
    run = importlib.import_module(bound.stage.module).run
    ctx = ctx or context(runner, address, **options)
    metrics = run(bound.config, runner.paths(address)[0], outs, ctx)
    contents = {name: runner.contents(path) for name, path in outs.items()}
    shutil.rmtree(out_folder)
    return contents, metrics


def all_parts(runner, address):
    return sorted((runner.root / "jobs" / address / "scratch/parts").glob("*/*.json"))


@pytest.fixture
def computed(monkeypatch):
    """The rows whose results are computed, as (pass, what identifies the row)."""
    rows: list = []
    generate = TorchGenerator.generate
    rewards, logprobs = stages.rewards.model.sequence_rewards, inference.response_logprobs

    def sampling(generator, requests, **options):
        rows.extend(("responses", request.seed) for request in requests)
        return generate(generator, requests, **options)

    def of_batch(name, function):
        def compute(model, batch, *options):
            rows.extend((name, tuple(ids)) for ids in batch.ids.tolist())
            return function(model, batch, *options)

        return compute

    monkeypatch.setattr(TorchGenerator, "generate", sampling)
    monkeypatch.setattr("stages.rewards.model.sequence_rewards", of_batch("rewards", rewards))
    monkeypatch.setattr(inference, "response_logprobs", of_batch("reference", logprobs))
    return rows


@pytest.fixture
def loaded(monkeypatch):
    """The models that are loaded, by their folder's name."""
    names: list = []
    load = stages.engines.models.folders._load

    def counted(auto_class, folder, *how, **options):
        names.append(folder.name)
        return load(auto_class, folder, *how, **options)

    monkeypatch.setattr("stages.engines.models.folders._load", counted)
    return names


@pytest.mark.parametrize("address", [ROLLOUT, SCORE])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_the_bytes_do_not_depend_on_the_number_or_the_order_of_shards(
    runner, expected, tmp_path, address, num_shards
):
    wanted = expected(address)
    order = random.Random(num_shards).sample(range(num_shards), num_shards)
    waiting = {shard for shard in order if shard < NUM_UNITS}
    for shard in order:
        waiting.discard(shard)
        options = {"shard": shard, "num_shards": num_shards}
        if waiting:
            with pytest.raises(ShareDone):
                share(runner, address, tmp_path / "out", **options)
        else:
            assert share(runner, address, tmp_path / "out", **options) == wanted


@pytest.mark.parametrize("address", [ROLLOUT, SCORE])
def test_a_shard_computes_its_own_share_and_no_other(runner, tmp_path, computed, address):
    share(runner, address, tmp_path / "out")
    everything = sorted(computed)
    shutil.rmtree(runner.root / "jobs" / address)
    shares = []
    for shard in range(3):
        computed.clear()
        try:
            share(runner, address, tmp_path / "out", shard=shard, num_shards=3)
        except ShareDone:
            assert shard < 2
        shares.append(list(computed))
    assert sorted(row for rows in shares for row in rows) == everything
    sizes = [len(rows) for rows in shares]
    passes = len({name for name, _ in everything})
    assert sizes == [8 * passes, 6 * passes, 4 * passes]


def one_shard(root, out, shard):
    """A shard of the rollout, in a process of its own."""
    torch.set_num_threads(1)
    runner = Runner(root, rollout=SMALL_BATCHES)
    outs = {"rollouts": out, "tool_answers": out.with_suffix(".answers")}
    ctx = context(runner, ROLLOUT, shard=shard, num_shards=3)
    try:
        stages.rollout.run(bind(ROLLOUT, runner.params).config, runner.paths(ROLLOUT)[0], outs, ctx)
    except ShareDone:
        sys.exit(3)


def test_shards_that_run_at_the_same_time_need_no_locks(runner, expected, tmp_path):
    wanted, _ = expected(ROLLOUT)
    outs = [tmp_path / f"out-{shard}" for shard in range(3)]
    processes = [
        FORKS.Process(target=one_shard, args=(runner.root, out, shard))
        for shard, out in enumerate(outs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    assert set(codes) <= {0, 3}
    assert 0 in codes
    for code, out in zip(codes, outs, strict=True):
        assert out.exists() == (code == 0)
        if code == 0:
            assert runner.contents(out) == wanted["rollouts"]


@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_a_stopped_rollout_computes_only_what_is_left(
    runner, expected, tmp_path, monkeypatch, computed, stop_after
):
    wanted = expected(ROLLOUT)
    computed.clear()
    ctx = context(runner, ROLLOUT)
    generate = TorchGenerator.generate

    def until_stopped(*args, **options):
        if len(computed) >= 4 * (stop_after - 1):
            ctx.request_stop()
        return generate(*args, **options)

    monkeypatch.setattr(TorchGenerator, "generate", until_stopped)
    with pytest.raises(Stopped):
        share(runner, ROLLOUT, tmp_path / "out", ctx)
    assert len(computed) == 4 * stop_after
    assert share(runner, ROLLOUT, tmp_path / "out") == wanted
    assert len(computed) == len(set(computed)) == 18


@pytest.mark.parametrize("num_computed", [6, 18, 24])
def test_an_interrupted_score_goes_on_in_either_pass(
    runner, expected, tmp_path, monkeypatch, computed, num_computed
):
    wanted = expected(SCORE)
    computed.clear()
    ctx = context(runner, SCORE)
    monkeypatch.setattr(ctx, "should_stop", lambda: len(computed) >= num_computed)
    with pytest.raises(Stopped):
        share(runner, SCORE, tmp_path / "out", ctx)
    stopped_at, of_whole_units = len(computed), {6: 4, 18: 18, 24: 22}[num_computed]
    assert share(runner, SCORE, tmp_path / "out") == wanted
    assert len(computed) == stopped_at + 36 - of_whole_units


@pytest.mark.parametrize("passes_done", range(3))
def test_an_interrupted_evaluation_ends_with_the_same_bytes(
    runner, expected, tmp_path, monkeypatch, passes_done
):
    wanted = expected("evaluate_sft")
    ctx = context(runner, "evaluate_sft")
    job = runner.root / "jobs/evaluate_sft"
    monkeypatch.setattr(
        ctx, "should_stop", lambda: len(list(job.glob("scratch/parts/*"))) > passes_done
    )
    with pytest.raises(Stopped):
        share(runner, "evaluate_sft", tmp_path / "out", ctx)
    assert share(runner, "evaluate_sft", tmp_path / "out") == wanted


def flip(data):
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize("damage", [flip, lambda data: data[:-9], lambda _: b"", lambda _: None])
@pytest.mark.parametrize("address", [ROLLOUT, SCORE])
def test_only_the_unit_of_a_damaged_or_missing_part_is_computed_again(
    runner, expected, tmp_path, computed, address, damage
):
    wanted = expected(address)
    share(runner, address, tmp_path / "out")
    path = all_parts(runner, address)[1]
    whole = path.read_bytes()
    damaged = damage(whole)
    path.unlink() if damaged is None else path.write_bytes(damaged)
    computed.clear()
    assert share(runner, address, tmp_path / "out") == wanted
    assert len(computed) == 4
    assert path.read_bytes() == whole


def test_nobody_writes_from_a_damaged_part_of_another_shard(runner, expected, tmp_path):
    wanted = expected(ROLLOUT)
    with pytest.raises(ShareDone):
        share(runner, ROLLOUT, tmp_path / "out", shard=0, num_shards=2)
    path = all_parts(runner, ROLLOUT)[0]
    path.write_bytes(flip(path.read_bytes()))
    with pytest.raises(ShareDone, match=f"{path.name} is not whole"):
        share(runner, ROLLOUT, tmp_path / "out", shard=1, num_shards=2)
    assert share(runner, ROLLOUT, tmp_path / "out", shard=0, num_shards=2) == wanted


@pytest.mark.parametrize("address", [ROLLOUT, SCORE])
def test_parts_of_an_attempt_with_another_number_of_shards_are_used(
    runner, expected, tmp_path, computed, address
):
    wanted = expected(address)
    everything = sorted(computed)
    computed.clear()
    with pytest.raises(ShareDone):
        share(runner, address, tmp_path / "out", shard=1, num_shards=2)
    with pytest.raises(ShareDone):
        share(runner, address, tmp_path / "out", shard=2, num_shards=3)
    assert share(runner, address, tmp_path / "out") == wanted
    assert sorted(computed) == everything


def test_parts_of_another_budget_of_tokens_are_not_used(runner, expected, tmp_path, computed):
    wanted = expected(SCORE)
    share(runner, SCORE, tmp_path / "out", micro_tokens=100)
    computed.clear()
    assert share(runner, SCORE, tmp_path / "out") == wanted
    assert len(computed) == 36


def change_weights(runner):
    path = runner.root / "artifacts/policies/sft/model/model.safetensors"
    rewrite_weights(path, lambda tensors: tensors["model.norm.weight"][0].add_(0.5))


def test_parts_that_other_weights_sampled_are_not_used(runner, expected, tmp_path):
    before = expected(ROLLOUT)
    with pytest.raises(ShareDone):
        share(runner, ROLLOUT, tmp_path / "out", shard=0, num_shards=2)
    change_weights(runner)
    # The second share is of other weights than the first, which has to be sampled again.
    with pytest.raises(ShareDone):
        share(runner, ROLLOUT, tmp_path / "out", shard=1, num_shards=2)
    mended = share(runner, ROLLOUT, tmp_path / "out", shard=0, num_shards=2)
    assert mended == expected(ROLLOUT) != before


def test_parts_that_are_all_there_keep_the_hash_the_weights_that_sampled_them(runner, tmp_path):
    share(runner, ROLLOUT, tmp_path / "out")
    sampled = runner.paths(ROLLOUT)[1]["rollouts"]
    hashes = {row["policy_hash"] for row in read_parquet(sampled, RolloutRow)}
    change_weights(runner)
    bound, out = bind(ROLLOUT, runner.params), tmp_path / "rollouts"
    inputs = runner.paths(ROLLOUT)[0]
    outs = {"rollouts": out, "tool_answers": tmp_path / "answers"}
    stages.rollout.run(bound.config, inputs, outs, context(runner, ROLLOUT))
    assert {row["policy_hash"] for row in read_parquet(out, RolloutRow)} == hashes


@pytest.mark.parametrize("address", [ROLLOUT, SCORE, "evaluate_sft"])
def test_no_model_is_loaded_when_nothing_is_missing(runner, expected, tmp_path, loaded, address):
    wanted = expected(address)
    share(runner, address, tmp_path / "out")
    loaded.clear()
    assert share(runner, address, tmp_path / "out") == wanted
    if address != "evaluate_sft":
        assert share(runner, address, tmp_path / "out", shard=6, num_shards=7) == wanted
    assert loaded == []


def test_a_model_is_loaded_only_for_the_pass_that_misses_something(runner, tmp_path, loaded):
    share(runner, SCORE, tmp_path / "out")
    all_parts(runner, SCORE)[-1].unlink()
    loaded.clear()
    share(runner, SCORE, tmp_path / "out")
    assert loaded == ["reward_model"]


@pytest.mark.parametrize("address", [ROLLOUT, SCORE])
def test_a_shard_beyond_the_units_loads_nothing_and_leaves(runner, tmp_path, loaded, address):
    with pytest.raises(ShareDone):
        share(runner, address, tmp_path / "out", shard=6, num_shards=7)
    assert loaded == []
    assert all_parts(runner, address) == []


def test_progress_counts_the_rows_of_all_shards(runner, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(Context, "progress", lambda _, *counts, **__: said.append(counts))
    monkeypatch.setattr(parts, "LOOK_INTERVAL_S", 0)
    for shard in range(2):
        with pytest.raises(ShareDone):
            share(runner, SCORE, tmp_path / "out", shard=shard, num_shards=3)
    share(runner, SCORE, tmp_path / "out", shard=2, num_shards=3)
    by_phase = {phase: [counts[:2] for counts in said if counts[2] == phase] for *_, phase in said}
    counts = [(done, 18) for done in (4, 8, 12, 14, 18)]
    assert by_phase == {"rewards from reward_model": counts, "reference log-probs": counts}


def test_a_part_that_is_being_written_is_not_seen(runner, tmp_path, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("stages.engines.processes.parts.os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        share(runner, ROLLOUT, tmp_path / "out")
    assert all_parts(runner, ROLLOUT) == []
