"""Rows as tensors, held against loops over their tokens one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.data.batching import collate, loss_mask, loss_masks_of, pad

PAD = 99
TOKENS = st.integers(0, 90)
ROW = st.tuples(
    st.lists(TOKENS, min_size=1, max_size=6),
    st.lists(st.tuples(TOKENS, st.integers(0, 1)), max_size=6),
)


@given(st.lists(ROW, min_size=1, max_size=5), st.booleans())
def test_a_batch_has_every_token_where_it_belongs(rows, masked):
    prompts = [prompt for prompt, _ in rows]
    responses = [[token for token, _ in response] for _, response in rows]
    masks = [[mask if masked else 1 for _, mask in response] for _, response in rows]
    batch = collate(prompts, responses, PAD, loss_masks=masks if masked else None)
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    steps = max(map(len, responses))

    ids, positions, at, starts, predicting, responding = [], [], [], [0], [], []
    for row, (prompt, response, mask) in enumerate(zip(prompts, responses, masks, strict=True)):
        for position, token in enumerate(prompt + response):
            step = position - len(prompt)
            if step >= 0 and mask[step]:
                predicting.append(len(ids) - 1)
                responding.append(row * steps + step)
            ids.append(token)
            positions.append(position)
            at.append(row * width + position)
        starts.append(len(ids))
        whole = prompt + response
        missing = width - len(whole)
        assert batch.ids[row].tolist() == whole + [PAD] * missing
        assert batch.attention_mask[row].tolist() == [1] * len(whole) + [0] * missing
        missing = steps - len(response)
        assert batch.response_ids[row].tolist() == response + [PAD] * missing
        assert batch.response_mask[row].tolist() == [1.0] * len(response) + [0.0] * missing
        assert batch.loss_mask[row].tolist() == [float(one) for one in mask] + [0.0] * missing
        before = [min(len(prompt) - 1 + step, width - 1) for step in range(steps)]
        assert batch.before[row].tolist() == before
        assert batch.last[row] == len(whole) - 1
    packed = batch.packed
    assert packed.longest == width
    assert packed.starts.dtype is torch.int32
    for name, expected in {
        "ids": ids,
        "positions": positions,
        "at": at,
        "starts": starts,
        "predicting": predicting,
        "responding": responding,
    }.items():
        assert getattr(packed, name).tolist() == expected, name


@given(st.lists(st.lists(st.floats(-9, 0, width=64), max_size=5), min_size=1, max_size=4))
def test_padded_numbers_are_rounded_once(rows):
    padded = pad(rows, 7.0)
    assert padded.dtype is torch.float32
    for row, numbers in zip(padded.tolist(), rows, strict=True):
        own = [float(torch.tensor(number, dtype=torch.float64).float()) for number in numbers]
        assert row == own + [7.0] * (padded.shape[1] - len(numbers))


@pytest.mark.parametrize("masks", [(None, None), ([1, 0], None)])
def test_masks_of_rows_are_their_own(masks):
    rows = [
        {"response_ids": ids, "loss_mask": mask}
        for ids, mask in zip(([5, 6], [7, 8, 9]), masks, strict=True)
    ]
    assert loss_masks_of(rows).equal(pad([loss_mask(row) for row in rows], 0.0))
