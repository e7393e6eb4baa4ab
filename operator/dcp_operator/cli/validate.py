"""`dcpctl validate`: the admission rules, offline."""

from collections.abc import Sequence

from dcp_operator.catalogue import Catalogue
from dcp_operator.cli.documents import Contents, read_files
from dcp_operator.cli.problems import EXIT_ALLOWED, EXIT_REFUSED, EXIT_UNREADABLE, CliError, Outcome
from dcp_operator.cli.reports import Judged, annotations, json_line, text_lines
from dcp_operator.rules import Report, check_body


def validate(
    files: Sequence[str], *, output: str, suggest: bool = False, catalogue: Catalogue | None = None
) -> Outcome:
    """Check every object of the files, and print what was found, or with `suggest` what would be allowed.

    Raises CliError for an output that suggestions can't be shown in.
    """
    contents = read_files(files)
    judged = [Judged(document, check_body(document.body, catalogue=catalogue)) for document in contents.documents]
    code = exit_code(contents, [each.report for each in judged])
    if suggest:
        from dcp_operator.cli.suggest import suggested

        return suggested(judged, output=output, catalogue=catalogue, code=code, notes=notes(contents))
    return Outcome(code, _output(judged, contents, output), notes(contents))


def _output(judged: Sequence[Judged], contents: Contents, output: str) -> str:
    match output:
        case "sarif":
            from dcp_operator.cli.sarif import sarif_log

            return sarif_log(judged, contents)
        case "github":
            lines = list(annotations(judged, contents))
        case "json":
            lines = [json_line(each) for each in judged]
        case "text":
            lines = [line for each in judged for line in text_lines(each.document, each.report)]
        case _:
            raise CliError(f"there is no output {output}")
    return "".join(f"{line}\n" for line in lines)


def exit_code(contents: Contents, reports: Sequence[Report]) -> int:
    """Return the worst of what was found: unreadable, refused, allowed."""
    if contents.unreadable:
        return EXIT_UNREADABLE
    return EXIT_ALLOWED if all(report.allowed for report in reports) else EXIT_REFUSED


def notes(contents: Contents) -> tuple[str, ...]:
    """Return what was passed over or could not be read, for stderr."""
    result = list(contents.unreadable)
    if contents.others:
        kinds = sorted({other.rpartition(": ")[2] for other in contents.others})
        result.append(f"passed over {_count(len(contents.others))} of other kinds: {', '.join(kinds)}")
    if not contents.documents and not contents.unreadable:
        result.append("found no DCPDisaggDeployment")
    return tuple(result)


def _count(number: int) -> str:
    return f"{number} object{'' if number == 1 else 's'}"
