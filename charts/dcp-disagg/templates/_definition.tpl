{{/*
What to do with one CustomResourceDefinition, as YAML: `render` it or not, and `note` for the user where not.
Called with the chart's `root` and the `path` of the definition's file.

A definition is one per cluster, releases may be several. The release that installed it upgrades it; the others leave
it alone. When that release is gone, nobody upgrades the definition any more: a differing one then stops the installation
with the command that takes it over, because a controller with an older definition would lose fields.
*/}}
{{- define "dcp-disagg.definition" -}}
{{- $root := .root }}
{{- $render := false }}
{{- $note := "" }}
{{- if $root.Values.crds.install }}
  {{- $mine := $root.Files.Get .path | fromYaml }}
  {{- $live := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $mine.metadata.name }}
  {{- $owner := dig "metadata" "annotations" "meta.helm.sh/release-name" "" $live }}
  {{- $namespace := dig "metadata" "annotations" "meta.helm.sh/release-namespace" "" $live }}
  {{- $own := and (eq $owner $root.Release.Name) (eq $namespace $root.Release.Namespace) }}
  {{- $render = or (not $live) $own $root.Values.crds.adopt }}
  {{- if not $render }}
    {{- $alive := false }}
    {{- $releases := lookup "admissionregistration.k8s.io/v1" "ValidatingWebhookConfiguration" "" "" }}
    {{- range dig "items" (list) $releases }}
      {{- $notes := dig "annotations" (dict) .metadata }}
      {{- if and (hasKey $notes "dcpdisagg.io/watched-namespaces") (eq $owner (dig "meta.helm.sh/release-name" "" $notes)) (eq $namespace (dig "meta.helm.sh/release-namespace" "" $notes)) }}
        {{- $alive = true }}
      {{- end }}
    {{- end }}
    {{- $who := ternary (printf "release %q in namespace %q" $owner $namespace) "no Helm release" (ne $owner "") }}
    {{- $same := eq (dig "spec" "versions" list $live | toJson) (dig "spec" "versions" list $mine | toJson) }}
    {{- if and $owner (not $alive) (not $same) }}
      {{- fail (printf "CustomResourceDefinition %s: it differs from this chart's and belongs to %s, which is gone, so nothing upgrades it; take it over by adding --set crds.adopt=true --take-ownership" $mine.metadata.name $who) }}
    {{- end }}
    {{- $note = printf "The CustomResourceDefinition %s belongs to %s, so this release left it as it is." $mine.metadata.name $who }}
    {{- if not $same }}
      {{- $note = printf "%s\nIt differs from this chart's: upgrade it there, or add --set crds.adopt=true --take-ownership to take it over." $note }}
    {{- end }}
  {{- end }}
{{- end }}
{{- dict "render" $render "note" $note | toYaml }}
{{- end }}
