"""What `dss` looks like: on a terminal, in a pipe, as JSON, in a shell that completes it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.dss_process import dss, on_terminal
from helpers.paths import ROOT

from service.bundle import Bundle
from service.cli import inspect
from service.cli.group import SECTIONS, START
from service.cli.main import cli

ESCAPE = "\x1b["
TINY_RUN = ("--task", "synthetic", "--size", "3x4", "--no-baseline", "--set", "epochs=3")


def plain(text: str) -> str:
    """What a terminal shows, without colours and moves of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looks") / "run"
    done = dss("train", *TINY_RUN, "--set", "items_per_class=20", "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == {"run": str(folder), **json.loads((folder / "summary.json").read_text())}
    return folder


@pytest.fixture(scope="module")
def bundle(run: Path) -> Path:
    destination = run.parent / "models" / "tiny" / "1"
    done = dss("export", run, destination, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["bundle"], facts["classes"], facts["experts"]) == (str(destination), 12, 3)
    assert facts["precision"] == "fp32" and facts["svd"] is None
    return destination


# --- help ------------------------------------------------------------------------------------


def test_help_tells_the_story() -> None:
    shown = dss("--help").stdout
    told = [name for names in SECTIONS.values() for name in names]
    assert re.findall(r"^  ([a-z]+) +[A-Z]", shown, flags=re.MULTILINE) == told
    assert re.findall(r"^  (dss .*)$", shown, flags=re.MULTILINE) == list(START)
    for word in ("From a model to a served layer:", *(f"{title}:" for title in SECTIONS), "130"):
        assert word in shown
    assert "..." not in shown.split("Commands:")[1]  # every line is whole
    assert max(map(len, shown.splitlines())) < 80


def test_help_stands_in_the_docs_as_it_is() -> None:
    assert f"$ dss --help\n{dss('--help').stdout}```" in (ROOT / "docs" / "cli.md").read_text()


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from service.cli.main import main\n"
        "sys.argv = ['dss', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert "'click'" in loaded
    for slow in ("rich", "numpy", "pydantic", "torch", "onnxruntime"):
        assert f"'{slow}'" not in loaded


@pytest.mark.parametrize("command", [name for names in SECTIONS.values() for name in names])
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: dss {command} ")


# --- colours ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--help",), ("inspect", "{}"), ("inspekt",)])
def test_colours_are_for_terminals(arguments: tuple[str, ...], tiny: Bundle) -> None:
    command = [argument.format(tiny.path) for argument in arguments]

    def coloured(terminal: bool, **env: str) -> bool:
        done = on_terminal(*command, **env) if terminal else dss(*command, **env)
        assert done.stdout + done.stderr
        return ESCAPE in done.stdout + done.stderr

    assert coloured(True)
    assert not coloured(False)
    assert not coloured(True, NO_COLOR="1")
    assert not coloured(True, TERM="dumb")
    assert coloured(False, FORCE_COLOR="1")
    assert not coloured(False, FORCE_COLOR="1", NO_COLOR="1")


def test_a_terminal_gets_drawings_and_a_pipe_plain_text(tiny: Bundle) -> None:
    piped = dss("inspect", tiny.path).stdout
    assert piped.isascii()
    shown = on_terminal("inspect", tiny.path, NO_COLOR="1").stdout
    for fact in ("12 with labels", "1.60x fewer FLOPs than a full softmax", "50.00%"):
        assert fact in shown and fact in piped
    bars = re.findall(r"^ *\d+ +\d+ +[\d.]+% +(━+)", shown, flags=re.MULTILINE)
    assert [len(bar) for bar in bars] == [30, 15, 15]  # experts with 50%, 25% and 25%
    dumb = on_terminal("inspect", tiny.path, TERM="dumb").stdout
    assert dumb == piped


def test_training_on_a_terminal(tmp_path: Path) -> None:
    """A bar with the time left while it runs; what it found, and what to do next, when it has."""
    done = on_terminal("train", *TINY_RUN, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stdout
    shown = plain(done.stdout)
    assert "epoch 3/3" in shown and "━" in shown and " left" in shown
    last = done.stdout.splitlines()[-7:]
    assert plain(last[0]).strip().endswith(str(tmp_path / "run"))
    assert "speedup" in plain(last[-3])
    assert plain(last[-1]).strip() == f"Next: dss export {tmp_path / 'run'} models/NAME/1"


def test_bars_stay_out_of_a_result(bundle: Path, tmp_path: Path) -> None:
    """stdout in a file, stderr on a terminal: as in `dss evaluate ... --json > figures.json`."""
    rows = np.load(bundle / "samples.npy")
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "labels.npy", np.zeros(len(rows), np.int64))
    out = tmp_path / "out.json"
    arguments = ["evaluate", bundle, "--hidden", tmp_path / "rows.npy"]
    arguments += ["--labels", tmp_path / "labels.npy", "--json"]
    done = on_terminal(*arguments, stdout=out)
    assert done.returncode == 0, done.stdout
    assert "answering" in done.stdout
    assert json.loads(out.read_text())["rows"] == len(rows)
    table = plain(on_terminal(*arguments[:-1]).stdout)
    assert "top 10" in table and "reachable recall" in table


def test_lines_that_come_bit_by_bit_on_a_terminal(bundle: Path) -> None:
    arguments = ("bench", "engine", bundle, "--batch", "1,2", "--seconds", 0.01)
    done = on_terminal(*arguments)
    assert done.returncode == 0, done.stdout
    lines = [plain(line).split() for line in done.stdout.splitlines()]
    assert [line[4] for line in lines if line[:1] == ["auto"]] == ["1", "2"]


# --- JSON ------------------------------------------------------------------------------------


def printed(*arguments: object) -> Any:  # noqa: ANN401
    done = dss(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_bundle_is_told_as_json(bundle: Path, run: Path, tmp_path: Path) -> None:
    good = {"bundle": str(bundle), "good": True, "classes": 12, "experts": 3}
    assert printed("verify", bundle) == good
    assert printed("inspect", bundle)["classes"] == 12
    assert printed("query", bundle, "--sample", "-k", 2)["version"] == 1
    measured = printed("bench", "engine", bundle, "--batch", 1, "--seconds", 0.01)
    assert [point["batch"] for point in measured["points"]] == [1]
    reported = printed("report", run, "--out", tmp_path / "report")
    assert Path(reported["page"]).is_file()
    assert [found["name"] for found in reported["runs"]] == ["run"]


def test_a_key_is_told_as_json() -> None:
    key = printed("keys", "new", "--name", "shop", "--scopes", "query", "--scopes", "admin")
    assert key["name"] == "shop" and key["scopes"] == ["admin", "query"]
    assert key["key"].startswith("dss_") and len(key["sha256"]) == 64


def test_a_failure_leaves_stdout_empty(tmp_path: Path) -> None:
    done = dss("inspect", tmp_path / "none", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Error: There is no folder {tmp_path / 'none'}; a bundle is one such as models/demo/1.\n"
    )


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence", "usage"),
    [
        (["inspekt"], "There is no command 'inspekt'. Did you mean 'inspect'?", "dss"),
        (["evalute"], "There is no command 'evalute'. Did you mean 'evaluate'?", "dss"),
        (["xyz"], "There is no command 'xyz'.", "dss"),
        (["--versoin"], "There is no option '--versoin'. Did you mean '--version'?", "dss"),
        (
            ["serve", "--prot", "1"],
            "There is no option '--prot'. Did you mean '--port'?",
            "dss serve",
        ),
        (["bench", "engin"], "Did you mean 'engine'?", "dss bench"),
        (["inspect"], "Missing argument 'BUNDLE'.", "dss inspect"),
        (["train"], "Give one of --task, --capture and --hidden.", "dss train"),
        (["query"], "Give rows: either --input FILE or --sample.", "dss query"),
        (["inspect", "a", "b"], "Got unexpected extra argument (b).", "dss inspect"),
        (["query", "--ca", "none.pem"], "'none.pem' does not exist.", "dss query"),
    ],
)
def test_wrong_usage_is_a_sentence_and_where_help_is(
    arguments: list[str], sentence: str, usage: str
) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    first, *_, last = result.stderr.splitlines()
    assert first.startswith("Error: ") and first.endswith(sentence)
    assert f"\nUsage: {usage} " in result.stderr
    assert last == f"{usage} --help says more."


def test_without_a_command_there_is_help() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 2
    assert "From a model to a served layer" in result.stderr


def test_an_interruption_is_one_line(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "describe", interrupt)
    result = CliRunner().invoke(cli, ["inspect", str(tiny.path)])
    assert result.exit_code == 130
    assert (result.stdout, result.stderr) == ("", "Interrupted: dss inspect did not finish.\n")


# --- completion ------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_real_bash_completes_commands_and_options() -> None:
    asked = {
        "dss ins": ["inspect"],
        "dss e": ["export", "evaluate"],
        "dss serve --po": ["--port"],
        "dss bench h": ["http"],
        "dss export --precision i": ["int8"],
    }
    lines = ['eval "$(dss completion bash)"', "complete -p dss"]
    for text in asked:
        words = text.split()
        lines.append(f"COMP_WORDS=({text}); COMP_CWORD={len(words) - 1}; COMPREPLY=()")
        lines.append('_dss_completion dss; echo "${COMPREPLY[@]}"')
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    registered, *found = done.stdout.splitlines()
    assert registered == "complete -o nosort -F _dss_completion dss"
    assert [line.split() for line in found] == list(asked.values())
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert f"_DSS_COMPLETE={shell}_complete" in result.output
