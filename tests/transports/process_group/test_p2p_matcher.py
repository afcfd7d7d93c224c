"""Messages of one rank with one tag are received in the order sent, by receives in the order posted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commlib.transports.process_group.p2p import Matcher, Wanted

EVENTS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([None, 0, 1, 2]), st.integers(0, 2)),
    max_size=60,
)


@given(EVENTS)
def test_as_if_each_pair_were_looked_for_anew(events: list[tuple[bool, int | None, int]]) -> None:
    matcher: Matcher[int, int] = Matcher()
    wanted: list[tuple[int, int | None, int]] = []
    came: list[tuple[int, int, int]] = []
    for i, (is_message, rank, tag) in enumerate(events):
        if is_message:
            source = rank or 0
            found = matcher.came(source, tag, i)
            fits = [w for w in wanted if w[1] in (None, source) and w[2] == tag]
            assert found == (fits[0][0] if fits else None)
            if fits:
                wanted.remove(fits[0])
            else:
                came.append((i, source, tag))
        else:
            got = matcher.want(Wanted(rank, tag, i))
            there = [m for m in came if rank in (None, m[1]) and m[2] == tag]
            assert got == ((there[0][1], there[0][0]) if there else None)
            if there:
                came.remove(there[0])
            else:
                wanted.append((i, rank, tag))
    assert [w.ticket for w in matcher.wanted] == [w[0] for w in wanted]


def test_a_receive_that_gave_up_takes_nothing() -> None:
    matcher: Matcher[str, object] = Matcher()
    first, second = object(), object()
    matcher.want(Wanted(0, 0, first))
    matcher.want(Wanted(None, 0, second))
    matcher.forget(first)
    assert matcher.came(0, 0, "hello") is second
