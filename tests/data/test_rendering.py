"""Token ids and loss masks: what is trained on is what a policy would have sampled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.data.chat_templates import BUILT_IN
from stages.data.dialogue import Dialogue, asked, reply
from stages.data.items import Demonstration, Labelled, Pair, Place
from stages.data.rendering import render
from stages.data.row_error import RowError
from stages.data.tokenizer import Renderer, build_character_tokenizer

PLACE = Place("file.jsonl", 1)
LETTERS = "".join(map(chr, range(32, 127))) + "\n"
CHATML = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.get('tool_calls', []) %}<call>{{ call['function'] | tojson }}{% endfor %}"
    "{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
FORGETTING = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'] if loop.last or m['role'] != 'assistant' "
    "else m['content'].split('</think>')[-1] }}",
)
ENDS_ONCE = CHATML.replace("{{ eos_token }}", "<end>").replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else eos_token }}",
)
WITHOUT_AN_END = CHATML.replace("{{ eos_token }}", "")
STRICT = "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}" + CHATML


def tokenizer(template=CHATML):
    made = build_character_tokenizer([LETTERS])
    made.chat_template = template
    return made


TOKENIZER = tokenizer()
EOS = TOKENIZER.eos_token_id


def user(text):
    return {"role": "user", "content": text}


def text_of(ids):
    return TOKENIZER.decode(ids)


def learnt(row):
    """What is trained on of a response."""
    kept = zip(row["completion_ids"], row["loss_mask"], strict=True)
    return text_of([token for token, on in kept if on])


def rendered(item, template=CHATML, max_length=10_000):
    [(_, row)] = render([item], Renderer(tokenizer(template)), max_length)
    if isinstance(row, RowError):
        raise row
    return row.values


ASKED = (user("a"),)
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = {"role": "assistant", "content": "so", "tool_calls": [ADD]}
TOOL = {"role": "tool", "content": "2"}
TEXT = Demonstration(place=PLACE, prompt=Dialogue(()), completion=[reply("abc")], plain_text=True)


def shown(*turns, prompt=ASKED, tools=()):
    return Demonstration(place=PLACE, prompt=Dialogue(tuple(prompt), tools), completion=turns)


def test_a_plain_completion_is_its_text_and_the_end_token_after_the_rendered_prompt():
    row = rendered(shown(reply("b ")))
    assert text_of(row["prompt_ids"]) == "<|im_start|>user\na<eos>\n<|im_start|>assistant\n"
    assert text_of(row["completion_ids"]) == "b <eos>"
    assert row["loss_mask"] is None


def test_every_turn_of_the_assistant_is_trained_on_with_its_end_token_and_nothing_else_is():
    row = rendered(shown(reply("b"), user("c"), reply("d")))
    between = "\n<|im_start|>user\nc<eos>\n<|im_start|>assistant\n"
    assert text_of(row["completion_ids"]) == f"b<eos>{between}d<eos>"
    assert learnt(row) == "b<eos>d<eos>"
    assert row["completion"] == "assistant: b\n\nuser: c\n\nassistant: d"


def test_a_call_of_a_tool_looks_as_the_template_says_and_what_the_tool_says_is_masked():
    row = rendered(shown(CALLING, TOOL, reply("It is 2.")))
    words = 'so<call>{"name": "add", "arguments": {"a": 1}}'
    assert learnt(row) == f"{words}<eos>It is 2.<eos>"
    assert "<|im_start|>tool\n2" in text_of(row["completion_ids"])
    assert text_of(rendered(shown(CALLING))["completion_ids"]) == f"{words}<eos>"


def test_an_end_token_that_the_text_writes_itself_is_not_doubled():
    assert text_of(rendered(shown(reply("b<eos>")))["completion_ids"]) == "b<eos>"
    row = rendered(shown(reply("b<eos>"), user("c"), reply("d<eos>")))
    assert learnt(row) == "b<eos>d<eos>"
    steps = Labelled(
        place=PLACE, prompt=Dialogue(ASKED), steps=["one", "two<eos>"], labels=[1.0, 0.0]
    )
    row = rendered(steps)
    assert text_of(row["completion_ids"]) == "onetwo<eos>"
    assert row["step_ends"] == [2, 6]


@pytest.mark.parametrize(
    "item",
    [
        shown(reply("b<eos>c")),
        shown(reply("b<eos>c"), user("d"), reply("e")),
        Pair(place=PLACE, prompt=Dialogue(ASKED), chosen=reply("b"), rejected=reply("<eos>c")),
    ],
)
def test_an_end_token_within_a_response_is_refused(item):
    with pytest.raises(RowError, match="'<eos>', the end token, before its end"):
        rendered(item)


@pytest.mark.parametrize(
    ("item", "part"),
    [
        (shown(CALLING), "add"),
        (shown(reply("b"), prompt=(*ASKED, CALLING, TOOL)), "add"),
        (shown(reply("b"), tools=({"type": "function", "function": {"name": "add"}},)), "add"),
        (shown({"role": "assistant", "content": "b", "reasoning_content": "hm"}), "hm"),
    ],
)
def test_what_the_template_would_leave_out_is_refused(item, part):
    with pytest.raises(RowError, match=f"the chat template leaves '{part}' out"):
        rendered(item, BUILT_IN["plain"])


def test_reasoning_that_the_template_writes_is_taught():
    template = CHATML.replace("{{ m['content'] }}", "{{ m.get('thinking', '') }}{{ m['content'] }}")
    row = rendered(shown({"role": "assistant", "content": "b", "thinking": "hm "}), template)
    assert text_of(row["completion_ids"]) == "hm b<eos>"


talk = st.lists(st.text(LETTERS, min_size=1, max_size=8), min_size=2, max_size=7)


@settings(deadline=None)
@given(talk, st.sampled_from([CHATML, TRIMMING]))
def test_each_turn_follows_exactly_the_prompt_that_a_policy_would_be_given(texts, template):
    """Rollout gives a policy the rendered dialogue so far; SFT teaches to go on from those ids."""
    messages = [user(t) if i % 2 == 0 else reply(t) for i, t in enumerate(texts)]
    if len(messages) % 2:
        messages.pop()
    row = rendered(shown(*messages[1:], prompt=messages[:1]), template)
    ids = [*row["prompt_ids"], *row["completion_ids"]]
    mask = [0] * len(row["prompt_ids"]) + (row["loss_mask"] or [1] * len(row["completion_ids"]))
    renderer = Renderer(tokenizer(template))
    for index in range(1, len(messages), 2):
        [text] = renderer.prompt_texts([Dialogue(tuple(messages[:index]))])
        [prompt] = renderer.ids([text])
        assert ids[: len(prompt)] == prompt
        assert mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]
    words = [m["content"].strip() if template is TRIMMING else m["content"] for m in messages]
    spoken = words[1::2] if len(messages) > 2 else [messages[1]["content"]]
    taught = [token for token, on in zip(ids, mask, strict=True) if on]
    assert text_of(taught) == "".join(f"{text}<eos>" for text in spoken)


def words_tokenizer(swallows, prepends="first"):
    """Words that carry the space before them, and an end that may take what follows it along.

    A space is put before the first word of a text, or of each part between special tokens.
    """
    parts = ["<s>", "</s>", "<unk>", "▁", "\n", "[U]", "[A]", "[", "U", "A", "]", *"abcd"]
    backend = Tokenizer(
        models.BPE({part: i for i, part in enumerate(parts)}, [], unk_token="<unk>")
    )
    if prepends == "by normalising":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepends)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    end = AddedToken("</s>", rstrip=swallows, special=True)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token="<s>")
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '[U]' if m['role'] == 'user' else '[A]' }}"
        "{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    )
    return made


@pytest.mark.parametrize("swallows", [True, False])
def test_what_comes_between_turns_has_the_ids_that_it_has_in_the_whole(swallows):
    made = words_tokenizer(swallows)
    turns = (reply(" b"), user("c"), reply(" d"))
    [(_, row)] = render([shown(*turns)], Renderer(made), 1000)
    ids = [*row.values["prompt_ids"], *row.values["completion_ids"]]
    whole = made.apply_chat_template([*ASKED, *turns], tokenize=False).rstrip("\n")
    assert ids == made(whole, add_special_tokens=False)["input_ids"]


def test_a_response_is_tokenised_apart_from_its_prompt():
    """A tokenizer that would join the last letter of a prompt to the first of its response."""
    bpe = Tokenizer(
        models.BPE({"<eos>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")], unk_token="<eos>")
    )
    bpe.pre_tokenizer = pre_tokenizers.Split("?", "removed")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    joining = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<eos>", chat_template=template
    )
    assert joining("ab", add_special_tokens=False)["input_ids"] == [3]
    pair = Pair(place=PLACE, prompt=asked("a"), chosen=reply("b"), rejected=reply("ab"))
    [(_, row)] = render([pair], Renderer(joining), 10)
    assert row.values["prompt_ids"] == [1]
    assert row.values["chosen_ids"] == [2, 0]
    assert row.values["rejected_ids"] == [3, 0]


def test_the_same_dialogue_renders_the_same_in_whatever_batch():
    items = [
        shown(reply("b")),
        shown(reply("b"), user("c"), reply("d")),
        shown(reply("b"), tools=({"name": "add"},)),
        TEXT,
        Pair(place=PLACE, prompt=asked("q"), chosen=reply("x"), rejected=reply("y")),
    ]
    together = [row.values for _, row in render(items, Renderer(TOKENIZER), 1000)]
    assert together == [rendered(item) for item in items]


def test_of_a_text_all_is_trained_on_but_the_token_that_it_starts_from():
    row = rendered(TEXT)
    assert text_of(row["prompt_ids"]) == "<bos>"
    assert text_of(row["completion_ids"]) == "abc<eos>"
    assert (row["prompt"], row["completion"], row["loss_mask"]) == ("", "abc", None)
    without_a_start = tokenizer()
    without_a_start.bos_token = None
    [(_, row)] = render([TEXT], Renderer(without_a_start), 10)
    assert text_of(row.values["prompt_ids"]) == "a"
    assert text_of(row.values["completion_ids"]) == "bc<eos>"


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_and_not_for_one():
    thinking = reply("<think>hm</think>b")
    with pytest.raises(RowError, match=r"set prepare\.turns to last"):
        rendered(shown(thinking, user("c"), reply("d")), FORGETTING)
    assert text_of(rendered(shown(thinking), FORGETTING)["completion_ids"]).endswith(
        "</think>b<eos>"
    )
    last = shown(reply("d"), prompt=(user("a"), thinking, user("c")))
    assert "think" not in text_of(rendered(last, FORGETTING)["prompt_ids"])


@pytest.mark.parametrize(
    ("template", "item", "message"),
    [
        (WITHOUT_AN_END, shown(reply("b"), user("c"), reply("d")), "does not end .* with '<eos>'"),
        (ENDS_ONCE, shown(reply("b"), user("c"), reply("d")), "does not end .* with '<eos>'"),
        (STRICT, shown(reply("b"), prompt=({"role": "system", "content": "s"},)), "no system"),
        ("{# nothing #}", shown(reply("b")), "its prompt has no token"),
        (None, shown(reply("b"), prompt=(user("a"), reply("b"), user("c"))), "no chat template"),
        (None, shown(reply("b"), user("c"), reply("d")), "no chat template"),
    ],
)
def test_what_the_template_cannot_render_is_refused_with_the_reason(template, item, message):
    with pytest.raises(RowError, match=message):
        rendered(item, template)


def test_a_template_that_writes_the_date_gives_the_same_tokens_on_every_day():
    dated = "{{ strftime_now('%d %b %Y') | lower }}: " + CHATML
    for item in (shown(reply("b")), shown(reply("b"), user("c"), reply("d"))):
        assert text_of(rendered(item, dated)["prompt_ids"]).startswith("26 jul 2024: <|im_start|>")


def test_one_refused_row_leaves_its_neighbours():
    bad = shown(reply("b"), prompt=({"role": "system", "content": "s"}, user("a")))
    good = shown(reply("b"))
    rows = [row for _, row in render([good, bad, good], Renderer(tokenizer(STRICT)), 1000)]
    assert isinstance(rows[1], RowError)
    assert rows[0] == rows[2]
    assert rows[0].values == rendered(good, STRICT)


def test_without_a_template_a_question_follows_the_start_token():
    row = rendered(shown(reply("b")), template=None)
    assert text_of(row["prompt_ids"]) == "<bos>a"
    assert row["template"] is None


def test_the_templates_hash_is_in_every_row():
    one, other = rendered(shown(reply("b"))), rendered(shown(reply("b")), TRIMMING)
    assert one["template"] != other["template"]
    assert len(one["template"]) == 16
