"""Models of `transformers`, tiny and random: captured, and with a sparse head in their place."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from service import bundle
from trainer import DSSoftmax, capture
from trainer.capture.folder import Captured

N, D = 60, 16
PADDING = 0


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=N,
        hidden_size=D,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=PADDING,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=N,
            n_embd=D,
            n_layer=1,
            n_head=2,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=None,
        )
    )


def bert_config(**more: Any) -> BertConfig:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertConfig(vocab_size=N, hidden_size=D, **sizes, **more)


def tokens(rows: int = 3, length: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(1, N, (rows, length), generator=torch.Generator().manual_seed(seed))


def load(path: Path) -> NDArray[Any]:
    return np.load(path, mmap_mode="r")


@torch.no_grad()
def vectors(model: Any, batch: dict[str, Tensor]) -> Tensor:  # noqa: ANN401
    """What the output layer is given, as the model itself tells."""
    inputs = {name: part for name, part in batch.items() if name != "labels"}
    return model.eval()(**inputs, output_hidden_states=True).hidden_states[-1]  # [S,T,D]


def assert_kept(found: Captured, hidden: Tensor, labels: Tensor) -> None:
    np.testing.assert_allclose(load(found.hidden), hidden.numpy(), atol=1e-6)
    assert load(found.labels).tolist() == labels.tolist()


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_vector_belongs_to_the_token_after_it(tmp_path: Path, make: Any, labelled: bool) -> None:  # noqa: ANN401
    model, ids = make(), tokens()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if labelled:
        batch["labels"] = ids.clone()
    found = capture(model, "lm_head", [batch], tmp_path)
    assert_kept(found, vectors(model, batch)[:, :-1].reshape(-1, D), ids[:, 1:].reshape(-1))
    assert np.array_equal(load(found.head), model.lm_head.weight.detach().numpy())
    assert not found.biased


def test_the_files_give_the_models_own_loss(tmp_path: Path) -> None:
    """The model's shift and this one agree."""
    model, ids = llama(), tokens()
    labels = ids.clone()
    labels[1, :4] = -100
    found = capture(model, "lm_head", [{"input_ids": ids, "labels": labels}], tmp_path)
    logits = torch.from_numpy(load(found.hidden) @ load(found.head).T)
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(load(found.labels).astype(int)))
    with torch.no_grad():
        expected = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(tmp_path: Path, side: str) -> None:
    """Neither predicted nor predicting: 8, 5 and 2 tokens give 7, 4 and 1 rows."""
    model, ids = llama(), tokens()
    place = torch.arange(8)[None, :]
    lengths = torch.tensor([[8], [5], [2]])
    mask = (place < lengths if side == "right" else place >= 8 - lengths).long()
    ids = ids.masked_fill(mask == 0, PADDING)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    found = capture(model, "lm_head", [batch], tmp_path)
    kept = torch.zeros(3, 8, dtype=torch.bool)
    for row, (first, count) in enumerate(
        [(0, 7), (0, 4), (0, 1)] if side == "right" else [(0, 7), (3, 4), (6, 1)]
    ):
        kept[row, first : first + count] = True
    following = ids.roll(-1, dims=1)
    assert found.rows == 12
    assert_kept(found, vectors(model, batch)[kept], following[kept])


def test_a_masked_model_names_the_token_where_it_stands(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertForMaskedLM(bert_config())
    ids = tokens()
    masked = torch.zeros(3, 8, dtype=torch.bool)
    masked[:, [1, 5]] = True
    batch = {
        "input_ids": ids.masked_fill(masked, 0),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(~masked, -100),
    }
    found = capture(model, "cls.predictions.decoder", [batch], tmp_path)
    with torch.no_grad():
        hidden = model.cls.predictions.transform(vectors(model, batch))
    assert_kept(found, hidden[masked], ids[masked])
    assert found.bias is not None
    assert np.array_equal(load(found.bias), model.cls.predictions.decoder.bias.detach().numpy())


def test_a_sequence_has_one_label(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(bert_config(num_labels=9))
    batch = {"input_ids": tokens(), "labels": torch.tensor([3, 8, 0])}
    found = capture(model, "classifier", [batch], tmp_path)
    with torch.no_grad():
        pooled = model.eval().bert(input_ids=batch["input_ids"]).pooler_output
    assert_kept(found, pooled, batch["labels"])


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    model = llama().bfloat16()
    batch = {"input_ids": tokens()}
    found = capture(model, "lm_head", [batch], tmp_path)
    assert load(found.hidden).dtype == load(found.head).dtype == np.float32
    assert_kept(
        found, vectors(model, batch)[:, :-1].float().reshape(-1, D), tokens()[:, 1:].flatten()
    )


# --- a sparse head in the model ---------------------------------------------------------------


def write_bundle(path: Path, model: Any, groups: list[NDArray[np.int32]]) -> Path:  # noqa: ANN401
    """The model's own head, with the classes of each group as an expert."""
    head = model.lm_head.weight.detach().numpy()
    rng = np.random.default_rng(0)
    gate = rng.normal(size=(len(groups), D)).astype(np.float32) if len(groups) > 1 else None
    shares = [1 / len(groups)] * len(groups)
    made = bundle.write(
        path,
        gate=np.zeros((1, D), np.float32) if gate is None else gate,
        weight=np.concatenate([head[group] for group in groups]),
        offsets=np.cumsum([0, *map(len, groups)]),
        classes=np.concatenate(groups).astype(np.int32),
        n_classes=N,
        training=bundle.TrainingFacts(utilization=shares, flops_speedup=1.0),
    )
    return made.path


@pytest.fixture(params=[llama, gpt2])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    return request.param().eval()


@torch.no_grad()
def test_one_expert_with_all_classes_changes_nothing(model: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """Its gate is 1, so the layer is the head itself: the same text and the same loss."""
    path = write_bundle(tmp_path / "1", model, [np.arange(N, dtype=np.int32)])
    ids = tokens()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PADDING}
    text = model.generate(ids, **options)
    loss = model(input_ids=ids, labels=ids).loss
    model.lm_head = DSSoftmax.from_bundle(path)
    assert torch.equal(model.generate(ids, **options), text)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, loss)


@torch.no_grad()
def test_text_is_written_with_a_sparse_head(model: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """Token by token, as the layer's own answers to the model's vectors say."""
    even, odd = np.arange(0, N, 2, dtype=np.int32), np.arange(1, N, 2, dtype=np.int32)
    layer = DSSoftmax.from_bundle(write_bundle(tmp_path / "1", model, [even, odd]))
    model.lm_head = layer
    ids = tokens()
    options = {"max_new_tokens": 6, "pad_token_id": PADDING}
    text = model.generate(ids, do_sample=False, **options)
    for length in range(8, 14):
        last = vectors(model, {"input_ids": text[:, :length]})[:, -1]
        assert text[:, length].tolist() == layer(last).argmax(dim=1).tolist()
    torch.manual_seed(0)
    drawn = model.generate(ids, do_sample=True, top_k=10, temperature=0.7, **options)
    assert drawn.shape == (3, 14) and not torch.equal(drawn, text)
    beams = model.generate(ids, num_beams=3, do_sample=False, **options)
    assert beams.shape == (3, 14)
    # The loss is that of the log-probabilities.
    hidden = vectors(model, {"input_ids": ids})[:, :-1].reshape(-1, D)
    expected = layer(hidden, ids[:, 1:].reshape(-1)).loss
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
