"""The tokenizer of a GGUF file, or one beside it: its tokens, its ends, its template."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.context import StageError
from stages.contracts.model import ModelParams
from stages.data.tokenizer import Decoder
from stages.engines.models.folders import end_ids, load_policy
from tests.models.gguf_files import TEMPLATE, TOKENS, convert, tiny_llama, write_gguf
from tests.models.rendering import prompt_ids, response_ids

EOT, EOM = "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama())


def test_the_tokenizer_is_the_files_with_its_ends_and_a_padding_of_its_own(tmp_path):
    write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama())
    returned = convert(tmp_path / "given", tmp_path / "base")
    saved = AutoTokenizer.from_pretrained(tmp_path / "base")
    for tokenizer in (returned, saved):
        special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
        assert special == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        assert tokenizer.eos_token_id == 2
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert "quantization_config" not in config

    decoder = Decoder(tmp_path / "base")
    ids = prompt_ids(saved, "hello world é")
    assert saved.decode(ids) == "<|im_start|>user\nhello world é<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1
    response = response_ids(saved, "hello ✓")
    assert response[-1] == 2
    assert decoder.text(response) == "hello ✓"


def test_the_ends_are_the_files_even_where_the_converter_takes_others(file, tmp_path, monkeypatch):
    """As older versions of transformers do; the installed one does not."""
    plain = AutoTokenizer.from_pretrained

    def mistaken(*args, **options):
        tokenizer = plain(*args, **options)
        tokenizer.eos_token = "<|im_start|>"
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", mistaken)
    assert convert(file, tmp_path / "base").eos_token == "<|im_end|>"
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["eos_token_id"] == 2


def test_a_template_of_choice_takes_the_place_of_the_files(file, tmp_path):
    params = ModelParams(source="folder", chat_template="plain")
    tokenizer = convert(file, tmp_path / "base", params=params)
    assert tokenizer.decode(prompt_ids(tokenizer, "hi")) == "<|im_start|>hi"


def test_every_end_that_a_file_names_ends_a_response(tmp_path):
    said = {"tokenizer.ggml.eos_token_id": 0, EOT: 2, EOM: 5, "tokenizer.ggml.padding_token_id": 2}
    file = write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama(), metadata=said)
    tokenizer = convert(file, tmp_path / "base")
    assert tokenizer.eos_token_id == 0
    assert end_ids(load_policy(tmp_path / "base")) == {0, 2, 5}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "base" / name).read_text())["eos_token_id"] == [0, 2, 5]


def test_padding_is_no_end_of_a_turn_either(tmp_path):
    said = {EOT: 4, "tokenizer.ggml.padding_token_id": 4}
    file = write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama(), metadata=said)
    assert convert(file, tmp_path / "base").pad_token == "<|endoftext|>"


def test_ends_that_transformers_knows_of_an_architecture_are_kept(tmp_path, monkeypatch):
    """As of Gemma 4, whose files name one end of three."""
    plain = AutoModelForCausalLM.from_pretrained

    def several(*args, **options):
        model, report = plain(*args, **options)
        model.config.eos_token_id = [2, 7]
        return model, report

    file = write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama())
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", several)
        convert(file, tmp_path / "base")
    assert end_ids(load_policy(tmp_path / "base")) == {2, 7}


def test_the_end_of_another_model_is_none_where_a_file_names_no_end(file, tmp_path):
    own = convert(file, tmp_path / "own")
    own.eos_token = "<|endoftext|>"
    own.save_pretrained(file.parent)
    write_gguf(file, tiny_llama(), metadata={"tokenizer.ggml.eos_token_id": None})
    convert(file, tmp_path / "base")
    assert end_ids(load_policy(tmp_path / "base")) == {0}


def lone_tokenizer(folder: Path, tmp_path: Path) -> Path:
    """The tokenizer.json that the file itself would give, without anything that explains it."""
    convert(folder, tmp_path / "own")
    path = folder / "tokenizer.json"
    path.write_bytes((tmp_path / "own" / "tokenizer.json").read_bytes())
    return path


def test_what_a_lone_tokenizer_does_not_say_the_file_does(file, tmp_path):
    lone_tokenizer(file.parent, tmp_path)
    returned = convert(file.parent, tmp_path / "base")
    saved = AutoTokenizer.from_pretrained(tmp_path / "base")
    for tokenizer in (returned, saved):
        special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
        assert special == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        assert tokenizer.chat_template == TEMPLATE
    assert response_ids(saved, "hello")[-1] == 2
    assert Decoder(tmp_path / "base").text(response_ids(saved, "hello")) == "hello"
    assert end_ids(load_policy(tmp_path / "base")) == {2}


def test_what_a_given_tokenizer_says_itself_is_kept(file, tmp_path):
    own = convert(file, tmp_path / "own")
    own.eos_token = own.pad_token = "<|endoftext|>"
    own.chat_template = TEMPLATE.replace("<|im_end|>", "<|endoftext|>")
    own.save_pretrained(file.parent)
    tokenizer = convert(file, tmp_path / "base")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0)
    assert tokenizer.chat_template == own.chat_template
    assert end_ids(load_policy(tmp_path / "base")) == {0, 2}


def test_a_given_tokenizer_that_numbers_tokens_otherwise_is_refused(file, tmp_path):
    path = lone_tokenizer(file.parent, tmp_path)
    text = path.read_text()
    values = json.loads(text)
    vocabulary = values["model"]["vocab"]
    vocabulary["hell"], vocabulary["ll"] = vocabulary["ll"], vocabulary["hell"]
    path.write_text(json.dumps(values))
    with pytest.raises(StageError, match=r"the tokenizer\.json beside it numbers 2 of .*'ll'"):
        convert(file, tmp_path / "swapped")

    more = Tokenizer.from_str(text)
    more.add_tokens(["<new>"])
    more.save(str(path))
    with pytest.raises(StageError, match=r"numbers 1 of .*'<new>'"):
        convert(file, tmp_path / "more")


def test_fillers_and_the_sign_for_a_space_are_no_difference(tmp_path):
    """The model's own tokenizer.json has no fillers, and writes spaces as sentencepiece does."""
    given = write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama()).parent
    path = lone_tokenizer(given, tmp_path)
    values = json.loads(path.read_text())
    values["model"]["merges"].pop()
    vocabulary = values["model"]["vocab"]
    del vocabulary["Ġw"]
    vocabulary["\u2581\u2581"] = vocabulary.pop("hell")
    values["model"]["merges"].pop()
    path.write_text(json.dumps(values))
    tokens = [*TOKENS[:-2], "  ", "[PAD]"]
    types = [*[1] * (len(TOKENS) - 1), 5]
    said = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    write_gguf(given / "tiny.gguf", tiny_llama(), metadata=said)
    assert len(convert(given, tmp_path / "base")) == len(TOKENS) - 1


def test_a_tokenizer_that_cannot_be_converted_is_asked_for(file, tmp_path):
    lone_tokenizer(file.parent, tmp_path)
    write_gguf(file, tiny_llama(), metadata={"tokenizer.ggml.model": "new"})
    convert(file, tmp_path / "base")
    (file.parent / "tokenizer.json").unlink()
    with pytest.raises(StageError, match=r"put the model's own tokenizer\.json beside the file"):
        convert(file, tmp_path / "out")
