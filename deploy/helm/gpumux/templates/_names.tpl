{{- define "gpumux.labels" -}}
{app.kubernetes.io/name: gpumux, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end -}}
{{- define "gpumux.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end -}}
{{- define "gpumux.nvml" -}}
{{ if .Values.nvml }}{{ .Values.nvml }}{{ else }}/host{{ if ne .Values.driverRoot "/" }}{{ .Values.driverRoot }}{{ end }}/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1{{ end }}
{{- end -}}
