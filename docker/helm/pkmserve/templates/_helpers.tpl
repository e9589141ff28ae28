{{- define "pkmserve.selector" -}}
app.kubernetes.io/name: pkmserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pkmserve.labels" -}}
{{ include "pkmserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "pkmserve.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Not empty if a container has a mount of its own where the model belongs. */ -}}
{{- define "pkmserve.mountsModel" -}}
{{- range get . "volumeMounts" | default (dict) }}{{ if eq .mountPath "/model" }}yes{{ end }}{{ end }}
{{- end }}

{{- /* The port of probes and scrapes. */ -}}
{{- define "pkmserve.inside" -}}
{{ if .Values.adminPort }}admin{{ else }}http{{ end }}
{{- end }}
