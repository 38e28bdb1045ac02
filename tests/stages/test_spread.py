"""A learner that is spread over ranks, by DeepSpeed ZeRO and by FSDP: real processes over loopback.

The ranks are forked once and go through all jobs; each test looks at what some of the jobs left.
"""

import importlib.util
import json
import os
import shutil
import traceback
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule

from stages.algorithms.loss import Loss
from stages.context import ShareDone, StageError, Stopped
from stages.contracts.lora import LoraParams
from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload, Sharding
from stages.engines.forward import head
from stages.engines.models import tensor_files, unread
from stages.engines.models.folders import load_policy
from stages.engines.models.lora import open_for_training
from stages.engines.models.tensor_files import (
    StoredTensor,
    stored_tensors,
    write_tensor_files,
)
from stages.engines.models.unread import to_learn
from stages.engines.processes.deepspeed_engine import configured
from stages.engines.processes.ranks import join
from stages.engines.training import zero
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner
from stages.engines.training.loop import Plan, train
from stages.engines.training.resume import tensors_of
from stages.engines.training.saving import save_learner
from stages.engines.training.schedules import warmup_then_cosine
from stages.learning.imitation import imitation
from tests.ports import free_port
from tests.stages.conftest import Interrupted, Runner
from tests.stages.forks import FORKS
from tests.waiting import TIMEOUT_S, until

WORLD = 2
FILE_BYTES = 8_000
"""So that each rank writes files."""
NUM_ROWS = 11  # of which five a step, and one in the last: a rank has fewer turns, or none
ZEROS = ("zero1", "zero2", "zero3")
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
NEEDS_DEEPSPEED = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
LORA = {"rank": 4, "alpha": 8}
REWARD = {"precision": "bfloat16", "reward_model": {"batch_size": 32}}
STAGES = {
    "ppo": ("policy_update@iter_001", {"rl": {"algorithm": "ppo"}}),
    "reward": ("reward_model", REWARD),
    "reward_lora": ("reward_model", {**REWARD, "lora": LORA}),
}
"""Those with scalar heads, each run in one process and by the ranks: its address and params."""


def by_zero(*names):
    """Params of a test: jobs for which DeepSpeed is needed."""
    return [pytest.param(name, marks=NEEDS_DEEPSPEED) for name in names]


class Sliced:
    """A whole tensor that only gives rows away, as a file does; it remembers which."""

    def __init__(self, whole):
        self._whole, self.rows = whole, []

    def __getitem__(self, rows):
        self.rows.append([rows.start, rows.stop])
        return self._whole[rows]

    def whole(self):
        return self._whole


@contextmanager
def noted_reads():
    """The tensors that are read by rows meanwhile, and how many of their rows."""
    read, getitem, whole = [], StoredTensor.__getitem__, StoredTensor.whole

    def some(tensor, rows):
        read.append([tensor.name, tensor.shape[0], len(range(tensor.shape[0])[rows])])
        return getitem(tensor, rows)

    def everything(tensor):
        read.append([tensor.name, tensor.shape[0], tensor.shape[0]])
        return whole(tensor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoredTensor, "__getitem__", some)
        patched.setattr(StoredTensor, "whole", everything)
        yield read


def rows():
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, 12, (NUM_ROWS, 2), generator=generator).tolist()
    draw = lambda n: torch.randint(3, 15, (n,), generator=generator).tolist()  # noqa: E731
    return [draw(prompt) for prompt, _ in lengths], [draw(answer) for _, answer in lengths]


