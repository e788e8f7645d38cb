"""No input breaks the command: it ends with exit code 0, 2, 3 or 4, without a traceback, in bounded time."""

import pytest
from fuzz_cases import CORPUS, FuzzCase, any_case, fault
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_input_that_once_broke_the_command_is_refused_or_planned(path):
    assert fault(FuzzCase.from_json(path.read_text(encoding="utf-8"))) == ""


@settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_input_is_refused_or_planned(data):
    assert fault(data.draw(any_case())) == ""
