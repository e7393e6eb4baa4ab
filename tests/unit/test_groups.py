"""Groups of pods that are one engine: how they are counted, when one is made anew, and what is remembered of it."""

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_operator import names
from dcp_operator.api.spec import RestartBackoff
from dcp_operator.group_restarts import Decision, Noted, Record, decide, failure, pause_s, read, write
from dcp_operator.groups import as_engines, group_trouble, workers_of
from dcp_operator.kinds import ref_of
from dcp_operator.observed import Child, Observed
from dcp_operator.problems import component_problem, pod_problem
from dcp_operator.reasons import Reason
from dcp_operator.workloads import component_state, is_ready
from tests.support.objects import owner

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
BACKOFF = RestartBackoff(base_delay_seconds=30, max_delay_seconds=600)


def at(seconds: float) -> str:
    return (BEGIN + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(
    worker: int,
    *,
    group: int = 0,
    size: int = 2,
    ready: bool = True,
    started: bool = True,
    running: bool = True,
    restarts: int = 0,
    phase: str = "Running",
    made: float = 0,
    uid: str = "",
    deleting: bool = False,
) -> dict[str, Any]:
    """A pod of a group as the API server shows it; worker 0 leads."""
    name = f"chat-decode-{group}" if worker == 0 else f"chat-decode-{group}-{worker}"
    labels = {
        names.LABEL_NAME: "chat",
        names.LABEL_GROUP_SET: "chat-decode",
        names.LABEL_GROUP_INDEX: str(group),
        names.LABEL_WORKER_INDEX: str(worker),
    }
    main = {"name": "main", "started": started, "restartCount": restarts}
    main["state"] = (
        {"running": {"startedAt": at(made + 1)}} if running else {"waiting": {"reason": "ContainerCreating"}}
    )
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "models",
        "uid": uid or f"uid of {name}",
        "labels": labels,
        "annotations": {names.ANNOTATION_GROUP_SIZE: str(size)},
        "creationTimestamp": at(made),
    }
    if deleting:
        metadata["deletionTimestamp"] = at(1000)
    return {
        "kind": "Pod",
        "metadata": metadata,
        "status": {
            "phase": phase,
            "containerStatuses": [main],
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": at(made + 60)}],
        },
    }


def leader_of(*pods: dict[str, Any]) -> dict[str, Any]:
    """The one engine that these pods are."""
    (engine,) = as_engines(pods)
    return engine


class TestOneGroupIsOneEngine:
    def test_pods_of_no_group_stay_as_they_are(self):
        plain = {"metadata": {"name": "router"}, "status": {}}
        assert as_engines([plain]) == (plain,)

    def test_a_group_counts_once_and_is_ready_when_all_of_its_pods_are(self):
        assert is_ready(leader_of(pod(0), pod(1)))

    @pytest.mark.parametrize(
        ("pods", "words"),
        [
            ([pod(0), pod(1, ready=False)], "pod chat-decode-0-1 of its group is not ready"),
            ([pod(0), pod(1, deleting=True)], "pod chat-decode-0-1 of its group is not ready"),
            ([pod(0)], "1 of its pods don't exist"),
            ([pod(0, size=4), pod(1, size=4)], "2 of its pods don't exist"),
        ],
    )
    def test_a_leader_that_is_ready_alone_makes_no_engine(self, pods: list[dict], words: str):
        engine = leader_of(*pods)
        assert not is_ready(engine)
        assert group_trouble(engine) == words
        problem = pod_problem(engine, "decode", "models")
        assert problem is not None
        assert problem.reason is Reason.PODS_PENDING
        assert words in problem.message

    def test_a_leader_that_is_not_ready_itself_says_so_itself(self):
        engine = leader_of(pod(0, ready=False), pod(1, ready=False))
        assert not is_ready(engine)
        assert group_trouble(engine) is None

    @pytest.mark.parametrize("size", ["9" * 5000, "2.5", "-1", "", "many"])
    def test_a_size_that_is_no_number_is_that_of_one_pod(self, size: str):
        leader = pod(0)
        leader["metadata"]["annotations"][names.ANNOTATION_GROUP_SIZE] = size
        assert is_ready(leader_of(leader))

    def test_groups_do_not_mix_and_workers_without_a_leader_are_nothing(self):
        first, second = as_engines([pod(1), pod(0, group=1), pod(0), pod(1, group=1), pod(1, group=2)])
        assert {one["metadata"]["name"] for one in workers_of(first)} == {"chat-decode-1-1"}
        assert {one["metadata"]["name"] for one in workers_of(second)} == {"chat-decode-0-1"}


