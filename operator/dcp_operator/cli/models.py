"""The model catalogue of the command line: that of this release, and what a file adds to it."""

from pathlib import Path

from dcp_operator.catalogue import Catalogue, builtin, read_entries
from dcp_operator.cli.problems import CliError
from dcp_operator.cli.yaml_io import YamlError, read_documents


def read_catalogue(file: str | None) -> Catalogue:
    """Return the catalogue with the models of a file, which has the form of the chart's value catalogue.

    Raises CliError for a file that can't be read and for entries that are wrong: here somebody waits for the answer.
    """
    if file is None:
        return builtin()
    try:
        text = Path(file).read_text(encoding="utf-8")
        documents = list(read_documents(text))
    except (OSError, UnicodeDecodeError, YamlError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CliError(f"{file}: can't be read: {reason}") from error
    models, problems = read_entries(documents[0] if documents else None)
    if problems:
        raise CliError(f"{file}: {problems[0]}")
    return builtin().with_models(models)
