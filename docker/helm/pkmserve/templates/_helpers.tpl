{{- define "pkmserve.selector" -}}
app.kubernetes.io/name: pkmserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pkmserve.labels" -}}
{{ include "pkmserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
