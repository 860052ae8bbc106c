"""What the package imports, and which types its users see."""

import subprocess
import sys
from pathlib import Path


def test_it_imports_nothing_of_the_server() -> None:
    heavy = {
        "fastapi", "starlette", "pydantic", "onnx", "onnxruntime", "numba", "prometheus_client",
        "uvicorn", "torch", "trainer", "click",
    }  # fmt: skip
    code = (
        "import sys, service.client\n"
        f"print({heavy!r} & {{name.split('.')[0] for name in sys.modules}},"
        " sorted(name for name in sys.modules if name.startswith('service.')"
        " and not name.startswith('service.client')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set() ['service.errors', 'service.npy']\n"


def test_users_see_its_types(tmp_path: Path) -> None:
    """The package is marked as typed; a wrong use is found before it runs."""
    user = tmp_path / "user.py"
    user.write_text(
        "from service.client import Client\n"
        "with Client('http://localhost') as client:\n"
        "    reveal_type(client.topk([[1.0]]).classes)\n"
        "    client.topk([[1.0]], k='ten')\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(user)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "signedinteger" in run.stdout
    assert 'incompatible type "str"' in run.stdout
    assert run.stdout.count("error:") == 1
