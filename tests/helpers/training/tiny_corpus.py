"""A corpus of a few lines that a word model can learn."""

from pathlib import Path

import numpy as np

WORDS = [f"w{number}" for number in range(15)]


def write_corpus(folder: Path) -> Path:
    """Each word is followed by the next one, mostly, so that there is something to learn."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for split, n_lines in (("train", 80), ("valid", 12), ("test", 12)):
        lines = [" ".join(WORDS)] if split == "train" else []
        for _ in range(n_lines):
            first = int(random.integers(len(WORDS)))
            lines.append(" ".join(WORDS[(first + step) % len(WORDS)] for step in range(6)))
        (folder / f"ptb.{split}.txt").write_text("".join(f" {line} \n" for line in lines))
    return folder