def look(folder, learner, rank):
    """What a learner that is spread gives away of its tensors while it has its part of them."""
    held = learner.held()
    first, second = ({name: learner.whole(name, to) for name in held} for to in range(WORLD))
    whole, others = (second, first) if rank else (first, second)
    assert {tensor is None for name, tensor in others.items() if held[name].shape} == {True}
    copies = {name: copy.clone() for name, copy in learner.computed_weights()}
    units = [module for module in learner.model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    gathered = {name: weight.detach().clone() for name, weight in learner.model.named_parameters()}
    learner.load({name: torch.zeros(form.shape) for name, form in held.items()})
    zeros = [learner.whole(name, to) for name in held for to in range(WORLD)]
    assert not any(bool(value.any()) for value in zeros if value is not None)
    for unit in units:
        unit.unshard()
    assert not any(bool(weight.any()) for weight in learner.model.parameters())
    read = {name: Sliced(tensor) for name, tensor in whole.items()}
    learner.load(read)
    save_file(copies, folder / f"copies-{rank}")
    save_file(gathered, folder / f"gathered-{rank}")
    save_file({key: value.contiguous() for key, value in whole.items()}, folder / f"whole-{rank}")
    rows = {key: stored.rows for key, stored in read.items()}
    (folder / f"rows-{rank}.json").write_text(json.dumps(rows))


def fit(
    folder,
    base,
    *,
    lora=None,
    ema=0.0,
    stop_after=10**9,
    precision="float32",
    bad=None,
    looked_at=False,
    untrained=False,
    **how,
):
    """SFT on the rows, with a survey; the model and what training left are in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ctx = Interrupted(stage="test", key=None, seed=3, folder=folder, **how)
    ctx.stop_after = stop_after
    params = LoraParams(**(lora or {"rank": 0}))
    # A learning rate at which Adam's first steps do not turn rounding into differences.
    how = Optimization(
        learning_rate=1e-3,
        max_grad_norm=0.5,
        weight_decay=0.1,
        ema_decay=ema,
        precision=Precision(precision),
    )
    with join(ctx) as ranks:
        load = to_learn(load_policy, ctx)
        with noted_reads() as read:
            model = open_for_training(load, base, ctx.loads_on, params, ctx.seed)
            own = [w for name, w in model.named_parameters() if ".lora_" not in name]
            in_memory = sum(weight.untyped_storage().nbytes() for weight in own)
            learner = open_learner(ctx, ranks, model, how)
        note = {"read": read, "in_memory": in_memory}
        (folder / f"opened-{ctx.rank}.json").write_text(json.dumps(note))
        if untrained:
            save_learner(
                learner, folder / "untrained", tokenizer_from=base, lora=params, ranks=ranks
            )
        work = imitation(model, *rows(), ctx.device, lambda i: f"row {i}")

        def loss(some, step):
            computed = work.loss(some, step)
            return Loss(computed.value * (float("nan") if bad in some else 1.0), computed.metrics)

        def survey(some):
            with torch.no_grad():
                value = work.loss(some, type("Step", (), {"counts": work.counts(some)})).value
            return {"surveyed": float(value)}

        plan = Plan(NUM_ROWS, 5, 2, seed=5, learning_rate=warmup_then_cosine(0.1))
        learning = replace(work, loss=loss, survey=survey)
        learners = {"policy": learner}
        history = train(ctx, learners, plan, learning, shown=["loss"], ranks=ranks)
        if looked_at:
            look(folder, learner, ctx.rank)
        save_learner(learner, folder / "model", tokenizer_from=base, lora=params, ranks=ranks)
        write_tensor_files(folder, "moments", *tensors_of({"policy": learner}, "moment."), ranks)
    (folder / "history.json").write_text(json.dumps(history))


def run_stage(root, address, changes, **how):
    runner = Runner(Path(root), **changes)
    ctx = runner.context(address, **how)
    metrics = runner.run(address, ctx)
    (Path(root) / "metrics.json").write_text(json.dumps(metrics))


def spread_small_weights_too(*how):
    """DeepSpeed's settings: it would leave weights whole that are as small as all are here."""
    config = configured(*how)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config


def meeting_port(path, rank):
    """A port that is free as a job starts, which may be minutes after the ranks did."""
    if not rank:
        path.with_suffix(".new").write_text(str(free_port()))
        path.with_suffix(".new").rename(path)
    until(path.exists, f"rank 0 comes to {path}")
    return path.read_text()


def main(jobs, rank):
    """One rank: all jobs, one after the other; what it says of each is in the job's folder."""
    torch.set_num_threads(1)
    head.CHUNK_TOKENS = 8  # so that the ranks have different numbers of chunks
    tensor_files.FILE_BYTES = FILE_BYTES
    zero.configured = spread_small_weights_too
    # What Dynamo makes of a layer, without the minute that a C++ compiler needs for it.
    torch.compile = partial(torch.compile, backend="aot_eager")
    by_rows = unread._BY_ROWS
    for number, job in enumerate(jobs):
        if rank >= job["world"]:
            continue
        folder = Path(job["folder"])
        signs = folder / f"signs-{number}"
        signs.mkdir(parents=True, exist_ok=True)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job["world"]), "LOCAL_RANK": str(rank)}
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": meeting_port(folder / f"port-{number}", rank),
        }
        how = {
            "sharding": Sharding(job["sharding"]),
            "offload": Offload(job.get("offload", "none")),
        }
        how |= {"rank": rank, "world": job["world"], "heartbeats": signs}
        how["micro_tokens"] = job.get("micro_tokens", 24)
        how["sequence_parallel"] = job.get("sequence_parallel", 1)
        for setting in ("checkpoint_activations", "compile"):
            how[setting] = job.get(setting, False)
        unread._BY_ROWS = {} if job.get("loads_whole") else by_rows
        try:
            if "address" in job:
                run_stage(folder, job["address"], job["changes"], **how)
            else:
                fit(folder, Path(job["base"]), **job.get("fit", {}), **how)
            said = "returned"
        except (ShareDone, Stopped, StageError) as error:
            said = f"{type(error).__name__}: {error}"
            if dist.is_initialized():  # by a job that failed, and before others that do not
                dist.destroy_process_group()
        except BaseException:
            (folder / f"said-{rank}").write_text(traceback.format_exc())
            raise
        (folder / f"said-{rank}").write_text(said)


