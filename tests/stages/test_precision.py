"""bfloat16: a rounded copy computes, float32 weights learn, and these are what is saved."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from stages.algorithms.loss import Loss
from stages.context import Context, StageError, Stopped
from stages.contracts.lora import LoraParams, LoraSave
from stages.contracts.precision import Precision
from stages.contracts.sharding import Sharding
from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.models.folders import content_hash, load_policy, save_model
from stages.engines.models.lora import open_for_training, unwrapped
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner
from stages.engines.training.loop import Plan, Work, counted, train
from stages.engines.training.optimizer import Learner
from tests.stages.conftest import everything
from tests.stages.test_lora import write_base

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")
BF16 = Precision.BFLOAT16
ALL = LoraParams()
ADAPTER = LoraParams(rank=3, alpha=6.0, save=LoraSave.ADAPTER)
MERGED = LoraParams(rank=3, alpha=6.0)
ROWS = [([3, 4, 5], [8, 9]), ([6, 7], [10, 11, 12]), ([9], [4]), ([3, 3, 8, 9], [5, 2])]


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


def a_learner(base, lora=ALL, rate=0.01, **options):
    model = open_for_training(load_policy, base, "cpu", lora, seed=1)
    how = Optimization(learning_rate=rate, max_grad_norm=1.0, precision=BF16, **options)
    return Learner(model, how)


def nll_of(learner, rows):
    prompts, responses = zip(*(ROWS[i] for i in rows), strict=True)
    said = response_logprobs(learner.model, collate(prompts, responses, 0), 1.0)
    return -said.logprobs.sum()


def masters(learner):
    return {name: value.detach().clone() for name, value in learner.named_parameters()}


def test_the_copy_computes_in_bfloat16_and_says_log_probs_in_float32(base):
    learner = a_learner(base)
    assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in learner.parameters()} == {torch.float32}
    assert learner.model.model.rotary_emb.inv_freq.dtype == torch.float32
    loss = nll_of(learner, range(4))
    assert loss.dtype == torch.float32
    plain = (
        -response_logprobs(load_policy(base), collate(*zip(*ROWS, strict=True), 0), 1.0)
        .logprobs.sum()
        .detach()
    )
    assert float(loss.detach()) == pytest.approx(float(plain), rel=0.02)
    assert float(loss.detach()) != float(plain)


def test_steps_that_are_too_small_for_bfloat16_add_up(base):
    learner = a_learner(base, rate=1e-6)
    started, copies = masters(learner), {n: p.clone() for n, p in learner.model.named_parameters()}
    for _ in range(50):
        for name, master in learner.named_parameters():
            master.grad = torch.ones_like(started[name])
        learner.step(1.0)
    name = "model.layers.0.mlp.down_proj.weight"
    moved = started[name] - dict(learner.named_parameters())[name].detach()
    torch.testing.assert_close(moved, torch.full_like(moved, 50e-6), rtol=0.05, atol=0)
    # A single such step rounds to nothing where a weight is not tiny.
    large = copies[name].abs() > 0.01
    once = copies[name] - torch.tensor(1e-6, dtype=torch.bfloat16)
    assert torch.equal(once[large], copies[name][large])
    for name, parameter in learner.model.named_parameters():
        assert torch.equal(parameter, dict(learner.named_parameters())[name].bfloat16())


def test_gradients_of_micro_batches_are_added_in_float32(base):
    learner = a_learner(base)
    parts = []
    for i in range(4):
        nll_of(learner, [i]).backward()
        parts.append({name: p.grad for name, p in learner.named_parameters()})
        for parameter in learner.parameters():
            parameter.grad = None
    assert all(p.grad is None for p in learner.model.parameters())
    for i in range(4):
        nll_of(learner, [i]).backward()
    for name, parameter in learner.named_parameters():
        # Each part is what bfloat16 can say; their sum is not.
        assert torch.equal(parts[0][name], parts[0][name].bfloat16().float())
        total = parts[0][name] + parts[1][name] + parts[2][name] + parts[3][name]
        assert torch.equal(parameter.grad, total)
    split = {name: p.grad.clone() for name, p in learner.named_parameters()}
    for parameter in learner.parameters():
        parameter.grad = None
    nll_of(learner, range(4)).backward()
    for name, parameter in learner.named_parameters():
        scale = float(split[name].abs().max())
        torch.testing.assert_close(parameter.grad, split[name], rtol=0, atol=0.02 * scale + 1e-6)


@pytest.mark.parametrize("lora", [ALL, MERGED, ADAPTER], ids=["all", "merged", "adapter"])
def test_what_is_saved_is_float32_and_whoever_loads_it_computes_the_same(base, tmp_path, lora):
    learner = a_learner(base, lora)
    for _ in range(3):
        nll_of(learner, range(4)).backward()
        learner.clip_gradients()
        learner.step(1.0)
    with learner.full_precision() as whole:
        save_model(whole, tmp_path / "saved", tokenizer_from=base, lora=lora)
        expected = content_hash(whole, BF16)
    assert content_hash(load_policy(tmp_path / "saved", "cpu", BF16)) == expected
    assert content_hash(load_policy(tmp_path / "saved")) != expected
    for file in (tmp_path / "saved").rglob("*.safetensors"):
        assert {value.dtype for value in load_file(file).values()} == {torch.float32}
    if lora is ALL:
        saved = load_file(tmp_path / "saved/model.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in masters(learner).items())
        assert content_hash(learner.model) == expected
    else:
        folder = tmp_path / "saved" / ("base" if lora is ADAPTER else "")
        name = "model.embed_tokens.weight"  # what an adapter leaves as it is
        before, after = (load_file(f / "model.safetensors")[name] for f in (base, folder))
        assert torch.equal(before, after)
    # And it goes on learning afterwards.
    before = masters(learner)
    nll_of(learner, range(4)).backward()
    learner.step(1.0)
    assert any(not torch.equal(before[name], value) for name, value in masters(learner).items())
    assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}


def fit(base, folder, stop_after=None, **options):
    folder.mkdir(exist_ok=True)
    ctx = Context(stage="test", key=None, seed=3, folder=folder)
    learner = a_learner(base, **options)

    def loss(rows, step):
        if stop_after is not None and len(done) == stop_after:
            ctx.request_stop()
        done.append(rows)
        return Loss(nll_of(learner, rows) / step.counts.tokens)

    done = []
    work = Work(counted([len(response) for _, response in ROWS]), loss)
    plan = Plan(4, 2, 3, seed=5, learning_rate=lambda *_: 1.0)
    train(ctx, {"policy": learner}, plan, work, shown=["loss"])
    return learner


@pytest.mark.parametrize("lora", [ALL, ADAPTER], ids=["all", "adapter"])
def test_training_goes_on_with_the_same_bits(base, tmp_path, lora):
    whole = fit(base, tmp_path / "whole", lora=lora, ema_decay=0.5)
    with pytest.raises(Stopped):
        fit(base, tmp_path / "stopped", stop_after=2, lora=lora, ema_decay=0.5)
    again = fit(base, tmp_path / "stopped", lora=lora, ema_decay=0.5)
    one, two = everything(whole), everything(again)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("lora", [ALL, ADAPTER], ids=["all", "adapter"])
def test_a_weight_that_stays_float32_is_not_spread_where_it_would_be_rounded(base, tmp_path, lora):
    def load(folder, device):
        model = load_policy(folder, device)
        model._keep_in_fp32_modules_strict = ["input_layernorm"]
        return model

    model = open_for_training(load, base, "cpu", lora, seed=1)
    how = Optimization(learning_rate=0.01, max_grad_norm=1.0, precision=BF16)
    spread = Context(stage="test", key=None, seed=3, folder=tmp_path, sharding=Sharding.ZERO2)
    with pytest.raises(StageError, match=r"sharding zero2.*layers\.0\.input_layernorm\.weight"):
        open_learner(spread, ALONE, model, how)
    kept = {p.dtype for n, p in model.named_parameters() if "input_layernorm" in n}
    assert kept == {torch.float32}


@pytest.fixture
def open_kept(base, tmp_path):
    """A factory of learners, in one process, of a policy with modules that stay float32."""

    def open_(sharding, kept, lora=ALL):
        model = open_for_training(load_policy, base, "cpu", lora, seed=1)
        unwrapped(model)._keep_in_fp32_modules_strict = [kept]
        how = Optimization(learning_rate=0.01, max_grad_norm=1.0, precision=BF16)
        ctx = Context(stage="test", key=None, seed=3, folder=tmp_path, sharding=sharding)
        return open_learner(ctx, ALONE, model, how)

    yield open_
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("lora", [ALL, ADAPTER], ids=["all", "adapter"])
def test_fsdp_computes_with_a_weight_that_stays_float32_as_it_is(open_kept, lora):
    results = []
    for sharding in (Sharding.NONE, Sharding.FSDP):
        learner = open_kept(sharding, "norm", lora)
        seen = []

        def round_output(module, _, output, seen=seen):
            """As families do that have such a module."""
            seen.append(module.weight.dtype)
            return output.bfloat16()

        unwrapped(learner.model).model.norm.register_forward_hook(round_output)
        losses = []
        for _ in range(2):
            loss = nll_of(learner, range(4))
            loss.backward()
            learner.sum_gradients(ALONE)
            learner.clip_gradients()
            learner.step(1.0)
            losses.append(loss.detach())
        assert set(seen) == {torch.float32}
        results.append((torch.stack(losses), {n: learner.whole(n) for n in learner.held()}))
    torch.testing.assert_close(*results)
    rounded = {name: weight.dtype for name, weight in learner.computed_weights()}
    assert {n for n, dtype in rounded.items() if dtype == torch.float32} == {
        name for name in rounded if name.endswith("model.norm.weight")
    }


@pytest.mark.parametrize("kept", ["lm_head", "weight"])
def test_fsdp_refuses_to_round_what_stays_float32(open_kept, kept):
    with pytest.raises(StageError, match=r"sharding fsdp .* stays float32"):
        open_kept(Sharding.FSDP, kept)


def test_the_stages_of_the_loop_agree_in_bfloat16(runner):
    run = runner(precision="bfloat16", policy_update={"max_logprob_gap": 0.1})
    stages = ["prepare", "sft", "reward_model", "rollout@iter_001", "score@iter_001"]
    for address in [*stages, "policy_update@iter_001", "evaluate_sft", "evaluate@iter_001"]:
        metrics = run.run(address)
        if address.startswith("policy_update"):
            assert metrics["logprob_gap_mean"] < 0.1
    folders = ("policies/sft/model", "policies/iter_001/model", "rewards/reward_model")
    for folder in folders:
        weights = load_file(run.root / "artifacts" / folder / "model.safetensors")
        assert {value.dtype for value in weights.values()} == {torch.float32}
