{{- define "dss.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "dss.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dss.labels" -}}
{{ include "dss.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "dss.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "dss.fullname" .) }}
{{- else }}
{{- required "serviceAccount.name is needed if serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "dss.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "dss.bundlesImage" -}}
{{- with .Values.bundles.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository .tag }}
{{- end }}
{{- end }}
{{- end }}

{{/* The drain must outlast the readiness probe: period x failures, and the last try's timeout. */}}
{{- define "dss.drainSeconds" -}}
{{- $probe := .Values.probes.readiness }}
{{- $noticed := add (mul $probe.periodSeconds $probe.failureThreshold) $probe.timeoutSeconds }}
{{- if le (.Values.settings.drainSeconds | float64) ($noticed | float64) }}
{{- fail (printf "settings.drainSeconds (%v) must be more than the %d seconds that the readiness probe takes to notice" .Values.settings.drainSeconds $noticed) }}
{{- end }}
{{- .Values.settings.drainSeconds }}
{{- end }}

{{/* The drain, the requests under way, 5 s for late workers, and 10 s to be safe. */}}
{{- define "dss.graceSeconds" -}}
{{- addf (include "dss.drainSeconds" . | float64) .Values.settings.stopSeconds 15 | ceil | int }}
{{- end }}

{{/* What any container of ours is confined to. */}}
{{- define "dss.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The server's three probes, by `port` and, if it speaks TLS, `tls`. */}}
{{- define "dss.probes" -}}
{{- range $kind, $path := dict "startup" "/startupz" "liveness" "/livez" "readiness" "/readyz" }}
{{ $kind }}Probe:
  httpGet:
    path: {{ $path }}
    port: {{ $.port }}
    {{- if $.tls }}
    scheme: HTTPS
    {{- end }}
  {{- toYaml (get $.root.Values.probes $kind) | nindent 2 }}
{{- end }}
{{- end }}

{{/* The server's settings, by the folder of `models` and the `port`. */}}
{{- define "dss.env" -}}
- name: DSS_MODELS
  value: {{ .models }}
- name: DSS_HOST
  value: 0.0.0.0
- name: DSS_PORT
  value: {{ .port | quote }}
- name: DSS_LOG_FORMAT
  value: {{ .root.Values.settings.logFormat }}
- name: DSS_DRAIN_SECONDS
  value: {{ include "dss.drainSeconds" .root | quote }}
- name: DSS_STOP_SECONDS
  value: {{ .root.Values.settings.stopSeconds | quote }}
- name: DSS_WORKERS_FOLDER
  value: /tmp
{{- if ne (.root.Values.settings.workers | toString) "1" }}
- name: DSS_WORKERS
  value: {{ .root.Values.settings.workers | quote }}
{{- end }}
{{- range $name, $value := .root.Values.settings.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