def one_rank(jobs, rank, log):
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(jobs, rank)


def run_jobs(jobs, root):
    """The ranks go through them."""
    logs = [root / f"log-{rank}" for rank in range(max(job["world"] for job in jobs))]
    ranks = [
        FORKS.Process(target=one_rank, args=(jobs, rank, log)) for rank, log in enumerate(logs)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(2 * TIMEOUT_S)  # for many jobs, one after the other
        ends = [process.exitcode for process in ranks]
        assert ends == [0] * len(ranks), [log.read_text()[-4000:] for log in logs]
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def base(trained):
    return trained.paths("sft")[0]["base"]


def with_tied_head(base, folder):
    """The model with its embeddings as its head, too."""
    shutil.copytree(base, folder)
    model = load_policy(base)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.get_input_embeddings().weight
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def jobs(base, trained, tmp_path_factory):
    """The folder with one folder for each job."""
    root = tmp_path_factory.mktemp("spread")
    tied = with_tied_head(base, root / "tied_base")
    fit(root / "plain_tied", tied, ema=0.9)
    lora = {**LORA, "save": "adapter"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensor_files, "FILE_BYTES", FILE_BYTES)
        fit(root / "plain", base, ema=0.9, untrained=True)
    fit(root / "plain_lora", base, lora=lora)
    fit(root / "plain_bfloat16", base, precision="bfloat16")
    with pytest.raises(Stopped):
        fit(root / "from_one", base, ema=0.9, stop_after=3)
    shutil.copytree(root / "from_one", root / "from_one_fsdp")
    for name, (address, changes) in STAGES.items():
        for folder in (f"plain_{name}", name, f"{name}_fsdp"):
            shutil.copytree(trained.root, root / folder)
            # As for the stage of a job, there is nothing where it writes to.
            for path in Runner(root / folder, **changes).paths(address)[1].values():
                shutil.rmtree(path, ignore_errors=True)
        run_stage(root / f"plain_{name}", address, changes)
    bad_row = Plan(NUM_ROWS, 5, 2, seed=5, learning_rate=warmup_then_cosine(0.1)).rows(1)[3]

    def job(name, sharding, offload="none", world=WORLD, **options):
        return {
            "folder": str(root / name),
            "base": str(base),
            "sharding": sharding,
            "offload": offload,
            "world": world,
            "fit": options,
        }

    def resumed(sharding):
        return [
            job(sharding, sharding, ema=0.9, untrained=True),
            job(f"stopped_{sharding}", sharding, ema=0.9, stop_after=3),
            job(f"stopped_{sharding}", sharding, ema=0.9),
        ]

    def stages(sharding, suffix=""):
        return [
            {**job(f"{name}{suffix}", sharding), "address": address, "changes": changes}
            for name, (address, changes) in STAGES.items()
        ]

    # Those of four ranks come first: two of these have no more to do then.
    todo = [
        {**job("four", "fsdp", world=4, ema=0.9), "base": str(tied)},
        job("from_four", "fsdp", world=4, ema=0.9, stop_after=3, untrained=True),
        job("from_four", "fsdp", ema=0.9),
        *resumed("fsdp"),
        job("to_one_fsdp", "fsdp", ema=0.9, stop_after=3),
        job("from_one_fsdp", "fsdp", ema=0.9),
        job("host_fsdp", "fsdp", offload="optimizer", ema=0.9),
        {
            **job("compiled_fsdp", "fsdp", ema=0.9),
            "compile": True,
            "checkpoint_activations": True,
            # So many that all rows are filled up to one size, and compiled for once.
            "micro_tokens": 512,
        },
        job("lora_fsdp", "fsdp", lora=lora),
        job("bfloat16_fsdp", "fsdp", precision="bfloat16", looked_at=True),
        *stages("fsdp", "_fsdp"),
        job("bad_fsdp", "fsdp", bad=bad_row),
    ]
    if HAS_DEEPSPEED:
        todo += [one for sharding in ZEROS for one in resumed(sharding)]
        todo += [
            job("to_one", "zero2", ema=0.9, stop_after=3),
            job("from_one", "zero3", ema=0.9),
            job("host", "zero3", offload="all", ema=0.9),
            {**job("tied_zero3", "zero3", ema=0.9), "base": str(tied)},
            {**job("long", "none", ema=0.9, untrained=True), "sequence_parallel": 2},
            {
                **job("long_zero3", "zero3", ema=0.9),
                "sequence_parallel": 2,
                "checkpoint_activations": True,
            },
            {**job("long_fsdp", "fsdp", ema=0.9), "sequence_parallel": 2},
            job("lora", "zero3", lora=lora),
            job("bfloat16", "zero2", precision="bfloat16"),
            job("bfloat16_zero1", "zero1", precision="bfloat16"),
            job("bfloat16_zero3", "zero3", precision="bfloat16"),
            *stages("zero3"),
            job("bad", "zero3", bad=bad_row),
        ]
    run_jobs(todo, root)
    for name in ("to_one", "to_one_fsdp") if HAS_DEEPSPEED else ("to_one_fsdp",):
        fit(root / name, base, ema=0.9)
    return root


def outcome(folder):
    stored = {
        **stored_tensors(folder / "model", "model"),
        **stored_tensors(folder, "moments"),
    }
    return {name: tensor.whole() for name, tensor in stored.items()}


def assert_same_learning(one, other, rel=1e-4):
    """The same weights and moments, but for rounding by what is large among a tensor's numbers."""
    assert one.keys() == other.keys()
    for name in one:
        atol = rel * float(one[name].abs().max())
        torch.testing.assert_close(other[name], one[name], rtol=rel, atol=atol, msg=name)


def history(folder):
    return json.loads((folder / "history.json").read_text())


def assert_same_history(one, other, rel=1e-3):
    assert len(one) == len(other)
    for alone, together in zip(one, other, strict=True):
        assert together == pytest.approx(alone, rel=rel, abs=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *by_zero(*ZEROS, "host", "long", "long_zero3", "long_fsdp"),
        *("fsdp", "host_fsdp", "compiled_fsdp"),
    ],
)
def test_ranks_that_share_the_state_learn_what_one_process_learns(jobs, name):
    assert (jobs / name / "said-1").read_text().startswith("ShareDone")
    assert_same_learning(outcome(jobs / "plain"), outcome(jobs / name))
    assert_same_history(history(jobs / "plain"), history(jobs / name))


