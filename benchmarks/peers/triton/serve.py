"""Writes a model repository for Triton's Python backend and becomes its server.

    python -m benchmarks.peers.triton.serve PORT FOLDER

The server is the one inside the nvidia-pytriton wheel, which runs without a GPU.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from benchmarks.peers import answers

CONFIG = """\
backend: "python"
max_batch_size: 256
input [{ name: "hidden" data_type: TYPE_FP32 dims: [ %(width)d ] }]
output [
  { name: "classes" data_type: TYPE_INT64 dims: [ %(k)d ] },
  { name: "scores" data_type: TYPE_FP32 dims: [ %(k)d ] }
]
dynamic_batching { max_queue_delay_microseconds: 0 }
instance_group [{ count: 1 kind: KIND_CPU }]
"""


def main(port: str, folder: str) -> None:
    packages = Path(sysconfig.get_path("purelib"))
    wheel = packages / "pytriton" / "tritonserver"
    backends, models = Path(folder) / "backends", Path(folder) / "triton-models"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(wheel / "backends", backends)
    stub = "triton_python_backend_stub"
    shutil.copy(wheel / "python_backend_stubs" / version / stub, backends / "python" / stub)
    (models / "topk" / "1").mkdir(parents=True)
    config = CONFIG % {"width": answers.WIDTH, "k": answers.K}
    (models / "topk" / "config.pbtxt").write_text(config)
    shutil.copy(Path(__file__).with_name("model.py"), models / "topk" / "1" / "model.py")
    libraries = [sysconfig.get_config_var("LIBDIR"), *packages.glob("nvidia_pytriton.libs")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        # The interpreter inside ignores PYTHONPATH; it takes its packages from where python3 is.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    server = str(wheel / "bin" / "tritonserver")
    options = {
        "model-repository": models,
        "backend-directory": backends,
        "http-address": "127.0.0.1",
        "http-port": port,
        "allow-grpc": "false",
        "allow-metrics": "false",
        "log-info": "false",
    }
    arguments = [server, *(f"--{name}={value}" for name, value in options.items())]
    os.execve(server, arguments, environment)  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
