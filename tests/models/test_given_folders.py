"""Folders that users bring: what is copied, what is made fit, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from stages.context import StageError
from stages.contracts.model import ModelParams
from stages.contracts.precision import Precision
from stages.data.tokenizer import Decoder
from stages.engines.models.base_folder import take_base_model
from stages.engines.models.folders import load_policy, load_scalar_model
from stages.engines.models.own_code import allow_code, check_same_code
from tests.models.custom_code import write_echo
from tests.models.families import SIZES, write_family
from tests.models.gguf_files import CHARACTERS, MERGES, SPECIAL, TOKENS
from tests.models.rendering import prompt_ids
from tests.stages.conftest import Runner


def take(source, target, **options):
    params = ModelParams(source="folder", **options)
    return take_base_model(params, Precision.FLOAT32, source, target)


def change_json(path, **changes):
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture
def given(tmp_path):
    return write_family(tmp_path / "given", "llama")


def test_only_what_a_run_needs_is_copied_and_the_bytes_repeat(given, tmp_path):
    (given / "README.md").write_text("---\nlicense: mit\n---\n")
    (given / "pytorch_model.bin").write_bytes(b"a pickle beside the safetensors")
    (given / ".git").mkdir()
    (given / "run.py").write_text("raise SystemExit")
    (given / "allowed_code.json").write_text("{}")
    for name in ("one", "two"):
        take(given, tmp_path / name)
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert not names & {"pytorch_model.bin", ".git", "run.py", "allowed_code.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert Runner.contents(tmp_path / "one") == Runner.contents(tmp_path / "two")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused_with_what_to_do(given, tmp_path, name):
    (given / "model.safetensors").rename(given / name)
    with pytest.raises(StageError, match=rf"{name}, a pickle.*save_pretrained\(new_folder\)"):
        take(given, tmp_path / "base")


def test_a_folder_that_was_not_copied_to_its_end_is_refused_by_file(given, tmp_path):
    weights = given / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(StageError, match=r"model\.safetensors is damaged, or was not copied"):
        take(given, tmp_path / "cut")
    weights.write_bytes(whole)
    index = given / "model.safetensors.index.json"
    parts = ["model.safetensors", "model-2.safetensors"]
    index.write_text(json.dumps({"weight_map": dict(enumerate(parts))}))
    with pytest.raises(StageError, match=r"lacks model-2\.safetensors, one of the 2 files"):
        take(given, tmp_path / "part")
    index.unlink()
    for name in ("tokenizer_config.json", "config.json"):
        (given / name).write_text("{")
        with pytest.raises(StageError, match=rf"/{name} is not JSON"):
            take(given, tmp_path / "config")


def test_an_adapter_without_its_base_is_refused(given, tmp_path):
    (given / "model.safetensors").rename(given / "adapter_model.safetensors")
    with pytest.raises(StageError, match="an adapter alone: merge it into its base"):
        take(given, tmp_path / "base")


def test_models_that_are_no_text_decoders_are_refused_by_name(tmp_path):
    tiny = {"vocab_size": 50, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16}
    kinds = {
        "t5": (AutoModelForSeq2SeqLM, {**tiny, "d_kv": 8}, "encoder-decoder model"),
        "bert": (AutoModelForMaskedLM, SIZES, "holds a BertForMaskedLM"),
        "llama": (AutoModelForSequenceClassification, SIZES, "LlamaForSequenceClassification"),
    }
    for family, (auto, options, message) in kinds.items():
        folder = tmp_path / family
        auto.from_config(AutoConfig.for_model(family, **options)).save_pretrained(folder)
        with pytest.raises(StageError, match=message):
            take(folder, tmp_path / "base")
    seeing = write_family(tmp_path / "seeing", "llama")
    change_json(seeing / "config.json", vision_config={"hidden_size": 4})
    with pytest.raises(StageError, match=r"more than text .*vision_config.* text model alone"):
        take(seeing, tmp_path / "base")
    small = write_family(tmp_path / "small", "llama")
    change_json(small / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(StageError, match=r"quantised weights \(gptq\)"):
        take(small, tmp_path / "base")


def test_tokenizer_and_model_have_to_agree(given, tmp_path):
    with pytest.raises(StageError, match=r"max_length is 65, .* context of 64 tokens"):
        take(given, tmp_path / "a", max_length=65)
    change_json(given / "config.json", vocab_size=20)
    with pytest.raises(StageError, match=r"knows 20: call model\.resize_token_embeddings"):
        take(given, tmp_path / "b")
    (given / "tokenizer.json").unlink()
    (given / "tokenizer_config.json").unlink()
    with pytest.raises(StageError, match="no tokenizer"):
        take(given, tmp_path / "c")


def test_a_model_without_padding_or_beginning_goes_through_a_whole_iteration(runner):
    run = runner(
        model={"source": "folder", "max_length": 48},
        sft={"epochs": 1, "batch_size": 48},
        reward_model={"epochs": 1, "batch_size": 32},
        rollout={"prompts": 2, "samples": 2, "max_new_tokens": 6, "batch_size": 4},
        policy_update={"epochs": 1, "batch_size": 4},
    )
    nothing = {"pad_token_id": None, "bos_token_id": None}
    given = write_family(run.root / "models", "gpt_neox", **nothing)
    change_json(given / "tokenizer_config.json", pad_token=None, bos_token=None)
    run.run("prepare")
    assert AutoTokenizer.from_pretrained(run.root / "artifacts/base").pad_token is None
    for stage in ("sft", "reward_model", "rollout@iter_001", "score@iter_001"):
        run.run(stage)
    run.run("policy_update@iter_001")
    policy = run.root / "artifacts/policies/iter_001/model"
    assert AutoModelForCausalLM.from_pretrained(policy).config.model_type == "gpt_neox"


def test_a_slow_tokenizer_becomes_a_fast_one(tmp_path):
    given = write_family(tmp_path / "given", "gpt2", vocab_size=len(TOKENS), eos_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (given / name).unlink()
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    (given / "vocab.json").write_text(json.dumps(vocabulary))
    (given / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    tokenizer = take(given, tmp_path / "base", chat_template="plain")
    assert (tmp_path / "base" / "tokenizer.json").is_file()
    decoder = Decoder(tmp_path / "base")
    ids = tokenizer("hello world", add_special_tokens=False)["input_ids"]
    assert ids == decoder.ids("hello world")
    assert ids[0] == vocabulary["hell"]
    assert decoder.text(ids) == "hello world"
    assert len(CHARACTERS) + len(SPECIAL) + len(MERGES) == len(TOKENS)


def test_without_a_chat_template_one_is_asked_for_and_taken(given, tmp_path):
    (given / "chat_template.jinja").unlink()
    with pytest.raises(StageError, match=r"set model\.chat_template to plain, chatml, or"):
        take(given, tmp_path / "a")
    with pytest.raises(StageError, match=r"chatml, but the tokenizer has no token <\|im_start\|>"):
        take(given, tmp_path / "b", chat_template="chatml")
    for outside in ("missing.jinja", "../given.jinja"):
        (tmp_path / "given.jinja").write_text("not in the folder")
        with pytest.raises(StageError, match="neither plain, chatml nor a file in"):
            take(given, tmp_path / "c", chat_template=outside)
    tokenizer = take(given, tmp_path / "plain", chat_template="plain")
    assert tokenizer.decode(prompt_ids(tokenizer, "a+b")) == "<bos>a+b"
    text = "{% for message in messages %}{{ message['content'] + '?' }}{% endfor %}"
    (given / "ask.jinja").write_text(text)
    take(given, tmp_path / "own", chat_template="ask.jinja")
    saved = AutoTokenizer.from_pretrained(tmp_path / "own")
    assert saved.decode(prompt_ids(saved, "a+b")) == "a+b?"


def test_a_template_that_never_asks_the_assistant_to_speak_is_refused(given, tmp_path):
    named = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    (given / "named.jinja").write_text(named)
    with pytest.raises(StageError, match=r"writes 'assistant: ' before what the assistant says"):
        take(given, tmp_path / "a", chat_template="named.jinja")
    asking = named + "{% if add_generation_prompt %}assistant: {% endif %}"
    (given / "named.jinja").write_text(asking)
    take(given, tmp_path / "b", chat_template="named.jinja")


@pytest.mark.parametrize(
    "template", ["Hello.", "{{ bos_token }}{% for m in messages %}{{ m['text'] }}{% endfor %}"]
)
def test_a_template_that_writes_nothing_of_what_is_said_is_refused(given, tmp_path, template):
    (given / "deaf.jinja").write_text(template)
    with pytest.raises(StageError, match=r"model\.folder .* whatever the user says, so all rows"):
        take(given, tmp_path / "base", chat_template="deaf.jinja")


def test_chatml_is_the_format_of_that_name(tmp_path):
    given = write_family(tmp_path / "given", "llama", vocab_size=60)
    tokenizer = AutoTokenizer.from_pretrained(given)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "\n"], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(given)
    change_json(given / "config.json", eos_token_id=tokenizer.eos_token_id)
    (given / "generation_config.json").unlink()
    taken = take(given, tmp_path / "base", chat_template="chatml")
    prompt = taken.decode(prompt_ids(taken, "a+b"))
    assert prompt == "<|im_start|>user\na+b<|im_end|>\n<|im_start|>assistant\n"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole = taken.apply_chat_template(said, tokenize=False)
    assert whole == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"


def test_code_that_comes_with_a_model_runs_only_if_it_is_allowed(runner):
    model = {"source": "folder", "max_length": 48}
    refused = runner("refused", model=model)
    write_echo(refused.root / "models")
    with pytest.raises(
        StageError, match=r"modeling_echo\.EchoForCausalLM.*model\.trust_remote_code: true"
    ):
        refused.run("prepare")

    run = runner(
        "allowed",
        model={**model, "trust_remote_code": True},
        sft={"epochs": 1, "batch_size": 48},
        rollout={"prompts": 2, "samples": 2, "max_new_tokens": 6, "batch_size": 4},
    )
    write_echo(run.root / "models")
    run.run("prepare")
    metrics = run.run("sft")
    run.run("rollout@iter_001")
    assert metrics["loss"] > 0
    policy = run.root / "artifacts/policies/sft/model"
    before = load_file(run.root / "models" / "model.safetensors")
    after = load_file(policy / "model.safetensors")
    assert not torch.equal(before["model.mix.weight"], after["model.mix.weight"])
    anywhere = AutoModelForCausalLM.from_pretrained(policy, trust_remote_code=True)
    assert type(anywhere).__name__ == "EchoForCausalLM"

    (policy / "modeling_echo.py").write_text("raise SystemExit('not what was let in')\n")
    with pytest.raises(StageError, match="changed after it was let in"):
        load_policy(policy)
    (policy / "allowed_code.json").unlink()
    with pytest.raises(StageError, match=r"model\.trust_remote_code"):
        load_policy(policy)


@pytest.mark.parametrize("family", ["granite", "echo"])
@pytest.mark.parametrize("lora", [{"rank": 0}, {"rank": 2, "save": "adapter"}], ids=["all", "lora"])
def test_a_model_without_a_classifier_of_its_own_gets_a_critic_that_goes_on(runner, family, lora):
    run = runner(
        lora=lora,
        model={"source": "folder", "max_length": 48, "trust_remote_code": True},
        sft={"epochs": 1, "batch_size": 48},
        rl={"algorithm": "ppo", "reward": "verifier"},
        rollout={"prompts": 2, "samples": 2, "max_new_tokens": 6, "batch_size": 4},
        policy_update={"epochs": 1, "batch_size": 4},
    )
    if family == "echo":
        write_echo(run.root / "models")
    else:
        write_family(run.root / "models", family)
    run.run("prepare")
    run.run("sft")
    for key in ("iter_001", "iter_002"):
        for stage in ("rollout", "score", "policy_update"):
            run.run(f"{stage}@{key}")
    critic = load_scalar_model(run.root / "artifacts/policies/iter_002/state/critic")
    assert critic.score.weight.shape[0] == 1
    assert critic.score.weight.any(), "the head has learnt"


def test_classes_that_transformers_has_itself_are_taken_instead_of_a_folders_own(given, tmp_path):
    (given / "modeling_llama.py").write_text("raise SystemExit('never to be run')\n")
    change_json(
        given / "config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    )
    take(given, tmp_path / "base")
    assert not (tmp_path / "base" / "modeling_llama.py").exists()
    assert type(load_policy(tmp_path / "base")).__module__.startswith("transformers.models.llama")


def test_code_that_is_not_in_the_folder_is_never_fetched(tmp_path):
    given = write_echo(tmp_path / "given")
    names = {"AutoConfig": "somebody/else--configuration_echo.EchoConfig"}
    change_json(given / "config.json", auto_map=names)
    with pytest.raises(StageError, match=r"not in the folder: put configuration_echo\.py there"):
        take(given, tmp_path / "base", trust_remote_code=True)


def test_a_teacher_may_run_no_other_code_than_the_policys_even_if_it_says_so_itself(tmp_path):
    given, teacher = write_echo(tmp_path / "given"), write_echo(tmp_path / "teacher")
    policy, plain = write_echo(tmp_path / "policy"), write_family(tmp_path / "plain", "llama")
    allow_code(given, policy)
    check_same_code(teacher, policy)
    check_same_code(plain, policy)
    with (given / "modeling_echo.py").open("a") as file:
        file.write("\nimport os\n")
    allow_code(given, teacher)
    for of_policy in (policy, plain):
        with pytest.raises(StageError, match="only a base model may bring code"):
            check_same_code(teacher, of_policy)
