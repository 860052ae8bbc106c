"""A recommender of 10,000 items gets a sparse output layer.

The sessions are made up: a visitor looks at popular items of one of 100 genres and at bestsellers,
and often at the item that goes with what was looked at before. Sessions are of different lengths.
"""

import argparse
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from service import bundle
from service.cli.main import cli
from service.engine import Engine
from trainer import capture

GENRES, PER_GENRE = 100, 100
ITEMS = GENRES * PER_GENRE
SESSIONS, LENGTH = 32, 20  # of a batch
NOTHING = -100  # beyond the end of a session


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 64)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.scores = nn.Linear(64, ITEMS)

    def hidden(self, items: Tensor) -> Tensor:
        return self.gru(self.items(items))[0]  # [S,T,64]

    def forward(self, items: Tensor) -> Tensor:
        return self.scores(self.hidden(items))


def visits(count: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of items [S,T] and of the item that came next, NOTHING after the last."""
    popularity = torch.arange(1, PER_GENRE + 1) ** -1.2
    for _ in range(count):
        shape = (SESSIONS, LENGTH + 1)
        liked = torch.randint(1, GENRES, (SESSIONS, 1), generator=random)
        genre = liked * (torch.rand(shape, generator=random) < 0.8)  # else 0, the bestsellers
        rank = popularity.multinomial(shape[0] * shape[1], True, generator=random).view(shape)
        items = genre * PER_GENRE + rank
        goes_on = torch.rand(shape, generator=random) < 0.5
        for t in range(LENGTH):  # the pair of item 2 i is 2 i + 1, and the other way round
            items[:, t + 1] = torch.where(goes_on[:, t], items[:, t] ^ 1, items[:, t + 1])
        ends = torch.randint(5, LENGTH + 1, (SESSIONS, 1), generator=random)
        yield items[:, :-1], items[:, 1:].masked_fill(torch.arange(LENGTH) >= ends, NOTHING)


def dss(command: str) -> None:
    print(f"$ dss {command}")
    cli.main(shlex.split(command), standalone_mode=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of the model's training")
    parser.add_argument("--batches", type=int, default=250, help="to capture")
    parser.add_argument("--out", type=Path, default=Path("runs/recommender"))
    options = parser.parse_args(arguments)
    out = options.out
    shutil.rmtree(out, ignore_errors=True)
    torch.set_num_threads(1)  # more are of no use to so small a model
    random, model = torch.manual_seed(0), Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for items, following in visits(options.steps, random):
        optimizer.zero_grad()
        loss = cross_entropy(model(items).flatten(0, 1), following.flatten(), ignore_index=NOTHING)
        loss.backward()
        optimizer.step()

    seen, held_out = visits(options.batches, random), visits(20, random)
    capture(model, "scores", seen, out / "captured", valid=held_out)
    dss(f"train --capture {out}/captured --experts 100 --speedup 20 --out {out}/run")
    dss(f"export {out}/run {out}/models/items/1 --capture {out}/captured")
    dss(f"evaluate {out}/models/items/1 --capture {out}/captured")

    engine = Engine(bundle.read(out / "models/items/1"))
    items, _ = next(visits(1, random))
    with torch.no_grad():
        hidden = model.hidden(items[:1])[:, -1].numpy()  # [1,64]
    best = engine.topk(hidden, k=30).classes[0]
    new = best[~np.isin(best, items[0])][:5]
    print("who looked at", items[0, -3:].tolist(), "is shown", new.tolist())
    print(f"serve it: dss serve --models {out}/models")


if __name__ == "__main__":
    main()
