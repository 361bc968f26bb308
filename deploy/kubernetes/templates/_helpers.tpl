{{- define "corral.labels" -}}
app.kubernetes.io/name: corral
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "corral.metadata" -}}
name: {{ .root.Release.Name }}-{{ .role }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "corral.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "corral.environment" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "corral.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "corral.apart" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "corral.labels" . | nindent 14 }}
{{- end }}

{{- define "corral.unprivileged" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "corral.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The keys of the bus are in a folder of their own. A key of a secret has no slash in its name. */ -}}
{{- define "corral.secrets" -}}
secret:
  secretName: {{ .Values.secretName }}
  defaultMode: 0440
  items:
    {{- range tuple "admin.key" "gateway.key" "ca.crt" "ca.key" "server.crt" "server.key" }}
    - {key: {{ . }}, path: {{ . }}}
    {{- end }}
    {{- range tuple "operator.seed" "operator.jwt" "account.seed" "system_account.seed" "system_user.seed" "service_user.seed" }}
    - {key: {{ . }}, path: bus/{{ . }}}
    {{- end }}
{{- end }}

{{- define "corral.busUrl" -}}
{{- if .Values.bus.enabled -}}
tls://{{ .Release.Name }}-bus:4222
{{- else -}}
{{ required "bus.url: where your NATS is, such as tls://nats.example:4222" .Values.bus.url }}
{{- end -}}
{{- end }}

{{- define "corral.gatewayUrl" -}}
https://{{ .Release.Name }}-gateway:{{ .Values.gateway.service.port }}
{{- end }}

{{- define "corral.publicUrl" -}}
{{ .Values.publicUrl | default (include "corral.gatewayUrl" .) }}
{{- end }}
