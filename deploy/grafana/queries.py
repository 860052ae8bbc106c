"""What the dashboard asks Prometheus, in PromQL. Variables begin with a dollar, as in Grafana."""

ALL_VERSIONS = 'model="$model"'
MODEL = f'{ALL_VERSIONS}, version=~"$version"'
TOPK = 'route=~".*/(topk|infer)"'
ANSWERS = 'route!~"/(livez|readyz|startupz|metrics)|/v2/health/.*"'
JOB = 'job="doubly-sparse-softmax"'


def rate(metric: str, labels: str = MODEL) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def quantile(q: float, histogram: str, labels: str = MODEL, by: str = "le") -> str:
    return f"histogram_quantile({q}, sum by ({by}) ({rate(f'{histogram}_bucket', labels)}))"


def padded(query: str) -> str:
    """Expert numbers with three digits: Prometheus orders series by their labels as text."""
    one_digit = f'label_replace({query}, "expert", "00$1", "expert", "(.)")'
    return f'label_replace({one_digit}, "expert", "0$1", "expert", "(..)")'


def of_model(metric: str, labels: str = MODEL) -> str:
    return f"{metric}{{{labels}}}"


ALERTS = 'ALERTS{alertstate="firing"}'
FIRING = f"count({ALERTS}) or vector(0)"

REQUESTS = f"sum({rate('dss_requests_total')})"
ROWS = f"sum({rate('dss_rows_total')})"
EXECUTIONS = f"sum({rate('dss_executions_total')})"
ROWS_PER_EXECUTION = f"{ROWS} / {EXECUTIONS}"
ROWS_BY_VERSION = f"sum by (version) ({rate('dss_rows_total', ALL_VERSIONS)})"
QUEUE_ROWS = f"sum({of_model('dss_queue_rows')})"
STATUSES = f"sum by (status) ({rate('dss_http_requests_total', ANSWERS)})"
# The model is empty when a request named none that exists.
REJECTED = rate("dss_rejected_requests_total", 'model=~"$model|"')
ALL_REJECTED = f"(sum({REJECTED}) or vector(0))"
REJECTED_SHARE = f"{ALL_REJECTED} / ({ALL_REJECTED} + {REQUESTS})"
REASONS = f"sum by (reason) ({REJECTED})"

SINCE_START_SPEEDUP = of_model("dss_flops_speedup_ratio")
RECENT_SPEEDUP = of_model("dss:flops_speedup:ratio5m")
TRAINED_SPEEDUP = of_model("dss_trained_flops_speedup_ratio")

EXPERT_ROWS = f"sum by (expert) ({rate('dss_expert_rows_total')})"
LIVE_UTILIZATION = padded(f"{EXPERT_ROWS} / on () group_left () {ROWS}")
TRAINED_UTILIZATION = padded(
    f"avg by (expert) ({of_model('dss_trained_expert_utilization_ratio')})"
)
# Whatever the number of experts and their trained shares, 1 is as in training.
RELATIVE_UTILIZATION = f"{LIVE_UTILIZATION} / clamp_min({TRAINED_UTILIZATION}, 0.0001)"
EXPERT_CLASSES = padded(f"avg by (expert) ({of_model('dss_expert_classes')})")
EXPERT_MEAN_SECONDS = padded(
    f"sum by (expert) ({rate('dss_expert_compute_seconds_sum')})"
    f" / sum by (expert) ({rate('dss_expert_compute_seconds_count')})"
)
EXPERT_P99 = quantile(0.99, "dss_expert_compute_seconds", by="expert, le")
EXPERTS_IN_USE = f"avg({of_model('dss_effective_experts')})"
EXPERTS_IN_TRAINING = f"avg({of_model('dss_trained_effective_experts')})"

UTILIZATION_DRIFT = of_model("dss_utilization_drift_ratio")
GATE_DRIFT = of_model("dss_gate_drift_ratio")
# A label of its own keeps the second from being taken for the first.
LARGEST_DRIFT = (
    f'max({UTILIZATION_DRIFT} or label_replace({GATE_DRIFT}, "of", "gate", "model", ".*"))'
)
DRIFT_ROWS = f"sum by (version) ({of_model('dss_drift_window_rows')})"
SHADOW_ROWS = f"sum({rate('dss_shadow_rows_total')})"
SHADOW_DROPPED = f"sum({rate('dss_shadow_dropped_rows_total')})"
ROWS_BY_RUNG = f"sum by (rung) ({rate('dss_answered_rows_total')})"
PROMISED_ROWS = f"sum({rate('dss_contract_rows_total')})"
WITHDRAWN_ROWS = f"sum({rate('dss_contract_withdrawn_rows_total')})"
MISSED_SHARE = f"max({of_model('dss:contract_missed:ratio1h')})"
ALLOWED_SHARE = f"max({of_model('dss:contract_allowed:ratio1h')})"


def recall(at: int) -> str:
    labels = f'{MODEL}, at="{at}"'
    return f"avg({of_model('dss_shadow_recall_ratio', labels)})"


def recall_kept(at: int) -> str:
    labels = f'{MODEL}, at="{at}"'
    now, trained = "dss_shadow_recall_ratio", "dss_trained_recall_ratio"
    return f"avg({of_model(now, labels)} / {of_model(trained, labels)})"


def trained_recall(at: int) -> str:
    labels = f'{MODEL}, at="{at}"'
    return f"avg({of_model('dss_trained_recall_ratio', labels)})"


def burn(window: str) -> str:
    return f"max(dss:latency_burn:ratio{window})"


LOADED = (
    "count by (version, n_classes, n_experts, hidden_size, format_version, created)"
    f" ({of_model('dss_model_info', ALL_VERSIONS)})"
)
LOAD_SECONDS = f"max by (version) ({of_model('dss_model_load_seconds', ALL_VERSIONS)})"
REFUSED = f"max by (version) ({of_model('dss_refused_bundles', ALL_VERSIONS)})"
LABELS = f"max by (label) ({of_model('dss_model_label_version', ALL_VERSIONS)})"

# True for a minute after it happened.
VERSION_LOADED = (
    f"count by (version) ({of_model('dss_model_info', ALL_VERSIONS)})"
    f" unless count by (version) ({of_model('dss_model_info', ALL_VERSIONS)} offset 1m)"
)
LABEL_MOVED = (
    f"max by (label) (changes({of_model('dss_model_label_version', ALL_VERSIONS)}[1m])) > 0"
)
ALERT_FIRES = f"max by (alertname) ({ALERTS})"

CPU = rate("process_cpu_seconds_total", JOB)
MEMORY = f"process_resident_memory_bytes{{{JOB}}}"
WORKERS = "sum by (instance) (dss_workers)"
RESTARTS = "sum by (instance) (increase(dss_worker_restarts_total[15m]))"
