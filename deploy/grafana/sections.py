"""The dashboard's panels, section by section, in the order in which they stand there."""

from deploy.grafana import queries as q
from deploy.grafana.panels import Json, joined, panel, series, stat, steps, table

PSI = steps(("green", None), ("orange", 0.1), ("red", 0.25))
FORMULA = "|V| / (sum |v_k| u_k + K)"


def overview() -> list[Json]:
    return [
        stat(
            "Alerts firing",
            "Of the rules in deploy/prometheus/rules.yml.",
            q.FIRING,
            "short",
            thresholds=steps(("green", None), ("red", 1)),
        ),
        stat("Requests", "Top-k requests answered.", q.REQUESTS, "reqps"),
        stat(
            "p99 latency",
            "Of top-k requests, as the server sees it.",
            q.quantile(0.99, "dss_http_request_seconds", q.TOPK),
            "s",
            thresholds=steps(("green", None), ("orange", 0.05), ("red", 0.1)),
        ),
        stat(
            "Rejected",
            "Share of the top-k requests that got no answer, for whatever reason.",
            q.REJECTED_SHARE,
            "percentunit",
            thresholds=steps(("green", None), ("orange", 0.001), ("red", 0.01)),
        ),
        stat(
            "Latency budget burn",
            "Over an hour. 1 spends exactly the objective's budget, 1% of answers above 100 ms.",
            q.burn("1h"),
            "suffix:x",
            decimals=1,
            thresholds=steps(("green", None), ("orange", 1), ("red", 14.4)),
        ),
        stat(
            "FLOPs speedup now",
            f"Over the last 5 minutes, by {FORMULA}.",
            f"avg({q.RECENT_SPEEDUP})",
            "suffix:x",
            decimals=1,
        ),
        stat(
            "Drift (PSI)",
            "The larger one of utilization's and the gate's; above 0.25 the shift is large.",
            q.LARGEST_DRIFT,
            "short",
            decimals=2,
            thresholds=PSI,
        ),
        stat(
            "Recall kept",
            "How many of the full softmax's first ten are answered, against how many at export.",
            q.recall_kept(10),
            "percentunit",
            decimals=1,
            thresholds=steps(("red", None), ("orange", 0.95), ("green", 0.98)),
        ),
    ]


def traffic() -> list[Json]:
    return [
        series(
            "Answers by status",
            "All routes but probes and metrics.",
            {"{{status}}": q.STATUSES},
            "reqps",
        ),
        series(
            "Latency of top-k requests",
            "From the request's head to its answer's.",
            {
                f"p{round(part * 100)}": q.quantile(part, "dss_http_request_seconds", q.TOPK)
                for part in (0.5, 0.9, 0.99)
            },
            "s",
        ),
        series(
            "Rejected requests by reason",
            "queue_full asks for more replicas; the others are the clients' mistakes or a failure.",
            {"{{reason}}": q.REASONS},
            "reqps",
        ),
    ]


def experts() -> list[Json]:
    return [
        panel(
            "heatmap",
            "Expert utilization over time, against training's",
            "Each expert's share of the rows as a multiple of its share in training. A line that "
            "goes dark is an expert that the traffic has left; one bright line is a collapse.",
            {"{{expert}}": q.RELATIVE_UTILIZATION},
            width=16,
            height=11,
            unit="suffix:x",
            options={
                "calculate": False,
                "cellGap": 0,
                "cellValues": {"unit": "suffix:x"},
                "color": {"mode": "scheme", "scheme": "Inferno", "steps": 64, "min": 0, "max": 4},
                "filterValues": {},
                "legend": {"show": True},
                "rowsFrame": {"layout": "auto", "value": "utilization"},
                "showValue": "never",
                "tooltip": {"mode": "single", "yHistogram": False},
                "yAxis": {"axisPlacement": "left", "axisLabel": "expert"},
            },
        ),
        series(
            "FLOPs speedup",
            f"By the paper's {FORMULA}: in the last 5 minutes, since the start, and as measured "
            "in training.",
            {
                "version {{version}}, last 5 minutes": f"avg by (version) ({q.RECENT_SPEEDUP})",
                "version {{version}}, since start": f"avg by (version) ({q.SINCE_START_SPEEDUP})",
                "version {{version}}, trained": f"avg by (version) ({q.TRAINED_SPEEDUP})",
            },
            "suffix:x",
            height=11,
        ),
    ]


def drift() -> list[Json]:
    return [
        series(
            "Drift from training (PSI)",
            "Utilization: which experts rows choose. Gate: how sure the choice is. Below 0.1 no "
            "shift, above 0.25 a large one.",
            {
                "utilization, version {{version}}": f"max by (version) ({q.UTILIZATION_DRIFT})",
                "gate, version {{version}}": f"max by (version) ({q.GATE_DRIFT})",
            },
            "short",
            width=7,
            lines=PSI,
            at_least=0.3,
        ),
        series(
            "Rows that drift is measured on",
            "Of the last 5 minutes. With too few of them there is no drift to show.",
            {"version {{version}}": q.DRIFT_ROWS},
            "short",
            width=5,
        ),
        series(
            "Recall against the full softmax",
            "Of rows sampled by DSS_SHADOW__RATE: the part of the full softmax's first answers "
            "that was served.",
            {
                **{f"at {at}": q.recall(at) for at in (1, 5, 10)},
                "at 10, at export": q.trained_recall(10),
            },
            "percentunit",
            width=7,
            max=1,
        ),
        series(
            "Experts in use",
            "How many the rows are spread over: exp of the entropy of their shares.",
            {"last 5 minutes": q.EXPERTS_IN_USE, "in training": q.EXPERTS_IN_TRAINING},
            "short",
            width=5,
        ),
    ]


