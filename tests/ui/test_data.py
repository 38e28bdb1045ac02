"""What the Data page is told: counts as recorded, the very rows that were dropped, every token."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipelines.base.errors import LockstepError
from pipelines.ui import data_rows
from pipelines.ui.clone import Clone
from pipelines.ui.data_report import lengths, overlaps, read_report
from pipelines.ui.data_rows import Found, Query, Row, find_rows
from pipelines.ui.dropped_rows import dropped_rows
from pipelines.ui.token_pieces import pieces
from stages.contracts.sources import Role
from tests.ui.prepared_clone import HOSTILE, prepared_clone


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return prepared_clone(tmp_path_factory.mktemp("data") / "clone")


def demonstrations(root: Path, **query: object) -> Found:
    return find_rows(root, Query(Role.DEMONSTRATIONS, **query))


def test_every_dropped_row_is_named_with_the_recorded_reason(clone: Clone) -> None:
    found = dropped_rows(clone.root)
    assert [(row.source, row.line, row.reason) for row in found.rows] == [
        ("shown.jsonl", 3, "duplicate"),
        ("shown.jsonl", 4, "contaminated"),
        ("shown.jsonl", 5, "too_long"),
        ("shown.jsonl", 6, "unreadable"),
    ]
    assert not found.notes
    assert "Held  OUT!" in found.rows[1].text
    [recorded] = [row for row in read_report(clone.root).sources if row["source"] == "shown.jsonl"]
    assert recorded["dropped"] == dict.fromkeys([row.reason for row in found.rows], 1)


def test_rows_are_selected_and_read_without_torch(clone: Clone) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from pipelines.ui.data_rows import Query, find_rows\n"
        "from pipelines.ui.dropped_rows import dropped_rows\n"
        "from stages.contracts.sources import Role\n"
        f"root = Path({str(clone.root)!r})\n"
        "assert len(dropped_rows(root).rows) == 4\n"
        "assert find_rows(root, Query(Role.PROMPTS)).rows\n"
        "print(*{'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_data_that_were_changed_since_are_said_to_be(tmp_path: Path) -> None:
    changed = prepared_clone(tmp_path / "clone", num_plain=3)
    path = changed.root / "data/shown.jsonl"
    path.write_text(path.read_text() + '{"prompt": "a", "completion": "b"}\n')
    [note] = dropped_rows(changed.root).notes
    assert note.startswith("demonstrations of shown.jsonl: prepare recorded 4 dropped rows")


def text_of(row: Row, name: str, *kinds: str) -> str:
    [part] = [part for part in row.parts if part.name == name]
    return "".join(
        piece.text
        for piece in part.pieces
        if not kinds or list(data_rows.KINDS.values())[piece.kind] in kinds
    )


def test_pieces_show_every_token_and_what_is_trained_on(clone: Clone) -> None:
    [chat] = demonstrations(clone.root, source="chats.jsonl").rows
    assert text_of(chat, "prompt", "prompt") == "<bos>two and two?"
    assert text_of(chat, "response", "trained on") == "four<eos>five<eos>"
    assert text_of(chat, "response", "not trained on") == "and one?"
    [hostile] = demonstrations(clone.root, text="ONERROR").rows
    assert text_of(hostile, "response", "trained on") == f"{HOSTILE}<eos>"
    [steps] = find_rows(clone.root, Query(Role.STEPS)).rows
    assert text_of(steps, "response", "right step") == "one"
    assert text_of(steps, "response", "wrong step") == "two<eos>"


def test_letters_of_several_tokens_are_one_piece_and_no_token_is_lost() -> None:
    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    letters.train_from_iterator([], trainer)
    ids = letters.encode("a é日\n😀").ids
    found = pieces(letters, [*ids, 0], [0] * len(ids) + [1])
    assert [(piece.text, len(piece.ids), piece.special) for piece in found] == [
        *(("a", 1, False), (" ", 1, False), ("é", 2, False), ("日", 3, False)),
        *(("\n", 1, False), ("😀", 4, False), ("<eos>", 1, True)),
    ]
    # A letter that ends in the middle, or where training begins, and an id that nothing knows.
    torn = [ids[2], 0, *ids[2:4], ids[4], 9999]
    found = pieces(letters, torn, [0, 0, 0, 1, 1, 1])
    assert [i for piece in found for i in piece.ids] == torn
    assert [(piece.text, piece.kind) for piece in found[:3]] == [
        *(("\ufffd", 0), ("<eos>", 0), ("\ufffd", 0))
    ]


def test_rows_are_paged_and_searched_by_row_group(
    clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    root = tmp_path
    (root / "artifacts/data").mkdir(parents=True)
    (root / "artifacts/base").symlink_to(clone.root / "artifacts/base")
    name = "artifacts/data/demonstrations.parquet"
    pq.write_table(pq.read_table(clone.root / name), root / name, row_group_size=4)
    whole = [row.values for row in demonstrations(clone.root, limit=50).rows]
    assert len(whole) == 33

    paged, start = [], 0
    while start < 33:
        found = demonstrations(root, start=start, limit=5)
        assert found.searched_to > start
        paged += [row.values for row in found.rows]
        start = found.searched_to
    assert paged == whole

    monkeypatch.setattr(data_rows, "MOST_GROUPS", 3)
    found = demonstrations(root, text="question 29")
    assert (found.rows, found.searched_to) == ((), 12)
    while not found.rows:
        found = demonstrations(root, text="question 29", start=found.searched_to)
    assert [row.values["prompt"] for row in found.rows] == ["question 29"]


def test_lengths_count_every_row_and_token_once(clone: Clone) -> None:
    rows = demonstrations(clone.root, limit=50).rows
    by_part = {each.part: each for each in lengths(clone.root, Role.DEMONSTRATIONS)}
    for name in ("prompt", "response"):
        sizes = sorted(part.num_tokens for row in rows for part in row.parts if part.name == name)
        of = by_part[name]
        assert (of.num_rows, of.num_tokens, of.least, of.most) == (
            *(len(sizes), sum(sizes)),
            *(sizes[0], sizes[-1]),
        )
        assert of.median == sizes[(len(sizes) - 1) // 2]
        for each in of.bins:
            assert each.count == sum(each.low <= size <= each.high for size in sizes)
        assert sum(each.count for each in of.bins) == len(sizes)
    assert by_part["whole"].most == read_report(clone.root).metrics["longest_sequence"]


def test_overlap_counts_training_rows_whose_prompt_is_held_out(clone: Clone) -> None:
    found = {each.role: each for each in overlaps(clone.root, read_report(clone.root).roles)}
    assert not any(each.num_held_out for each in found.values())
    asked = Role.PROMPTS
    held_out = data_rows.path_of(clone.root, Role.HELD_OUT)
    kept = held_out.read_bytes()
    held_out.write_bytes(data_rows.path_of(clone.root, asked).read_bytes())
    try:
        found = {each.role: each for each in overlaps(clone.root, (asked, Role.HELD_OUT))}
    finally:
        held_out.write_bytes(kept)
    assert found[asked].num_held_out == found[asked].num_rows == 4


def test_what_is_not_here_is_named_with_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"report\.json does not exist: `lockstep run prepare`"):
        read_report(tmp_path)
    with pytest.raises(LockstepError, match=r"steps\.parquet does not exist"):
        find_rows(tmp_path, Query(Role.STEPS))
