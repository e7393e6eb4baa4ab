"""Engines that start anew at the same address are told once, with what they said last."""

from dcp_operator.engine_restarts import EngineRestarts
from dcp_operator.observed import Key, Observed
from tests.support.objects import owner, pod


def engine(restarts: int, *, role: str = "decode", uid: str = "u1", words: str = "ValueError: bad") -> dict:
    last = {"lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": words}}} if restarts else {}
    main = {"name": "main", "restartCount": restarts, "state": {"running": {}}, **last}
    other = {"name": "sidecar", "restartCount": restarts * 7}
    return pod(role, "r1", name="p", uid=uid, containers=[other, main])


def seen(*pods: dict) -> Observed:
    return Observed(owner(), pods=pods)


def test_a_restart_is_told_once_with_the_engines_last_words():
    watch = EngineRestarts()
    assert watch.look(seen(engine(0))) == []
    (found,) = watch.look(seen(engine(1)))
    assert found.role == "decode"
    for words in ("pod p", "restart 1", "exit code 1", "ValueError: bad"):
        assert words in found.message
    assert watch.look(seen(engine(1))) == []
    assert len(watch.look(seen(engine(3)))) == 1


def test_what_is_there_when_a_pod_is_first_seen_is_from_before():
    assert EngineRestarts().look(seen(engine(5))) == []


def test_a_new_pod_is_no_restart_and_a_router_is_no_engine():
    watch = EngineRestarts()
    watch.look(seen(engine(4)))
    assert watch.look(seen(engine(0, uid="u2"))) == []
    assert watch.look(seen(engine(0, role="router"))) == []
    assert watch.look(seen(engine(1, role="router"))) == []


def test_a_forgotten_object_begins_anew():
    watch = EngineRestarts()
    watch.look(seen(engine(0)))
    watch.forget(Key("models", "chat"))
    assert watch.look(seen(engine(1))) == []
