"""An iteration is foretold as long as it is what the last one was, and not a moment longer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commlib.server.worker.prefetch import KeySequence

TOLD = ["abc", "a", "ab", "ab"]
iterations = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8)


@given(iterations)
def test_an_operation_is_foretold_if_all_up_to_it_was_so_in_the_iteration_before(told: list[list[int]]) -> None:
    sequence: KeySequence[int] = KeySequence()
    before: list[int] | None = None
    for iteration in told:
        for i, operation in enumerate(iteration):
            assert sequence.at == i
            expected = before is not None and before[: i + 1] == iteration[: i + 1]
            assert sequence.note(operation) is expected
            assert sequence.foretold is expected
        assert sequence.end() is (before != iteration)
        assert sequence.known == tuple(iteration)
        before = iteration


def test_nothing_is_known_at_first_and_an_iteration_that_ends_early_is_another() -> None:
    sequence: KeySequence[str] = KeySequence()
    found = [(sequence.known, sequence.foretold, [sequence.note(o) for o in told], sequence.end()) for told in TOLD]
    assert found == [
        (None, False, [False, False, False], True),
        (("a", "b", "c"), True, [True], True),  # b and c were foretold, and did not come
        (("a",), True, [True, False], True),  # one more than foretold
        (("a", "b"), True, [True, True], False),
    ]