def with_set(status: dict[str, Any], *pods: dict[str, Any]) -> Observed:
    """An object with a LeaderWorkerSet for decode, of which its controller says so much."""
    metadata: dict[str, Any] = {"name": "chat-decode-12345678", "namespace": "models", "uid": "set", "generation": 2}
    metadata |= {"ownerReferences": [{"controller": True, "uid": "owner-uid"}]}
    metadata |= {"labels": names.labels("chat", "decode", "12345678")}
    body = {"kind": "LeaderWorkerSet", "metadata": metadata, "spec": {"replicas": 1}, "status": status}
    return Observed(owner(), {ref_of(body): Child(body)}, as_engines(pods))


def test_a_controller_of_groups_that_does_not_run_is_named():
    def said(status: dict[str, Any]) -> str:
        problem = component_problem(component_state(with_set(status), "decode", "12345678"), "models")
        assert problem is not None
        return problem.message

    assert "LeaderWorkerSet's controller has not acted on chat-decode-12345678 yet" in said({})
    assert "Kubernetes is making or replacing pods" in said({"replicas": 0})


@pytest.mark.parametrize(
    ("status", "is_complete"),
    [
        # As LeaderWorkerSet 0.7 and 0.8 report, and as 0.9 does.
        ({"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}, True),
        ({"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "observedGeneration": 2}, True),
        ({"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "observedGeneration": 1}, False),
        ({"replicas": 1, "readyReplicas": 1, "observedGeneration": 2}, False),
        ({}, False),
    ],
)
def test_a_leader_worker_set_is_rolled_out_when_its_groups_are_of_its_newest_template(status: dict, is_complete: bool):
    labels = names.labels("chat", "decode", "12345678")
    pods = [pod(0), pod(1)]
    pods[0]["metadata"]["labels"] |= labels
    pods[1]["metadata"]["labels"] |= names.labels("chat", "decode-worker", "12345678")
    state = component_state(with_set(status, *pods), "decode", "12345678")
    assert (state.wanted, state.replicas, state.ready) == (1, 1, 1)
    assert state.is_complete is is_complete


class TestFailure:
    @pytest.mark.parametrize(
        ("pods", "words"),
        [
            ([pod(0), pod(1)], None),
            # Before the engine has started, pods may come late.
            ([pod(0, started=False, ready=False)], None),
            ([pod(0, started=False, ready=False), pod(1, running=False, ready=False)], None),
            # What a pod says of itself can be late.
            ([pod(0), pod(1, running=False, ready=False)], None),
            ([pod(0, ready=False), pod(1, made=500)], None),
            # A pod that is being removed still works.
            ([pod(0), pod(1, deleting=True)], None),
            ([pod(0), pod(1, restarts=1)], "the engine in pod chat-decode-0-1 was started again"),
            ([pod(0, restarts=2, started=False), pod(1)], "the engine in pod chat-decode-0 was started again"),
            ([pod(0), pod(1, phase="Failed")], "pod chat-decode-0-1 ended for good"),
            ([pod(0)], "1 of its pods are gone"),
            ([pod(0), pod(1, made=500)], "pod chat-decode-0-1 took the place of one that is gone"),
        ],
    )
    def test_what_shows_that_a_group_cannot_go_on(self, pods: list[dict], words: str | None):
        assert failure(leader_of(*pods)) == words


class TestRestarts:
    def broken(self, uid: str = "first") -> list[dict]:
        return [leader_of(pod(0, uid=uid), pod(1, restarts=1))]

    def test_a_failure_is_noted_at_once_and_acted_upon_after_the_pause(self):
        noticed = decide(self.broken(), {}, BACKOFF, at(100))
        assert noticed.restarts == ()
        assert noticed.next_s == 30
        assert noticed.record["0"].since == at(100)
        assert decide(self.broken(), noticed.record, BACKOFF, at(129)).restarts == ()
        due = decide(self.broken(), noticed.record, BACKOFF, at(130))
        assert [(one.leader_name, one.leader_uid, one.times) for one in due.restarts] == [("chat-decode-0", "first", 1)]
        assert due.record["0"].times == 1

    def test_what_was_noticed_is_not_forgotten_when_the_pod_looks_well_again(self):
        noticed = decide([leader_of(pod(0, uid="first"))], {}, BACKOFF, at(0))
        well = [leader_of(pod(0, uid="first", ready=False), pod(1))]
        assert failure(well[0]) is None
        assert decide(well, noticed.record, BACKOFF, at(30)).restarts

    def test_a_deletion_that_failed_is_tried_again_and_not_counted_again(self):
        noticed = decide(self.broken(), {}, BACKOFF, at(0))
        due = decide(self.broken(), noticed.record, BACKOFF, at(30))
        again = decide(self.broken(), due.record, BACKOFF, at(31))
        assert again.restarts == due.restarts
        assert again.record == due.record

    def test_a_leader_that_goes_is_left_alone(self):
        going = [leader_of(pod(0, uid="first", deleting=True), pod(1, restarts=1))]
        assert decide(going, {}, BACKOFF, at(0)) == Decision((), {}, None)

    def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_time_without_failure(self):
        record: Record = {}
        now, pauses = 0.0, []
        for life in range(8):
            record = decide(self.broken(f"life {life}"), record, BACKOFF, at(now)).record
            wait = decide(self.broken(f"life {life}"), record, BACKOFF, at(now)).next_s
            assert wait is not None
            pauses.append(wait)
            now += wait
            due = decide(self.broken(f"life {life}"), record, BACKOFF, at(now))
            assert [one.times for one in due.restarts] == [life + 1]
            record, now = due.record, now + 5
        assert pauses == [30, 60, 120, 240, 480, 600, 600, 600]
        later = decide(self.broken("much later"), record, BACKOFF, at(now + 1201))
        assert later.next_s == 30

    def test_a_clock_that_was_set_back_lengthens_no_pause_beyond_its_own_length(self):
        noticed = decide(self.broken(), {}, BACKOFF, at(86400))
        back = decide(self.broken(), noticed.record, BACKOFF, at(0))
        assert back.next_s == 30
        assert decide(self.broken(), back.record, BACKOFF, at(30)).restarts

    def test_groups_wait_by_themselves(self):
        record = {"0": Noted(3, at(0))}
        both = [leader_of(pod(0), pod(1, restarts=1)), leader_of(pod(0, group=1), pod(1, group=1, phase="Failed"))]
        decision = decide(both, record, BACKOFF, at(10))
        assert decision.next_s == 30
        assert (decision.record["0"].times, decision.record["1"].times) == (3, 0)

    def test_a_healthy_group_costs_no_write(self):
        record = {"0": Noted(3, at(0), "an earlier leader")}
        assert decide([leader_of(pod(0), pod(1))], record, BACKOFF, at(9999)).record is record


@given(
    st.lists(st.tuples(st.floats(0, 3000), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 100),
    st.integers(1, 1000),
)
def test_however_often_a_group_fails_it_is_made_anew_no_sooner_than_its_pauses_allow(
    looks: list[tuple[float, bool]], base: int, longest: int
):
    """Looks at any times, the operator forgetting everything in between: the record alone keeps the pauses."""
    backoff = RestartBackoff(base_delay_seconds=base, max_delay_seconds=longest)
    kept, now, life, made_at, in_a_row = "", 0.0, 0, None, 0
    for after, fails in looks:
        now += after
        engine = leader_of(pod(0, uid=f"life {life}"), pod(1, restarts=int(fails)))
        decision = decide([engine], read(kept), backoff, at(now))
        kept = write(decision.record)
        for restart in decision.restarts:
            in_a_row = 1 if restart.times == 1 else in_a_row + 1
            assert restart.times == in_a_row
            # Times are kept in whole seconds.
            if made_at is not None and restart.times > 1:
                assert now - made_at >= pause_s(restart.times - 1, backoff) - 1
            made_at, life = now, life + 1
        assert decision.next_s is None or 0 < decision.next_s <= max(base, longest)


noted = st.builds(
    Noted,
    times=st.integers(0, 50),
    last=st.sampled_from(["", at(0), at(5000)]),
    leader=st.sampled_from(["", "a", "b"]),
    since=st.sampled_from(["", at(10), at(90000)]),
    why=st.text(max_size=20),
)


@given(st.dictionaries(st.from_regex(r"[0-9]{1,3}", fullmatch=True), noted, max_size=5))
def test_a_record_survives_being_written_and_read(record: dict[str, Noted]):
    assert read(write(record)) == record


@pytest.mark.parametrize(
    "annotation",
    [None, "", "x", "[]", '{"0": 7}', '{"0": {"times": "x"}}', '{"0": {"odd": 1}}', '{"0": {"last": "yesterday"}}'],
)
def test_an_annotation_that_somebody_made_nonsense_of_is_an_empty_record(annotation: str | None):
    assert read(annotation) == {}


@given(st.integers(0, 200), st.integers(1, 3600), st.integers(1, 86400))
def test_a_pause_is_never_shorter_than_the_first_nor_longer_than_the_longest(times: int, base: int, longest: int):
    pause = pause_s(times, RestartBackoff(base_delay_seconds=base, max_delay_seconds=longest))
    assert base <= pause <= max(base, longest)
