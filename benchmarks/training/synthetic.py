"""The paper's synthetic experiments: both sizes with three seeds, and the ablations.

Writes benchmarks/results/synthetic.json and the pictures in docs/images. A run that is complete in
runs/ is not repeated, and one that was broken off goes on.

    make figures
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from service.system.machine import machine

RUNS = Path("runs")
RESULTS = Path("benchmarks/results/synthetic.json")
IMAGES = Path("docs/images")
SIZES = ("10x10", "100x100")
SEEDS = (0, 1, 2)
ABLATIONS = ("lasso", "expert-lasso", "both-lassos", "balance")


def main() -> None:
    table = [run(size, seed) for size in SIZES for seed in SEEDS]
    ablations = [run("10x10", 0, ablate=term) for term in ABLATIONS]
    results = {
        "command": "make figures",
        "machine": machine("torch", "numpy"),
        "runs": table,
        "ablations": ablations,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        shutil.copy(folder(size, 0) / "experts.png", IMAGES / f"synthetic-{size}.png")
    for term in ABLATIONS:
        picture = folder("10x10", 0, ablate=term) / "experts.png"
        shutil.copy(picture, IMAGES / f"synthetic-10x10-no-{term}.png")
    print(markdown(table + ablations))  # noqa: T201


def folder(size: str, seed: int, ablate: str | None = None) -> Path:
    return RUNS / (f"synthetic-{size}-{seed}" + (f"-no-{ablate}" if ablate else ""))


def run(size: str, seed: int, ablate: str | None = None) -> dict[str, object]:
    out = folder(size, seed, ablate)
    if not (out / "summary.json").exists():
        command = [sys.executable, "-m", "service.cli", "train", "--task", "synthetic"]
        command += ["--size", size, "--seed", str(seed), "--out", str(out)]
        command += ["--ablate", ablate] if ablate else []
        command += ["--resume"] if out.exists() else []
        subprocess.run(command, check=True)  # noqa: S603
    summary = json.loads((out / "summary.json").read_text())
    del summary["utilization"]
    return {**summary, "without": ablate}


def markdown(rows: list[dict[str, object]]) -> str:
    lines = [
        "| size | without | seed | accuracy | full softmax | purity | copies | FLOPs speedup | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['size']} | {row['without'] or '-'} | {row['seed']} | {row['accuracy']:.4f}"
            f" | {row['full_accuracy']:.4f} | {row['purity']:.4f} | {row['mean_copies']:.3f}"
            f" | {row['flops_speedup']:.2f}x | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
