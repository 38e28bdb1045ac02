"""Segments of a response: the rows that a model reads, and a batch that says whose they are."""

import pytest
import torch

from stages.data.segments import as_last_read, batch_of, cut, num_read, pieces_of

EPISODE = {
    "prompt_ids": [1, 2],
    "response_ids": [10, 11, 12, 13, 14, 15, 16, 17, 18],
    "loss_mask": [1, 0, 0, 1, 1, 0, 1, 0, 1],
    "support": [[10, 90], [], [], [13], [14, 91], [], [16], [], [18, 92]],
    "segment_starts": [3, 6],
    "segment_histories": [[50], [51, 52, 53]],
    "sample_index": 4,
}
PLAIN = {"prompt_ids": [3], "response_ids": [20, 21], "loss_mask": None, "support": [[20], [21]]}


def test_a_piece_is_what_was_read_up_to_its_last_own_token():
    pieces = pieces_of(EPISODE, of=7)
    assert [(piece.of, piece.start) for piece in pieces] == [(7, 0), (7, 3), (7, 6)]
    read = [(piece.row["prompt_ids"], piece.row["response_ids"]) for piece in pieces]
    assert read == [
        ([1, 2], [10]),
        ([1, 2, 50], [13, 14]),
        ([1, 2, 51, 52, 53], [16, 17, 18]),
    ]
    assert [piece.row["loss_mask"] for piece in pieces] == [[1], [1, 1], [1, 0, 1]]
    assert [len(piece.row["support"]) for piece in pieces] == [1, 2, 3]
    assert all(piece.row["sample_index"] == 4 for piece in pieces)
    assert num_read(EPISODE) == 3 + 5 + 8
    assert [pieces_of(piece.row)[0].row for piece in pieces] == [piece.row for piece in pieces]


def test_a_response_in_one_segment_is_its_own_piece():
    for row in (PLAIN, PLAIN | {"segment_starts": [], "segment_histories": []}):
        [piece] = pieces_of(row)
        assert piece.row is as_last_read(row) is row
        assert num_read(row) == 3


def test_rows_are_cut_in_their_order():
    rows = [PLAIN, EPISODE, PLAIN]
    pieces, parts = cut(rows, [2, 1])
    assert parts == [range(1), range(1, 4)]
    assert [piece.of for piece in pieces] == [2, 1, 1, 1]
    pieces, parts = cut(rows, [2, 1], whole=True)
    assert parts == [range(1), range(1, 2)]
    assert [piece.row for piece in pieces] == [PLAIN, EPISODE]


def test_what_is_read_last_has_the_last_history_in_place_of_all_before():
    last = as_last_read(EPISODE)
    assert (last["prompt_ids"], last["response_ids"]) == ([1, 2], [51, 52, 53, 16, 17, 18])
    assert last["loss_mask"] is last["support"] is None


@pytest.mark.parametrize("rows", [[EPISODE, PLAIN], [PLAIN, EPISODE, EPISODE]])
def test_a_batch_has_a_row_for_a_response_and_a_sequence_for_a_segment(rows):
    batch = batch_of(rows, pad_id=0)
    packed, width = batch.packed, batch.response_mask.shape[1]
    found = {}
    starts = packed.starts.tolist()
    for at, place in zip(packed.predicting.tolist(), packed.responding.tolist(), strict=True):
        begin = max(start for start in starts if start <= at)
        assert divmod(place, width) not in found
        found[divmod(place, width)] = packed.ids[begin : at + 2].tolist()
    expected = {}
    for number, row in enumerate(rows):
        begins = [0, *row.get("segment_starts", [])]
        histories = [[], *row.get("segment_histories", [])]
        for at, own in enumerate(row["loss_mask"] or [1, 1]):
            if own:
                begin, history = max(
                    pair for pair in zip(begins, histories, strict=True) if pair[0] <= at
                )
                context = row["prompt_ids"] + history + row["response_ids"][begin : at + 1]
                expected[number, at] = context
    assert found == expected
    for number, row in enumerate(rows):
        length = len(row["response_ids"])
        assert batch.response_ids[number, :length].tolist() == row["response_ids"]
        assert batch.response_mask[number].sum() == length
        assert batch.loss_mask[number, :length].tolist() == (row["loss_mask"] or [1.0, 1.0])
    own = [found[place][-1] for place in sorted(found)]
    assert batch.response_ids.flatten()[packed.responding].tolist() == own
    supports = torch.split(batch.support.ids, batch.support.sizes.tolist())
    assert all(token in support for token, support in zip(own, supports, strict=True))
