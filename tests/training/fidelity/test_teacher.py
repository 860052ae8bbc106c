"""The head's answers to query rows."""

import pytest
import torch

from trainer.training.fidelity.teacher import taught_answers


@pytest.mark.parametrize("biased", [False, True])
def test_answers_are_those_of_the_full_softmax(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1500, 5, generator=generator)
    head = torch.randn(700, 5 + biased, generator=generator)
    scores = hidden @ head[:, :5].T + (head[:, 5] if biased else 0.0)
    found = taught_answers(head, hidden, 3)
    assert found.classes.dtype == torch.int32 and len(found) == 1500
    assert torch.equal(found.classes.long(), scores.topk(3).indices)
    torch.testing.assert_close(found.logsumexp, scores.logsumexp(dim=1))
    torch.testing.assert_close(found.first(1).scores[:, 0], scores.amax(dim=1))
    assert taught_answers(head[:2], hidden[:2], 3).classes.shape == (2, 2)
