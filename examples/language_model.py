"""A language model gets a sparse output layer: accuracy and perplexity before and after.

The text is made up of 200 common words and 4,800 of 48 topics: one must see what it is about.
"""

import argparse
import shlex
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from service import bundle, decoding
from service.cli.main import cli
from service.engine import Engine
from trainer import DSSoftmax, capture

COMMON, TOPICS, PER_TOPIC = 200, 48, 100
WORDS = COMMON + TOPICS * PER_TOPIC
SENTENCES, LENGTH = 32, 20  # of a batch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])  # [S,T,N]


def text(random: torch.Generator) -> Tensor:
    """A batch of sentences [S,T]: a third of the words are common, the rest of one topic."""
    shape = (SENTENCES, LENGTH)
    zipf = [torch.arange(1, size + 1) ** -1.5 for size in (COMMON, PER_TOPIC)]
    common, own = (p.multinomial(SENTENCES * LENGTH, True, generator=random) for p in zipf)
    topic = torch.randint(TOPICS, (SENTENCES, 1), generator=random)
    is_common = torch.rand(shape, generator=random) < 1 / 3
    return torch.where(is_common, common.view(shape), COMMON + topic * PER_TOPIC + own.view(shape))


def scores(model: Model, words: Tensor) -> tuple[Tensor, Tensor]:  # logits and labels
    return model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()


@torch.no_grad()
def quality(model: Model, batches: list[Tensor]) -> str:
    logits, labels = map(torch.cat, zip(*(scores(model, words) for words in batches), strict=True))
    hits = (logits.argmax(dim=1) == labels).float().mean()
    return f"accuracy {hits:.4f}, perplexity {cross_entropy(logits, labels).exp():.1f}"


def dss(command: str) -> None:
    print(f"$ dss {command}")
    cli.main(shlex.split(command), standalone_mode=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800, help="of the model's training")
    parser.add_argument("--batches", type=int, default=150, help="to capture")
    parser.add_argument("--out", type=Path, default=Path("runs/language-model"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more are of no use to so small a model
    out, random, model = options.out, torch.manual_seed(0), Model()
    shutil.rmtree(out, ignore_errors=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(options.steps):
        optimizer.zero_grad()
        cross_entropy(*scores(model, text(random))).backward()
        optimizer.step()
    held_out, seen, unseen = ([text(random) for _ in range(n)] for n in (5, options.batches, 5))
    capture(model, "head", seen, out / "captured", valid=held_out)
    dss(f"train --capture {out}/captured --experts 32 --speedup 15 --out {out}/run")
    dss(f"export {out}/run {out}/models/words/1")
    print("full softmax:", quality(model, unseen))
    model.head = DSSoftmax.from_bundle(out / "models/words/1")
    print("sparse head: ", quality(model, unseen))
    served = bundle.read(out / "models/words/1")
    print(f"FLOPs speedup: {served.manifest.training.flops_speedup:.1f}x")

    def step(words: np.ndarray, state: object) -> tuple[np.ndarray, object]:
        hidden, state = model.lstm(model.embedding(torch.from_numpy(words)[:, None]), state)
        return hidden[:, 0].detach().numpy(), state

    draw = partial(decoding.sample, k=20, rng=np.random.default_rng(0))
    words = decoding.decode(step, Engine(served), [COMMON], None, length=12, choose=draw)
    print("it writes:", words[0].tolist())
    print(f"serve it: dss serve --models {out}/models")


if __name__ == "__main__":
    main()
