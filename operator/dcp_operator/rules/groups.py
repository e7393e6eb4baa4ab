"""Rules on engines that span several nodes."""

from collections.abc import Iterator

from dcp_operator.api import sentences
from dcp_operator.names import LABEL_NAME
from dcp_operator.rules.context import Context, Problem, Rule
from dcp_operator.rules.edits import REMOVED, Fix
from dcp_operator.rules.geometry import divisors

_GROUP_PREFIX = LABEL_NAME.split("/", maxsplit=1)[0] + "/"
_MOST_NODES = 64


def multinode_ranks(context: Context) -> Iterator[Problem]:
    """nodeCount divides the number of ranks of an engine, tensor x prefillContext x pipeline.

    Every pod of the group gets the same part of the ranks, and as many accelerators. The engine ends at start-up
    otherwise.

    Choose a nodeCount that the message names, or other sizes.
    """
    for role in context.roles:
        if role.stated.multinode is None:
            continue
        sizes, nodes = role.settings, role.stated.multinode.node_count
        ranks = sizes.tensor * sizes.prefill_context * sizes.pipeline
        if ranks % nodes:
            path = f"{role.path}.multinode.nodeCount"
            yield Problem(
                path,
                sentences.MULTINODE_RANKS.say(
                    role=role.role,
                    nodes=nodes,
                    tensor=sizes.tensor,
                    prefill=sizes.prefill_context,
                    pipeline=sizes.pipeline,
                ),
                fixes=(
                    *(Fix(path, count) for count in divisors(ranks) if 2 <= count <= _MOST_NODES),
                    Fix(f"{role.path}.multinode", REMOVED),
                ),
            )


def multinode_data(context: Context) -> Iterator[Problem]:
    """An engine on several nodes has no data parallelism.

    With both, vLLM spreads data-parallel ranks over nodes in ways that the operator doesn't make, and pods would wait
    for others that never come.

    Set data to 1 and raise replicas instead, which does the same for requests, or leave multinode out.
    """
    for role in context.roles:
        if role.stated.multinode is None or role.settings.data == 1:
            continue
        path = f"{role.path}.parallelism.data"
        yield Problem(
            path,
            sentences.MULTINODE_DATA.say(
                role=role.role, data=role.settings.data, nodes=role.stated.multinode.node_count
            ),
            fixes=(Fix(path, 1), Fix(f"{role.path}.multinode", REMOVED)),
        )


def multinode_annotations(context: Context) -> Iterator[Problem]:
    """The annotations of multinode leave to the operator what is its own.

    They go to the LeaderWorkerSet and its pods, where the operator keeps its own annotations beside them.

    Choose another key; a scheduler's own keys are all free.
    """
    for role in context.roles:
        stated = role.stated.multinode
        for key in stated.annotations if stated is not None else ():
            if key.startswith(_GROUP_PREFIX):
                path = f"{role.path}.multinode.annotations[{key}]"
                yield Problem(
                    path,
                    f"belongs to the operator, as everything under {_GROUP_PREFIX}; remove it",
                    fixes=(Fix(path, REMOVED),),
                )


RULES = (
    Rule("multinode-ranks", multinode_ranks, sources=("vLLM engine/arg_utils.py",)),
    Rule("multinode-data", multinode_data),
    Rule("multinode-annotations", multinode_annotations),
)
