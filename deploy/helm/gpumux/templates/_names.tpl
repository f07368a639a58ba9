{{- define "gpumux.labels" -}}
{app.kubernetes.io/name: gpumux, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end -}}
{{- define "gpumux.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}
