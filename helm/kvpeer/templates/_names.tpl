{{/* The release's name in all objects; the operator is told it and derives the same names. Room is left for suffixes. */}}
{{- define "kvpeer.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "kvpeer" $name) -}}{{- $name = printf "%s-kvpeer" $name -}}{{- end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "kvpeer.selector" -}}
app.kubernetes.io/name: kvpeer-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvpeer.labels" -}}
{{ include "kvpeer.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