@pytest.mark.parametrize("name", ["four", *by_zero("tied_zero3")])
def test_ranks_learn_what_one_process_learns_with_a_tied_head(jobs, name):
    one, many = outcome(jobs / "plain_tied"), outcome(jobs / name)
    assert "lm_head.weight" not in many
    assert_same_learning(one, many)
    assert_same_history(history(jobs / "plain_tied"), history(jobs / name))


@pytest.mark.parametrize("sharding", [*by_zero(*ZEROS), "fsdp"])
def test_stopped_and_resumed_they_end_with_the_same_bytes(jobs, sharding):
    said = (jobs / f"stopped_{sharding}" / "said-0").read_text()
    assert said == "returned"
    files = [*(jobs / sharding).glob("mo*/*.safetensors*"), *(jobs / sharding).glob("mo*.safe*")]
    assert len(files) > 6
    for file in (*files, jobs / sharding / "history.json"):
        resumed = jobs / f"stopped_{sharding}" / file.relative_to(jobs / sharding)
        assert file.read_bytes() == resumed.read_bytes(), file


@pytest.mark.parametrize("name", [*by_zero(*ZEROS, "long"), "fsdp", "from_four"])
def test_files_of_a_model_do_not_depend_on_how_it_is_spread(jobs, name):
    """One rank, two that have all of it, two and four that have parts of it."""
    one, many = (Runner.contents(jobs / of / "untrained") for of in ("plain", name))
    assert sum(file.endswith(".safetensors") for file in one) > WORLD
    assert many == one


