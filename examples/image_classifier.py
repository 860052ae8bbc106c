"""An image classifier of 4,000 classes gets a sparse output layer.

The images are made up: each class is a picture of its own in the style of one of 40 families, seen
through noise and moved about a little.
"""

import argparse
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from service import bundle
from service.cli.main import cli
from service.engine import Engine
from trainer import capture

FAMILIES, PER_FAMILY, SIZE = 40, 100, 16
CLASSES = FAMILIES * PER_FAMILY
BATCH = 500


def pictures(random: torch.Generator) -> Tensor:
    """One for each class: [N,1,16,16]."""
    families = torch.randn(FAMILIES, 1, SIZE, SIZE, generator=random)
    own = torch.randn(CLASSES, 1, SIZE, SIZE, generator=random)
    return families.repeat_interleave(PER_FAMILY, dim=0) + own


def photographs(of: Tensor, count: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images [B,1,16,16] and their classes [B]."""
    for _ in range(count):
        labels = torch.randint(CLASSES, (BATCH,), generator=random)
        moved = torch.roll(of[labels], int(torch.randint(2, (), generator=random)), dims=3)
        yield moved + 1.2 * torch.randn(moved.shape, generator=random), labels


def make_model() -> nn.Module:
    features = nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIZE // 4) ** 2, 64),
        nn.BatchNorm1d(64),
    )
    return nn.Sequential(features, nn.Linear(64, CLASSES))


def dss(command: str) -> None:
    print(f"$ dss {command}")
    cli.main(shlex.split(command), standalone_mode=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of the model's training")
    parser.add_argument("--batches", type=int, default=200, help="to capture")
    parser.add_argument("--out", type=Path, default=Path("runs/image-classifier"))
    options = parser.parse_args(arguments)
    out = options.out
    shutil.rmtree(out, ignore_errors=True)
    torch.set_num_threads(1)  # more are of no use to so small a model
    random = torch.manual_seed(0)
    of, model = pictures(random), make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for images, labels in photographs(of, options.steps, random):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    seen = photographs(of, options.batches, random)
    held_out = photographs(of, 10, random)
    capture(model, "1", seen, out / "captured", valid=held_out, dtype="fp16")
    dss(f"train --capture {out}/captured --experts 40 --speedup 15 --out {out}/run")
    dss(f"export {out}/run {out}/models/pictures/1 --precision fp16")
    dss(f"evaluate {out}/models/pictures/1 --capture {out}/captured")

    engine = Engine(bundle.read(out / "models/pictures/1"))
    images, labels = next(photographs(of, 1, random))
    with torch.no_grad():
        hidden = model.eval()[0](images).numpy()  # [B,64]
    best = engine.topk(hidden, k=5)
    print("an image of class", labels[0].item(), "is taken for one of", best.classes[0].tolist())
    print(f"serve it: dss serve --models {out}/models")


if __name__ == "__main__":
    main()
