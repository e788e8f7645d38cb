"""The comparison with other packages: what is compared with what, and the code that runs in their environments."""

import pytest

from benchmarks.peer_packages import HARNESS, PEERS, Peer
from benchmarks.peers import comparable_bytes, score, spread

ANSWER = {"bytes": 100, "slack_bytes": 10, "context_bytes": 5}


@pytest.mark.parametrize(("quantity", "bytes_"), [("allocated", 85), ("reserved", 95), ("process", 100)])
def test_an_answer_is_compared_without_what_a_quantity_does_not_measure(quantity: str, bytes_: int) -> None:
    assert comparable_bytes(ANSWER, quantity) == bytes_


def test_a_score_counts_answers_more_than_3_percent_too_low() -> None:
    assert score([0.5, -0.02, -0.1]) == "-2.0% | 20.7% | +50.0% | 33%"


def test_a_sample_is_spread_over_all_rows() -> None:
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread([7], 3) == [7]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.package)
def test_the_code_of_a_peer_compiles_and_defines_an_answer(peer: Peer) -> None:
    compile(HARNESS % peer.code, peer.package, "exec")
    assert "def answer(q):" in peer.code