@pytest.mark.parametrize(
    "name", [*by_zero("to_one", "from_one"), "to_one_fsdp", "from_one_fsdp", "from_four"]
)
def test_a_checkpoint_is_gone_on_from_with_another_number_of_ranks(jobs, name):
    assert_same_learning(outcome(jobs / "plain"), outcome(jobs / name))
    assert_same_history(history(jobs / "plain"), history(jobs / name))


@pytest.mark.parametrize("sharding", [*by_zero("zero3"), "fsdp"])
def test_what_is_saved_is_an_ordinary_folder(jobs, base, sharding):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(jobs / sharding / "model")
    reference = AutoModelForCausalLM.from_pretrained(base)
    assert loaded.state_dict().keys() == reference.state_dict().keys()
    assert type(loaded) is type(reference)
    ids = torch.tensor([[5, 9, 11]])
    assert not torch.equal(loaded(ids).logits, reference(ids).logits)
    plain = AutoModelForCausalLM.from_pretrained(jobs / "plain/model")
    torch.testing.assert_close(loaded(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [*by_zero("lora"), "lora_fsdp"])
def test_an_adapter_learns_the_same_and_its_base_is_untouched(jobs, name):
    folders = [jobs / of / "model" for of in ("plain_lora", name)]
    assert_same_learning(*(load_file(f / "adapter_model.safetensors") for f in folders))
    bases = [folder / "base/model.safetensors" for folder in folders]
    assert bases[0].read_bytes() == bases[1].read_bytes()


@pytest.mark.parametrize(
    "name", [*by_zero("bfloat16", "bfloat16_zero1", "bfloat16_zero3"), "bfloat16_fsdp"]
)
def test_a_model_that_computes_in_bfloat16_has_float32_weights_that_learn(jobs, name):
    one, other = outcome(jobs / "plain_bfloat16"), outcome(jobs / name)
    assert {tensor.dtype for tensor in other.values()} == {torch.float32}
    assert_same_learning(one, other, rel=2e-2)
    stored = stored_tensors(jobs / name / "model", "model")
    weights = {name: tensor.whole() for name, tensor in stored.items()}
    assert any(bool((w != w.bfloat16().float()).any()) for w in weights.values())


def metrics_and_tensors(folder, *names):
    paths = [next(folder.glob(f"artifacts/**/{name}*.safetensors")) for name in names]
    stored = [
        stored_tensors(path.parent, Path(name).name)
        for path, name in zip(paths, names, strict=True)
    ]
    metrics = json.loads((folder / "metrics.json").read_text())
    return metrics, [{name: t.whole() for name, t in of.items()} for of in stored]


@pytest.mark.parametrize("name", [*by_zero("ppo"), "ppo_fsdp"])
def test_a_policy_and_its_critic_learn_in_one_loss(jobs, name):
    files = [
        f"iter_001/{file}" for file in ("model/model", "state/optimizer", "state/critic/model")
    ]
    one, other = (metrics_and_tensors(jobs / of, *files) for of in ("plain_ppo", name))
    assert other[0] == pytest.approx(one[0], rel=1e-2, abs=1e-4)
    for alone, together in zip(one[1], other[1], strict=True):
        assert_same_learning(alone, together, rel=1e-3)


@pytest.mark.parametrize("by", [*by_zero(""), "_fsdp"])
@pytest.mark.parametrize("name", ["reward", "reward_lora"])
def test_a_scalar_head_learns_on_a_model_that_computes_in_bfloat16(jobs, name, by):
    folders = (jobs / f"plain_{name}", jobs / f"{name}{by}")
    one, other = (metrics_and_tensors(f, "rewards/reward_model/model") for f in folders)
    for metric in ("loss", "grad_norm"):
        assert other[0][metric] == pytest.approx(one[0][metric], rel=1e-2)
    assert_same_learning(one[1][0], other[1][0], rel=2e-2)
    assert bool(other[1][0]["score.weight"].any()), "a head that has learnt is not zero"


@pytest.mark.parametrize("name", [*by_zero("bad"), "bad_fsdp"])
def test_the_row_at_fault_is_named_by_all(jobs, name):
    said = [(jobs / name / f"said-{rank}").read_text() for rank in range(WORLD)]
    plan = Plan(NUM_ROWS, 5, 2, seed=5, learning_rate=warmup_then_cosine(0.1))
    for words in said:
        assert "loss is nan at step 2 of 6" in words
        assert f"look at row {plan.rows(1)[3]} (its loss alone is nan)" in words


def test_the_weights_that_are_gathered_are_the_rounded_masters(jobs):
    folder = jobs / "bfloat16_fsdp"
    masters = outcome(folder)
    files = [f"{kind}-{rank}" for kind in ("gathered", "copies") for rank in range(WORLD)]
    for file in files:
        weights = load_file(folder / file)
        # The names that a tied head would have in a file are not among a model's parameters.
        assert weights.keys() <= masters.keys()
        assert all(torch.equal(w, masters[name].bfloat16()) for name, w in weights.items()), file


def test_any_rank_is_given_a_whole_tensor_and_reads_its_own_rows_of_one(jobs):
    folder = jobs / "bfloat16_fsdp"
    # As files name them: moments with their learner.
    expected = {name.removeprefix("policy/"): tensor for name, tensor in outcome(folder).items()}
    rows = [json.loads((folder / f"rows-{rank}.json").read_text()) for rank in range(WORLD)]
    for rank in range(WORLD):
        whole = load_file(folder / f"whole-{rank}")
        assert {key.partition(".")[2] for key in whole} == expected.keys()
        for key, value in whole.items():
            assert torch.equal(value, expected[key.partition(".")[2]]), key
            half = -(-len(value) // 2) if value.dim() else 0
            mine = [[0, half], [half, len(value)]][rank : rank + 1] if value.dim() else []
            assert rows[rank][key] == mine, key