def promises() -> list[Json]:
    return [
        series(
            "Rows by how they were answered",
            "sparse: by the experts searched. escalated: scanned, to keep a promised recall. "
            "exact: scanned, because that was asked for or only that keeps the promise.",
            {"{{rung}}": q.ROWS_BY_RUNG},
            "rowsps",
            stacked=True,
        ),
        series(
            "Rows with a promised recall",
            "Promised: by a request or by the server. Withdrawn: while drift is above 0.25.",
            {"promised": q.PROMISED_ROWS, "withdrawn": q.WITHDRAWN_ROWS},
            "rowsps",
        ),
        series(
            "Missed of what was promised",
            "Of rows that the shadow check answered again: the part of the head's k best that was "
            "missed in the last hour, and the part that the promises allow.",
            {"missed": q.MISSED_SHARE, "allowed": q.ALLOWED_SHARE},
            "percentunit",
        ),
    ]


def engine() -> list[Json]:
    return [
        series(
            "Rows per execution and in the queue",
            "The batch grows with the load, and the queue once the engine cannot keep up.",
            {"rows per execution": q.ROWS_PER_EXECUTION, "rows waiting": q.QUEUE_ROWS},
            "short",
            width=6,
        ),
        series(
            "Where the time goes (p99)",
            "A request waits for the engine; an engine call runs the gate, then the experts.",
            {
                "waiting": q.quantile(0.99, "dss_queue_seconds"),
                "engine call": q.quantile(0.99, "dss_compute_seconds"),
                "gate": q.quantile(0.99, "dss_gate_compute_seconds"),
            },
            "s",
            width=6,
        ),
        series(
            "Latency of experts (p99)",
            "Of one execution of an expert. The table below has each one's.",
            {
                "slowest": f"max({q.EXPERT_P99})",
                "median": f"quantile(0.5, {q.EXPERT_P99})",
                "fastest": f"min({q.EXPERT_P99})",
            },
            "s",
            width=6,
        ),
        series(
            "Latency budget burn by window",
            "Alerts: 14.4 over 5m and 1h; 6 over 30m and 6h; 1 over 6h and 3d.",
            {window: q.burn(window) for window in ("5m", "30m", "1h", "6h", "3d")},
            "suffix:x",
            width=6,
            lines=steps(("green", None), ("orange", 1), ("red", 14.4)),
            at_least=1.5,
        ),
    ]


def each_expert() -> list[Json]:
    return [
        panel(
            "barchart",
            "Utilization, live and trained",
            "Where the two differ, the traffic is not what the model was trained on.",
            {"live": q.LIVE_UTILIZATION, "trained": q.TRAINED_UTILIZATION},
            width=14,
            height=9,
            unit="percentunit",
            table=True,
            options={
                "xField": "expert",
                "orientation": "vertical",
                "showValue": "never",
                "legend": {"displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi"},
            },
            custom={"fillOpacity": 80},
            defaults={"min": 0},
            transformations=joined("expert", ["live", "trained"]),
        ),
        table(
            "Each expert",
            "Click a column to sort by it.",
            "expert",
            {
                "classes": q.EXPERT_CLASSES,
                "rows per second": q.padded(q.EXPERT_ROWS),
                "utilization": q.LIVE_UTILIZATION,
                "trained": q.TRAINED_UTILIZATION,
                "mean time": q.EXPERT_MEAN_SECONDS,
                "p99": q.padded(q.EXPERT_P99),
            },
            width=10,
            height=9,
            units={
                "rows per second": "rowsps",
                "utilization": "percentunit",
                "trained": "percentunit",
                "mean time": "s",
                "p99": "s",
            },
        ),
    ]


def versions() -> list[Json]:
    return [
        table(
            "Versions",
            "Those that instances have loaded, and those that were refused.",
            "version",
            {
                "instances": q.LOADED,
                "load time": q.LOAD_SECONDS,
                "rows per second": q.ROWS_BY_VERSION,
                "refused": q.REFUSED,
            },
            width=12,
            height=6,
            units={"load time": "s", "rows per second": "rowsps"},
        ),
        table(
            "Labels",
            "The version that each label points at.",
            "label",
            {"version": q.LABELS},
            width=4,
            height=6,
        ),
        series(
            "Rows by version",
            "Which version answers.",
            {"version {{version}}": q.ROWS_BY_VERSION},
            "rowsps",
            height=6,
            stacked=True,
        ),
    ]


def processes() -> list[Json]:
    return [
        series("CPU by instance", "Cores in use.", {"{{instance}}": q.CPU}, "short", width=6),
        series(
            "Resident memory",
            "Of all workers; a page that they share counts once.",
            {"{{instance}}": q.MEMORY},
            "bytes",
            width=6,
        ),
        series(
            "Workers",
            "How many run, and how many were replaced in 15 minutes.",
            {
                "{{instance}} run": q.WORKERS,
                "{{instance}} replaced": q.RESTARTS,
            },
            "short",
            width=6,
        ),
        series(
            "Rows asked of the full softmax",
            "In the shadow of the served answer; dropped ones came faster than it could follow.",
            {"scanned": q.SHADOW_ROWS, "dropped": q.SHADOW_DROPPED},
            "rowsps",
            width=6,
        ),
    ]
