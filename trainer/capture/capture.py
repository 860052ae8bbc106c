"""`trainer.capture`: a trained model's hidden vectors, labels and head, in the files of a folder.

M rows, D hidden, N classes.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from service.errors import DSSError

if TYPE_CHECKING:
    from torch import nn

    from trainer.capture.batches import Batch, Forward, Labels
    from trainer.capture.folder import Captured


class OptionWrong(DSSError):
    pass


def capture(
    model: "nn.Module",
    head: "str | nn.Module",
    batches: "Iterable[Batch]",
    out: str | Path,
    *,
    limit: int | None = None,
    valid: "float | Iterable[Batch] | None" = None,
    test: "Iterable[Batch] | None" = None,
    dtype: Literal["fp32", "fp16"] = "fp32",
    labels: "Labels | None" = None,
    forward: "Forward | None" = None,
    shift: bool | None = None,
    ignore_index: int = -100,
    stateful: bool = False,
    progress: bool = True,
    about: Mapping[str, Any] | None = None,
) -> "Captured":
    """Run the model on batches and keep what its output layer is given, with the labels.

    `dss train --capture OUT` takes the folder. A capture that was interrupted goes on when it is
    called again in the same way, and ends with the same files as an unbroken one; the batches must
    come in the same order. The model is run in eval mode without gradients, and is left as it was.

    Args:
        head: the output layer, by name (as in `model.named_modules()`) or itself; an embedding if
            the model uses its rows in `torch.nn.functional.linear`
        batches: mappings, `(inputs, targets)` or tensors; `trainer/capture/batches.py` says what is
            made of each
        limit: at most so many rows of `batches`
        valid: batches to report accuracy on, or the share of `batches` to put aside for that: the
            first one, and others at equal distances
        test: batches that nothing is chosen by; they are kept in files of their own
        dtype: how vectors are stored, fp32 or fp16
        labels: from a batch to a tensor with a class for each hidden vector, or `ignore_index`
        forward: calls the model on a batch, `forward(model, batch)`; what it returns is not used
        shift: whether the vector at t belongs to label t+1; by default what `DefaultLabels` finds
        ignore_index: the label of vectors to leave out
        stateful: whether `forward` carries something from batch to batch: batches that are in the
            files already are then run again
        progress: whether to show a bar, where there is a terminal
        about: more facts for capture.json, such as where the model and its inputs come from
    """
    # These import PyTorch; `import trainer` must not, for commands that work without it.
    from trainer.capture.batches import DefaultLabels, run_model
    from trainer.capture.model import find_head, fingerprint, untouched, watched
    from trainer.capture.passes import Pass, read_all
    from trainer.capture.reader import Reader
    from trainer.capture.stored import STORED
    from trainer.capture.writer import CaptureFolder

    if dtype not in STORED:
        raise OptionWrong(f"dtype is {dtype!r}; fp32 or fp16 is expected.")
    if limit is not None and limit < 1:
        raise OptionWrong(f"limit is {limit}; at least 1 is expected.")
    share = float(valid) if isinstance(valid, float | int) else 0.0
    if isinstance(valid, float | int) and not 0 < share < 1:
        raise OptionWrong(f"valid is {valid}; batches, or a share between 0 and 1, are expected.")
    passes = [Pass("hidden vectors", batches, share, limit)]
    if valid is not None and not isinstance(valid, float | int):
        passes.append(Pass("validation", valid, 0.0, None, into="valid"))
    if test is not None:
        passes.append(Pass("test", test, 0.0, None, into="test"))

    model = getattr(model, "_orig_mod", model)  # of a compiled one
    found = find_head(model, head)
    n_classes, hidden_size = found.weight.shape
    settings = {
        "head": found.name,
        "model": fingerprint(model),
        "dtype": dtype,
        "limit": limit,
        "valid": share if valid is None or share else "batches",
        "shift": shift,
        "ignore_index": ignore_index,
        **(about or {}),
    }
    chosen = labels or DefaultLabels(shift, ignore_index)
    reader = Reader(model, found, chosen, forward or run_model, ignore_index, STORED[dtype])
    folder = CaptureFolder(Path(out), hidden_size, STORED[dtype], settings)
    with closing(folder):
        try:
            with untouched(model), watched(found):
                read_all(reader, folder, passes, stateful, progress)
        finally:
            folder.save()
        facts: dict[str, Any] = {
            "complete": True,
            "rows": folder.progress.rows["train"],
            "valid_rows": folder.progress.rows["valid"],
            "test_rows": folder.progress.rows["test"],
            "n_classes": n_classes,
            "hidden_size": hidden_size,
            "bias": found.bias is not None,
            **settings,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if isinstance(chosen, DefaultLabels):
            facts["shift"] = chosen.shift
        return folder.finish(*found.arrays(), facts)
