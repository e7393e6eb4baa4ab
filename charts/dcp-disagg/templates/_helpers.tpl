{{/* Name of the chart, at most 30 characters, so that every name made from it fits in 63. */}}
{{- define "dcp-disagg.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 30 | trimSuffix "-" }}
{{- end }}

{{/* Prefix of all names: unique per release in a namespace. The longest suffix is "-webhook-certificate". */}}
{{- define "dcp-disagg.fullname" -}}
{{- $name := include "dcp-disagg.name" . }}
{{- $default := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- default $default .Values.fullnameOverride | replace "." "-" | trunc 42 | trimSuffix "-" }}
{{- end }}

{{/* Prefix of cluster-scoped names: unique in the cluster, because a namespace's name has no dot. */}}
{{- define "dcp-disagg.clusterName" -}}
{{- printf "%s.%s" .Release.Namespace (include "dcp-disagg.fullname" .) }}
{{- end }}

{{- define "dcp-disagg.selectorLabels" -}}
app.kubernetes.io/name: {{ include "dcp-disagg.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "dcp-disagg.labels" -}}
{{ include "dcp-disagg.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end }}

{{- define "dcp-disagg.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}

{{/* Labels and annotations of a pod, given (dict "root" $ "component" NAME). The chart's own labels win. */}}
{{- define "dcp-disagg.podMetadata" -}}
{{- $component := dict "app.kubernetes.io/component" .component }}
labels:
  {{- merge $component (include "dcp-disagg.labels" .root | fromYaml) .root.Values.podLabels | toYaml | nindent 2 }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What both pods' specs share: identity, placement, and what a namespace with the restricted standard asks for. */}}
{{- define "dcp-disagg.podSpec" -}}
serviceAccountName: {{ include "dcp-disagg.fullname" .root }}-{{ .component }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "dcp-disagg.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Namespaces that a release watches, as one word that can be compared: a comma list, or * for all. */}}
{{- define "dcp-disagg.watched" -}}
{{- .Values.watchNamespaces | uniq | sortAlpha | join "," | default "*" }}
{{- end }}

{{/* DNS name that the API server calls the webhook by, and that its certificate is made out to. */}}
{{- define "dcp-disagg.webhookHost" -}}
{{- printf "%s-webhook.%s.svc" (include "dcp-disagg.fullname" .) .Release.Namespace }}
{{- end }}

{{/* Secret with the webhook's certificate. */}}
{{- define "dcp-disagg.certificateSecret" -}}
{{- default (printf "%s-webhook-certificate" (include "dcp-disagg.fullname" .)) .Values.webhook.certificate.existingSecret }}
{{- end }}

{{/* ConfigMap with models of the installation; empty where the release's own are enough. */}}
{{- define "dcp-disagg.catalogue" -}}
{{- if and .Values.catalogue.models .Values.catalogue.existingConfigMap }}
  {{- fail "catalogue: models and existingConfigMap are both given; use one of them" }}
{{- end }}
{{- if .Values.catalogue.models }}
{{- printf "%s-catalogue" (include "dcp-disagg.fullname" .) }}
{{- else }}
{{- .Values.catalogue.existingConfigMap }}
{{- end }}
{{- end }}

{{- define "dcp-disagg.catalogueEnv" -}}
{{- if include "dcp-disagg.catalogue" . -}}
- name: DCP_CATALOGUE_FILE
  value: /etc/dcp-catalogue/models.yaml
{{- end }}
{{- end }}

{{- define "dcp-disagg.catalogueMount" -}}
{{- if include "dcp-disagg.catalogue" . -}}
- name: catalogue
  mountPath: /etc/dcp-catalogue
  readOnly: true
{{- end }}
{{- end }}

{{/* A ConfigMap that is missing must not keep a pod from starting: the models of the release are known without it. */}}
{{- define "dcp-disagg.catalogueVolume" -}}
{{- with include "dcp-disagg.catalogue" . -}}
- name: catalogue
  configMap:
    name: {{ . }}
    optional: true
{{- end }}
{{- end }}

{{/* How a process of the operator logs, and where it shows its metrics. */}}
{{- define "dcp-disagg.telemetryEnv" -}}
- name: DCP_LOG_FORMAT
  value: {{ .Values.logs.format }}
- name: DCP_LOG_LEVEL
  value: {{ .Values.logs.level }}
{{- if .Values.metrics.enabled }}
- name: DCP_METRICS_PORT
  value: "8081"
{{- end }}
{{- end }}

{{- define "dcp-disagg.metricsPort" -}}
{{- if .Values.metrics.enabled -}}
- name: metrics
  containerPort: 8081
{{- end }}
{{- end }}
