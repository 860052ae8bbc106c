"""Writes what must be a copy of something else: `python deploy/kubernetes/generate.py`

Kustomize and Helm read no file outside their own folders. So the alerts are made a PrometheusRule,
and the chart has copies of the alerts and of the script.
"""

from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent
RULES = DEPLOY / "prometheus" / "rules.yml"
COMPONENTS = DEPLOY / "kubernetes" / "components"
SCRIPT = COMPONENTS / "bundles" / "copy-bundles.sh"
CHART_FILES = DEPLOY / "helm" / "doubly-sparse-softmax" / "files"

RULE_HEAD = """\
# Made from deploy/prometheus/rules.yml by deploy/kubernetes/generate.py; change that file instead.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: doubly-sparse-softmax
  labels: {app.kubernetes.io/name: doubly-sparse-softmax}
spec:
"""


def prometheus_rule() -> str:
    rules = RULES.read_text()
    lines = rules[rules.index("groups:") :].splitlines()
    return RULE_HEAD + "".join(f"  {line}".rstrip() + "\n" for line in lines)


def files() -> dict[Path, str]:
    return {
        COMPONENTS / "prometheus" / "prometheusrule.yaml": prometheus_rule(),
        CHART_FILES / RULES.name: RULES.read_text(),
        CHART_FILES / SCRIPT.name: SCRIPT.read_text(),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
