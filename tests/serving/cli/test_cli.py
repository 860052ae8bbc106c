import json
import os
import socket
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.fidelity_layer import a_contract, write_fidelity
from helpers.tiny_bundle import write_tiny

from service.bundle import Bundle
from service.cli import group as commands
from service.cli import main


def dss(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DSS_")}
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean | env,
    )


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assert_one_sentence(result: subprocess.CompletedProcess[str], status: int = 1) -> None:
    assert result.returncode == status
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.endswith(".\n")
    assert result.stderr.count("\n") == 1


def test_the_service_never_imports_torch_or_trainer() -> None:
    code = (
        "import sys, service.http.app, service.cli, service.server, service.cli.inspect\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'trainer')])"
    )
    assert run_python(code) == "[]\n"


def test_verify_accepts_a_good_bundle(tiny: Bundle) -> None:
    result = dss("verify", str(tiny.path))
    assert result.returncode == 0
    assert "good bundle: 12 classes in 3 experts" in result.stdout


def test_verify_refuses_a_bad_bundle_in_a_sentence(tmp_path: Path) -> None:
    write_tiny(tmp_path / "1")
    (tmp_path / "1" / "gate.onnx").write_bytes(b"")
    result = dss("verify", str(tmp_path / "1"))
    assert_one_sentence(result)
    assert "gate.onnx" in result.stderr


def test_verify_refuses_what_is_no_bundle(tmp_path: Path) -> None:
    assert_one_sentence(dss("verify", str(tmp_path)))


def test_inspect_prints_a_table(tiny: Bundle) -> None:
    result = CliRunner().invoke(main.cli, ["inspect", str(tiny.path)])
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "classes 12 with labels" in lines
    assert "experts 3" in lines
    assert "speedup 1.60x fewer FLOPs than a full softmax" in lines
    assert "accuracy 90.00%" in lines
    assert "copies 1.083 per class" in lines
    assert "11 classes in 1 expert" in lines
    assert "1 classes in 2 experts" in lines
    assert lines[-3:] == ["0 5 50.00%", "1 4 25.00%", "2 4 25.00%"]


def test_inspect_says_what_can_be_promised(tmp_path: Path) -> None:
    made = write_fidelity(tmp_path / "1", contract=a_contract(4))
    result = CliRunner().invoke(main.cli, ["inspect", str(made.path)])
    assert result.exit_code == 0, result.output
    lines = {line.split("  ")[0]: line for line in result.output.splitlines()}
    assert lines["objective"].endswith("fidelity: the head's own rows")
    assert lines["head"].endswith("shipped, for exact answers")
    assert lines["contract"].endswith(
        "recall 0.5, 0.9 at k up to 1, 5, 0.99 exact only, calibrated on 1,000 rows"
    )
    facts = json.loads(CliRunner().invoke(main.cli, ["inspect", "--json", str(made.path)]).output)
    assert facts["objective"] == "fidelity" and facts["exact"]
    assert facts["contract"]["sparse"] == [0.5, 0.9]
    verified = CliRunner().invoke(main.cli, ["verify", str(made.path)])
    assert verified.exit_code == 0 and "60 classes in 4 experts" in verified.output


def test_inspect_prints_json(tiny: Bundle) -> None:
    result = CliRunner().invoke(main.cli, ["inspect", "--json", str(tiny.path)])
    facts = json.loads(result.output)
    assert (facts["classes"], facts["hidden_size"], facts["labels"]) == (12, 4, True)
    assert facts["copies"] == {"1": 11, "2": 1}
    assert [expert["classes"] for expert in facts["experts"]] == [5, 4, 4]
    assert facts["bytes"] == sum(entry.bytes for entry in tiny.manifest.files.values())


def test_serve_without_a_models_folder(tmp_path: Path) -> None:
    assert_one_sentence(dss("serve", "--models", str(tmp_path / "none")))


def test_serve_on_a_port_that_is_taken(models: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = dss("serve", "--models", str(models), "--port", str(port))
    assert result.returncode == 1
    assert result.stderr.endswith(f"Error: The server could not start on 127.0.0.1:{port}.\n")
    assert "Traceback" not in result.stderr


def test_serve_with_a_wrong_configuration(tmp_path: Path) -> None:
    config = tmp_path / "dss.toml"
    config.write_text("colour = 1\n")
    for result in (
        dss("serve", "--config", str(config)),
        dss("serve", DSS_CONFIG=str(config)),
    ):
        assert_one_sentence(result)
        assert "'colour'" in result.stderr
    assert_one_sentence(dss("serve", "--log-level", "loud"))


def test_wrong_usage_is_2() -> None:
    assert dss("serve", "--port", "x").returncode == 2
    assert dss("nonsense").returncode == 2


def entry_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=commands.ENTRY_POINTS)


def test_more_commands_come_from_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the command that runs is imported."""
    found = [
        entry_point("look", "service.cli.main:inspect"),
        entry_point("bad", "no_such_module:x"),
    ]
    monkeypatch.setattr(commands, "entry_points", lambda group: found if group else [])
    result = CliRunner().invoke(main.cli, ["look", "--help"])
    assert result.exit_code == 0
    assert "Describe a bundle" in result.output


def test_a_command_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = entry_point("train", "no_such_module.cli:train")
    monkeypatch.setattr(commands, "entry_points", lambda group: [missing] if group else [])
    for arguments in (["train"], ["train", "--task", "synthetic"], ["train", "--help"]):
        result = CliRunner().invoke(main.cli, arguments)
        assert result.exit_code == 1
        assert result.output == (
            "Error: dss train needs no_such_module: install doubly-sparse-softmax[train].\n"
        )
    listing = CliRunner().invoke(main.cli, ["--help"])
    assert listing.exit_code == 0
    assert "serve" in listing.output
    assert "install doubly-sparse-softmax[train]" in listing.output


def test_help_of_serving_commands_imports_no_command_of_others() -> None:
    code = (
        "import sys\n"
        "from service.cli.main import main\n"
        "sys.argv = ['dss', 'serve', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'trainer')])"
    )
    assert run_python(code).endswith("\n[]\n")


@pytest.mark.parametrize("command", [["train", "--task", "synthetic"], ["export", "run", "bundle"]])
def test_training_commands_without_torch_say_what_to_install(command: list[str]) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # as if it were not installed
        f"sys.argv = ['dss', *{command}]\n"
        "from service.cli.main import main\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert_one_sentence(result)
    assert f"dss {command[0]} needs torch: install doubly-sparse-softmax[train]." in result.stderr


def test_help_tells_all_commands() -> None:
    result = dss("--help")
    for command in ("serve", "verify", "inspect", "train", "export"):
        assert f"  {command} " in result.stdout
