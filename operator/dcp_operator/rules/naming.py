"""Rules on the object's name, from which the names of everything else are made."""

import re
from collections.abc import Iterator

from dcp_operator.api.findings import show
from dcp_operator.names import MAX_LABEL_LENGTH, longest_suffix, max_name_length
from dcp_operator.rules.context import Context, Problem, Rule

#: A Service's name is stricter than an object's: it starts with a letter and has no dots.
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
#: Characters that the API server adds to metadata.generateName.
_GENERATED_SUFFIX = 5


def name_length(context: Context) -> Iterator[Problem]:
    """The object's name leaves room for the names derived from it.

    Workloads are called NAME-ROLE-REVISION, Services and label values repeat such names, and Kubernetes cuts both off
    at 63 characters. With multinode the pods' labels add the number of a group and a hash to that.

    Choose a name of at most as many characters as the message says.
    """
    metadata = context.obj.metadata
    if metadata.name or not metadata.generate_name:
        length, path = len(metadata.name), "metadata.name"
    else:
        length, path = len(metadata.generate_name) + _GENERATED_SUFFIX, "metadata.generateName"
    in_groups = any(role.stated.multinode is not None for role in context.roles)
    suffix, budget = longest_suffix(in_groups=in_groups), max_name_length(in_groups=in_groups)
    if length > budget:
        yield Problem(
            path,
            f"has {length} characters, and the longest derived name adds {suffix} to it, beyond the {MAX_LABEL_LENGTH} "
            f"that Kubernetes allows; at most {budget} fit",
        )


def name_valid(context: Context) -> Iterator[Problem]:
    """The object's name can be the name of a Service.

    The Service that clients talk to has the object's name, and is held to stricter characters than the object: small
    letters, digits and dashes, a letter first and no dash last.

    Choose another name; dots are best replaced by dashes.
    """
    name = context.obj.metadata.name
    if name and not _SERVICE_NAME.fullmatch(name):
        yield Problem(
            "metadata.name",
            f"{show(name)} can't be the name of a Service: small letters, digits and dashes, a letter "
            "first and no dash last",
        )


RULES = (
    Rule("name-valid", name_valid),
    Rule("name-length", name_length, sources=("llm-d-deployer #11",)),
)
