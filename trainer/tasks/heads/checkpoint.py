"""A language model of `transformers` from a local folder or a GGUF file, run on text."""

from pathlib import Path
from typing import Any

import torch

from service.errors import DSSError
from service.terminal.text import printable
from trainer.capture.capture import capture
from trainer.capture.folder import NAMES, Captured
from trainer.data.files import write_whole
from trainer.tasks.heads.packages import imported, package_files
from trainer.tasks.heads.text_windows import Text, TextMissing, Windows
from trainer.tasks.heads.wanted import Wanted
from trainer.tasks.language_model import corpus as corpora

ROWS = Wanted(train=300_000, valid=30_000, test=30_000)
CONTEXT = 512
HEADS = "'doubly-sparse-softmax[heads]'"


class CheckpointUnusable(DSSError):
    pass


def write(
    checkpoint: str,
    out: Path,
    *,
    texts: dict[str, Text],
    wanted: Wanted,
    dtype: str,
    context: int = CONTEXT,
    gguf: str | None = None,
    head: str | None = None,
    threads: int | None = None,
) -> Captured:
    """Run the model on windows of each text; a vector's label is the next token."""
    if threads is not None:
        torch.set_num_threads(threads)
    folder, file = find(checkpoint, gguf)
    model, tokenizer = load(folder, file)
    longest = getattr(model.config, "max_position_embeddings", None) or context
    length = min(context, longest)
    windows = {
        split: Windows(text, tokenizer, length, wanted.of(split) or 1)
        for split, text in texts.items()
    }
    captured = capture(
        model,
        head or output_layer(model, folder),
        windows["train"],
        out,
        limit=wanted.train,
        valid=windows["valid"],
        test=windows["test"],
        dtype=dtype,  # type: ignore[arg-type]
        about={
            "from": "transformers",
            "checkpoint": file or folder.name,
            "text": {split: list(map(str, text.files)) for split, text in texts.items()},
            "context": length,
            "wanted": wanted.facts(),
            "labels": "the next token",
        },
    )
    write_names(tokenizer, captured)
    return captured


def corpus_texts(data: Path) -> dict[str, Text]:
    """A corpus' own files; of several corpora in the folder WikiText, whose text is cased."""
    try:
        _, files = corpora.find(data, "wikitext")
    except corpora.CorpusMissing as missing:
        try:
            _, files = corpora.find(data)
        except corpora.CorpusMissing:
            raise TextMissing(f"{missing} Name files of text with --text.") from None
    return {split: Text((file,)) for split, file in files.items()}


# --- the model --------------------------------------------------------------------------------


def find(checkpoint: str, gguf: str | None) -> tuple[Path, str | None]:
    """A folder and the GGUF file in it, if the checkpoint is one.

    `checkpoint` is a folder, a GGUF file, or an installed package that carries one.
    """
    place = Path(checkpoint)
    if place.is_file():
        return place.parent, place.name
    if place.is_dir():
        found = sorted(place.glob("*.gguf")) if gguf is None else [place / gguf]
        if gguf is None and (place / "config.json").exists():
            return place, None
    else:
        if place.name != checkpoint:
            raise CheckpointUnusable(f"There is no folder {place}.")
        found = package_files(checkpoint, ".gguf", f"--no-deps {checkpoint}")
        found = [file for file in found if gguf is None or file.name == gguf]
    if len(found) != 1 or not found[0].is_file():
        names = ", ".join(file.name for file in found if file.is_file())
        several = f"several GGUF files ({names}); choose one with --gguf" if names else None
        raise CheckpointUnusable(
            f"{checkpoint} holds {several or 'neither a config.json nor that GGUF file'}."
        )
    return found[0].parent, found[0].name


def load(folder: Path, gguf: str | None) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer. Nothing is downloaded, and no code of it is run."""
    transformers = imported("transformers", HEADS)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf is not None:
        for module in ("gguf", "accelerate"):
            imported(module, HEADS)
        options["gguf_file"] = gguf
    transformers.utils.logging.disable_progress_bar()  # it knows nothing of our own
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointUnusable(
            f"transformers cannot load {folder / (gguf or '')} as a causal language model: {reason}"
        ) from error
    return model, tokenizer


def output_layer(model: Any, folder: Path) -> torch.nn.Module:  # noqa: ANN401
    found = model.get_output_embeddings()
    if found is None:
        raise CheckpointUnusable(f"The model in {folder} names no output layer; give --head.")
    return found


def write_names(tokenizer: Any, captured: Captured) -> None:  # noqa: ANN401
    """Tokens as the vocabulary spells them; a head may have more rows than it has tokens."""
    classes = list(range(min(captured.n_classes, len(tokenizer))))
    known = tokenizer.convert_ids_to_tokens(classes)
    known += [None] * (captured.n_classes - len(known))
    lines = (printable(name or f"<unused {number}>") for number, name in enumerate(known))
    write_whole(captured.folder / NAMES, "".join(f"{line}\n" for line in lines).encode())
