"""`dcpctl render`: what the operator would apply, as YAML."""

from collections.abc import Sequence

from dcp_operator.api.load import load
from dcp_operator.build import render
from dcp_operator.cli.documents import Document, read_files
from dcp_operator.cli.problems import EXIT_UNREADABLE, CliError, Outcome
from dcp_operator.cli.reports import text_lines
from dcp_operator.cli.validate import exit_code, notes
from dcp_operator.cli.version import version
from dcp_operator.cli.yaml_io import write_document
from dcp_operator.rules import Report, check_body

#: Objects without a namespace go where kubectl would put them.
_DEFAULT_NAMESPACE = "default"


def render_files(files: Sequence[str], *, operator_image: str | None) -> Outcome:
    """Return the manifests of every object as YAML; findings are notes, and a refused object is not rendered."""
    contents = read_files(files)
    remarks = list(notes(contents))
    reports: list[Report] = []
    manifests = ""
    for document in contents.documents:
        report = check_body(document.body)
        reports.append(report)
        if not report.allowed or report.warnings:
            remarks += text_lines(document, report)
        if report.allowed:
            manifests += _manifests(document, operator_image or f"dcp-disagg/operator:{version()}")
    code = exit_code(contents, reports) if contents.documents else EXIT_UNREADABLE
    return Outcome(code, manifests, tuple(remarks))


def _manifests(document: Document, operator_image: str) -> str:
    obj = load(document.body).obj
    if obj is None or not obj.metadata.name:
        raise CliError(f"{document.file}: {document.title} has no metadata.name, from which all names are made")
    manifests = render(
        obj.metadata.name,
        obj.metadata.namespace or _DEFAULT_NAMESPACE,
        obj.spec,
        operator_image=operator_image,
        uid=obj.metadata.uid or None,
    )
    return "".join(f"---\n{write_document(manifest)}" for manifest in manifests)
