{{/*
Refuses a release that would manage the same namespaces as another one: two controllers would undo each other's work.
Releases find each other by the annotation of their ValidatingWebhookConfigurations; `helm template` sees none.
*/}}
{{- define "dcp-disagg.guard" -}}
{{- $mine := include "dcp-disagg.watched" . }}
{{- $self := printf "%s/%s" .Release.Namespace .Release.Name }}
{{- $all := lookup "admissionregistration.k8s.io/v1" "ValidatingWebhookConfiguration" "" "" }}
{{- range dig "items" (list) $all }}
  {{- $theirs := dig "annotations" "dcpdisagg.io/watched-namespaces" "" .metadata }}
  {{- $release := dig "annotations" "meta.helm.sh/release-name" "" .metadata }}
  {{- $namespace := dig "annotations" "meta.helm.sh/release-namespace" "" .metadata }}
  {{- if and $theirs (ne (printf "%s/%s" $namespace $release) $self) }}
    {{- $both := list }}
    {{- if or (eq $mine "*") (eq $theirs "*") }}
      {{- $both = list (ternary $theirs $mine (eq $mine "*")) }}
    {{- else }}
      {{- range $watched := splitList "," $mine }}
        {{- if has $watched (splitList "," $theirs) }}
          {{- $both = append $both $watched }}
        {{- end }}
      {{- end }}
    {{- end }}
    {{- if $both }}
      {{- $shared := join ", " $both | replace "*" "every namespace" }}
      {{- fail (printf "watchNamespaces: release %q in namespace %q manages %s already; give the two releases lists of namespaces without a common member" $release $namespace $shared) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}
