"""Where the project's own files are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
GOLDEN = TESTS / "serving" / "bundle" / "golden"  # bundles of versions 2 to 4
DEMO = ROOT / "models" / "demo" / "1"
