"""The head's answers to query rows."""

import pytest
import torch

from trainer.training.fidelity.teacher import BLOCK, head_answers, largest


@pytest.mark.parametrize("n", [1, 7, BLOCK, 40 * BLOCK, 40 * BLOCK + 13])
def test_the_largest_are_those_of_a_sort(n: int) -> None:
    scores = torch.randn(9, n, generator=torch.Generator().manual_seed(n))
    count = min(n, 9)
    values, places = largest(scores, count)
    expected = scores.sort(dim=1, descending=True)
    assert torch.equal(values, expected.values[:, :count])
    assert torch.equal(places, expected.indices[:, :count])


@pytest.mark.parametrize("biased", [False, True])
def test_answers_are_those_of_the_full_softmax(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1500, 5, generator=generator)
    head = torch.randn(700, 5 + biased, generator=generator)
    scores = hidden @ head[:, :5].T + (head[:, 5] if biased else 0.0)
    found = head_answers(hidden, head, 3)
    assert found.classes.dtype == torch.int32 and len(found) == 1500
    assert torch.equal(found.classes.long(), scores.topk(3).indices)
    torch.testing.assert_close(found.logsumexp, scores.logsumexp(dim=1))
    assert head_answers(hidden[:2], head[:2], 3).classes.shape == (2, 2)
