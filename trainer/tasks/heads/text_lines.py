"""Lines of text as a recogniser is given them: rendered characters side by side, black on white.

Each image of a character belongs to one split, so that no image that was trained on is measured on.

B lines, H height, W width of a line.
"""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import DSSError
from trainer.capture.folder import SPLITS

SIDE = 48  # pixels of a character
INK = 15  # full ink, of four bits
LENGTHS = (4, 12)  # characters of a line
LINES = 16  # of a batch, all of one length
SHARES = (0.8, 0.9)  # where validation and test begin, of the shuffled images


class CharactersMissing(DSSError):
    pass


@dataclass(frozen=True)
class Characters:
    """Images of characters, two pixels in a byte: the one on the left in its upper four bits."""

    nibbles: NDArray[np.uint8]  # [images,48,24]
    font: NDArray[np.integer[Any]]  # [images]

    def pixels(self, images: NDArray[np.int64]) -> NDArray[np.uint8]:
        """0 black to 255 white: [..., 48, 48]."""
        packed = self.nibbles[images]
        ink = np.stack([packed >> 4, packed & INK], axis=-1).reshape(*images.shape, SIDE, SIDE)
        return (255 - ink * (255 // INK)).astype(np.uint8)


def read_characters(path: Path) -> Characters:
    try:
        if not zipfile.is_zipfile(path):
            raise CharactersMissing(f"{path} is no .npz file of rendered characters.")
        with np.load(path, allow_pickle=False) as file:
            found = Characters(file["nibbles"], file["font"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CharactersMissing(f"{path} is no .npz file of rendered characters.") from error
    images = len(found.font)
    if found.nibbles.shape != (images, SIDE, SIDE // 2) or found.nibbles.dtype != np.uint8:
        raise CharactersMissing(f"{path} has no nibbles [{images}, {SIDE}, {SIDE // 2}] of uint8.")
    return found


def lines(characters: Characters, split: str, seed: int) -> Iterator[NDArray[np.int64]]:
    """Endless batches of lines, as numbers of images [B, characters]; each line in one font."""
    random = np.random.default_rng([seed, SPLITS.index(split)])
    fonts = images_of(characters, split, seed)
    sizes = np.array([len(images) for images in fonts], float)
    while True:
        length = random.integers(LENGTHS[0], LENGTHS[1] + 1)
        chosen = random.choice(len(fonts), LINES, p=sizes / sizes.sum())
        yield np.stack([random.choice(fonts[font], length) for font in chosen])


def images_of(characters: Characters, split: str, seed: int) -> list[NDArray[np.int64]]:
    """A split's images, by font."""
    images = np.random.default_rng(seed).permutation(len(characters.font))
    first, second = (round(len(images) * share) for share in SHARES)
    parts = dict(zip(SPLITS, np.split(images, [first, second]), strict=True))
    own = np.sort(parts[split])
    return [own[characters.font[own] == font] for font in np.unique(characters.font[own])]


def as_input(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[B, characters, 48, 48] as PP-OCR is given a line: [B,3,H,W], from -1 (black) to 1."""
    count, length = pixels.shape[:2]
    line = pixels.transpose(0, 2, 1, 3).reshape(count, 1, SIDE, length * SIDE)
    scaled = line.astype(np.float32) / 127.5 - 1
    return np.ascontiguousarray(np.broadcast_to(scaled, (count, 3, SIDE, length * SIDE)))
