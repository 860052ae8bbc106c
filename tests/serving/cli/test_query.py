"""`dss query`: rows in every form people have, answers of a server or of a bundle itself."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers.dss_process import on_terminal
from helpers.server import Running, free_port
from helpers.tiny_bundle import WIDTH, rows_for, write_tiny
from numpy.typing import NDArray

from service.bundle import Bundle
from service.cli import query as cli_query
from service.cli.main import cli
from service.cli.query_input import RowsMissing, RowsUnreadable, read_rows
from service.engine import Engine
from service.errors import DSSError


def query(*arguments: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["query", *map(str, arguments)], input=stdin)


def answered(*arguments: object, stdin: bytes | None = None) -> dict[str, Any]:
    result = query(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """One row for each expert of the tiny bundle."""
    path = tmp_path / "rows.npy"
    np.save(path, rows_for(0, 1, 2))
    return path


# --- rows ------------------------------------------------------------------------------------


def as_npy(array: NDArray[Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as stream:
            np.save(stream, array)

    return write


def as_bytes(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def as_text(text: str) -> Callable[[Path], None]:
    return as_bytes(text.encode())


ROWS = np.array([[0.5, 1.0], [-2.0, 3e-1]])


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (as_npy(ROWS), ROWS),
        (as_npy(ROWS.astype(np.float16)), ROWS),
        (as_npy(ROWS[0]), ROWS[:1]),
        (as_npy(np.array([[1, 2]])), [[1, 2]]),
        (as_text("[[0.5, 1], [-2, 0.3]]"), ROWS),
        (as_text(' {"inputs": [[0.5, 1], [-2, 0.3]], "k": 1}'), ROWS),
        (as_text("[0.5, 1]"), ROWS[:1]),
        (as_text("0.5,1.0\n-2,0.3\n"), ROWS),
        (as_text("0.5 1.0\n\n-2\t3e-1"), ROWS),
        (as_text("0.5; 1.0;\n-2; 0.3;\n"), ROWS),
    ],
)
def test_rows_in_every_form(
    tmp_path: Path, write: Callable[[Path], None], expected: NDArray[Any]
) -> None:
    file = tmp_path / "rows"
    write(file)
    found = read_rows(str(file))
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (as_text("1 2\n3 x"), "line 2 has 'x', which is not a number."),
        (as_text("1 2\n3"), "line 2 has 1 numbers, but the first row has 2."),
        (as_text("[[1, 2], [3]]"), "is not JSON of the form"),
        (as_text('{"rows": [[1]]}'), "is not JSON of the form"),
        (as_text("[[1, 2]"), "is not JSON of the form"),
        (as_text("[[[1]]]"), "has shape [1, 1, 1]"),
        (as_text(""), "holds no rows."),
        (as_npy(np.array(["a"])), "holds str"),
        (as_npy(np.zeros((0, 3))), "holds no rows."),
        (as_bytes(b"\x93NUMPY\x01\x00"), "not a whole .npy file"),
        (as_bytes(b"\xff\xfe\x00"), "neither .npy nor JSON"),
    ],
)
def test_what_holds_no_rows_is_refused_in_a_sentence(
    tmp_path: Path, write: Callable[[Path], None], words: str
) -> None:
    file = tmp_path / "rows"
    write(file)
    with pytest.raises(RowsUnreadable) as refused:
        read_rows(str(file))
    assert words in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RowsMissing, match="does not exist"):
        read_rows(str(tmp_path / "none.npy"))
    with pytest.raises(RowsUnreadable, match="Is a directory"):
        read_rows(str(tmp_path))


# --- a bundle --------------------------------------------------------------------------------


def test_a_bundle_answers_as_its_engine_does(tiny: Bundle, rows: Path) -> None:
    found = answered(tiny.path, "--input", rows, "-k", 3)
    expected = Engine(tiny).topk(rows_for(0, 1, 2), 3)
    assert (found["model"], found["version"]) == ("tiny", 1)
    assert found["experts"] == [0, 1, 2]
    assert found["classes"] == expected.classes.tolist()
    assert found["labels"] == [[f"class {c}" for c in row] for row in expected.classes]
    np.testing.assert_allclose(found["log_probs"], expected.log_probs, rtol=1e-6)
    np.testing.assert_allclose(found["gates"], expected.gates, rtol=1e-6)


def test_text_has_a_line_for_each_answer(tiny: Bundle, rows: Path) -> None:
    answers = Engine(tiny).topk(rows_for(1, 2), 2)
    lines = query(tiny.path, "--input", rows, "-k", 2, "--rows", "1:").output.splitlines()
    assert lines[0].split() == ["row", "expert", "gate", "class", "log", "prob", "label"]
    assert len(lines) == 1 + 2 * 2
    for line, (row, place) in zip(lines[1:], ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):
        number = answers.classes[row, place]
        assert line.split() == [
            *(str(row + 1), str(row + 1), f"{answers.gates[row]:.4f}", str(number)),
            *(f"{answers.log_probs[row, place]:.4f}", "class", str(number)),
        ]


def test_a_bundle_without_labels(tmp_path: Path, rows: Path) -> None:
    bundle = write_tiny(tmp_path / "plain", labels=False)
    output = query(bundle.path, "--input", rows, "-k", 1).output
    assert "label" not in output and len(output.splitlines()) == 4
    found = answered(bundle.path, "--input", rows)
    assert "labels" not in found
    assert (found["model"], found["version"]) == ("plain", None)


def test_samples_and_parts_of_the_input(tiny: Bundle, rows: Path) -> None:
    assert tiny.samples is not None
    assert len(answered(tiny.path, "--sample")["classes"]) == len(tiny.samples)
    whole = answered(tiny.path, "--input", rows)
    for asked, part in (("1", [1]), ("1:", [1, 2]), (":2", [0, 1]), ("1:9", [1, 2])):
        found = answered(tiny.path, "--input", rows, "--rows", asked)
        assert found["classes"] == [whole["classes"][row] for row in part]


def test_rows_come_from_stdin(tiny: Bundle, rows: Path) -> None:
    expected = answered(tiny.path, "--input", rows)
    text = json.dumps(rows_for(0, 1, 2).tolist()).encode()
    for content in (rows.read_bytes(), text):
        assert answered(tiny.path, "--input", "-", stdin=content) == expected


def test_many_rows_are_asked_in_parts(
    tiny: Bundle, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answered(tiny.path, "--input", rows)
    monkeypatch.setattr(cli_query, "MOST_ROWS", 2)
    assert answered(tiny.path, "--input", rows) == whole


def test_a_terminal_gets_a_table_for_each_row(tiny: Bundle, rows: Path) -> None:
    shown = on_terminal("query", tiny.path, "--input", rows, "-k", 2, NO_COLOR="1").stdout
    assert [line for line in shown.splitlines() if line.startswith("row ")] == [
        f"row {row}  expert {row}, gate {gate:.4f}"
        for row, gate in enumerate(Engine(tiny).topk(rows_for(0, 1, 2), 1).gates)
    ]
    assert shown.count("probability") == 3 and "━" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nowhere", "--input", "{rows}"], 1, "'nowhere' is neither a URL such as"),
        (["{bundle}", "--input", "none.npy"], 1, "none.npy does not exist."),
        (["{bundle}", "--input", "{rows}", "--rows", "7:"], 1, "leaves none of the 3 rows."),
        (["{bundle}", "--input", "{rows}", "--rows", "1-2"], 2, "is neither a row's number"),
        (["{bundle}", "--input", "{rows}", "-k", "99"], 1, "k is 99;"),
        (["{bundle}", "--input", "{rows}", "--model", "m"], 2, "are for a server"),
        (["{bundle}"], 2, "either --input FILE or --sample."),
        (["{bundle}", "--input", "{rows}", "--sample"], 2, "either --input FILE or --sample."),
    ],
)
def test_what_cannot_be_asked(
    tiny: Bundle, rows: Path, arguments: list[str], status: int, words: str
) -> None:
    result = query(*(text.format(bundle=tiny.path, rows=rows) for text in arguments))
    assert result.exit_code == status
    assert result.stdout == ""
    assert words in result.stderr.splitlines()[0]


def test_rows_of_another_width(tiny: Bundle, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.ones((1, WIDTH + 1)))
    result = query(tiny.path, "--input", tmp_path / "wide.npy")
    assert result.exit_code == 1 and f"[rows, {WIDTH}] is expected" in result.stderr


# --- a server --------------------------------------------------------------------------------


@dataclass
class Asked:
    how: dict[str, Any]
    rows: list[NDArray[np.float32]]
    closed: bool = False
    modes: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tiny: Bundle) -> Asked:
    """Stands in for `service.client`, and remembers what it was asked."""
    asked = Asked({}, [])
    engine = Engine(tiny)

    class Client:
        def __init__(self, url: str, **how: object) -> None:
            asked.how = {"url": url, **how}

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            asked.closed = True

        def samples(self) -> NDArray[np.float32]:
            return rows_for()

        def topk(
            self,
            hidden: NDArray[np.float32],
            k: int,
            experts: int | None,
            labels: bool,
            **mode: Any,
        ) -> cli_query.Answers:
            assert labels
            asked.rows.append(hidden)
            asked.modes.append(mode)
            found = engine.topk(hidden, k, experts or 1)
            return cli_query.Answers("far", 7, *found[:4], labels=None)

    module = ModuleType("service.client")
    module.Client = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "service.client", module)
    return asked


def test_how_a_server_is_asked(client: Asked, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answered("--input", rows, "-k", 2)
    assert (found["model"], found["version"], len(found["classes"][0])) == ("far", 7, 2)
    assert client.how == {
        "url": "http://localhost:8000",
        "model": None,
        "version": None,
        "api_key": None,
        "timeout": 10.0,
        "verify": True,
    }
    np.testing.assert_array_equal(client.rows[0], rows_for(0, 1, 2))
    assert client.closed

    monkeypatch.setenv("DSS_API_KEY", "a-key-of-mine-0123")
    more = ["--model", "m", "--version", "2", "--timeout", "3", "--insecure"]
    answered("https://far", "--input", rows, *more)
    assert client.how == {
        "url": "https://far",
        "model": "m",
        "version": 2,
        "api_key": "a-key-of-mine-0123",
        "timeout": 3.0,
        "verify": False,
    }
    answered("https://far", "--input", rows, "--version", "stable", "--ca", rows)
    assert (client.how["version"], client.how["verify"]) == ("stable", str(rows))


@pytest.mark.usefixtures("client")
def test_a_server_may_have_no_samples_to_give() -> None:
    result = query("http://far", "--sample")
    assert result.exit_code == 1
    assert "http://far gives no samples: bring rows with --input FILE." in result.stderr


@pytest.mark.usefixtures("client")
def test_a_failing_client_is_told_in_a_sentence(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DSSError("No server answers at http://far.")

    monkeypatch.setattr(sys.modules["service.client"].Client, "topk", refuse)
    result = query("http://far", "--input", rows)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: No server answers at http://far.\n"


def test_a_real_server_is_asked(server: Running, models: Path, rows: Path) -> None:
    found = answered(server.url, "--input", rows, "-k", 3, "--model", "tiny", "--version", 2)
    local = answered(models / "tiny" / "2", "--input", rows, "-k", 3)
    np.testing.assert_allclose(found.pop("log_probs"), local.pop("log_probs"), rtol=1e-5)
    np.testing.assert_allclose(found.pop("gates"), local.pop("gates"), rtol=1e-5)
    assert found == local
    sampled = answered(server.url, "--sample", "--model", "tiny", "--version", 2)
    assert sampled["classes"] == answered(models / "tiny" / "2", "--sample")["classes"]
    nobody = query(f"http://127.0.0.1:{free_port()}", "--input", rows)
    assert (nobody.exit_code, nobody.stdout) == (1, "")
    assert nobody.stderr.startswith("Error: ") and nobody.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], {"exact": False, "recall": None, "rescore": False}),
        (["--exact"], {"exact": True, "recall": None, "rescore": False}),
        (["--recall", "0.99"], {"exact": False, "recall": 0.99, "rescore": False}),
        (["--rescore", "--experts", "2"], {"exact": False, "recall": None, "rescore": True}),
    ],
)
def test_a_mode_is_asked_for(
    client: Asked, rows: Path, arguments: list[str], asked: dict[str, Any]
) -> None:
    answered("--input", rows, *arguments)
    assert client.modes == [asked]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exact", "--recall", "0.9"], "one of --exact, --recall and --rescore."),
        (["--rescore", "--recall", "0.9"], "one of --exact, --recall and --rescore."),
        (["--exact", "--experts", "2"], "--experts goes with neither --exact nor --recall."),
        (["--recall", "1.5"], "is not in the range"),
        (["--recall", "0"], "is not in the range"),
    ],
)
def test_modes_that_cannot_be_asked_for(
    client: Asked, rows: Path, arguments: list[str], words: str
) -> None:
    result = query("--input", rows, *arguments)
    assert result.exit_code == 2 and words in result.output
    assert client.rows == []


def test_a_bundle_that_cannot_says_so(tiny: Bundle, rows: Path) -> None:
    result = query(tiny.path, "--input", rows, "--exact")
    assert result.exit_code == 1 and "ships no output layer" in result.output


def test_how_each_row_was_answered_is_shown() -> None:
    answer = cli_query.Answers(
        "m", 1, np.array([[3], [4]]), np.zeros((2, 1), np.float32), np.array([0, 1]),
        np.ones(2, np.float32), None, np.array([1, 0]), np.array(["sparse", "escalated"]), "kept",
    )  # fmt: skip
    assert cli_query.table(answer, 0).splitlines() == [
        "row  answered   expert    gate      class  log prob",
        "  0  sparse          0  1.0000          3    0.0000",
        "  1  escalated       1  1.0000          4    0.0000",
        "The promised recall is kept.",
    ]
