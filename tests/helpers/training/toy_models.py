"""Small models of the kinds that people have, and their batches."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N, D = 30, 8


class Words(nn.Module):
    """A word model; its output is a tuple, as of many."""

    def __init__(self, bias: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N, D)
        self.lstm = nn.LSTM(D, D, batch_first=batch_first)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(D, N, bias=bias)

    def hidden(self, tokens: Tensor, state: object = None) -> tuple[Tensor, object]:
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.dropout(hidden), state

    def forward(self, tokens: Tensor, state: object = None) -> tuple[Tensor, object]:
        hidden, state = self.hidden(tokens, state)
        logits = self.head(input=hidden)
        hidden.zero_()  # a model may write to either
        logits[..., 0] = -torch.inf
        return logits, state


class Tied(nn.Module):
    """The rows of the embedding are those of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N, D)
        self.mixed = nn.Linear(D, D)
        self.bias = nn.Parameter(torch.randn(N))

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.mixed(self.embedding(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens), self.embedding.weight, self.bias)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
        )
        self.fc = nn.Linear(4 * 6 * 6, N)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1  # in place, even in eval mode
        self.seen = self.seen + 1
        return self.fc(self.features(images))


def sentences(count: int, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(N, (4, 7), generator=random) for _ in range(count)]


def photographs(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(5, 1, 8, 8, generator=random), torch.randint(N, (5,), generator=random))
        for _ in range(count)
    ]
