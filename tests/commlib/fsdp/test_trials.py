"""Codecs chosen by trials: in a world of known times the choice is never slower than plain FSDP2, and near the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from commlib.fsdp.trials import CodecTrials, Turn, UnitTimes

PLAIN = ""
UNITS = ("root", "one", "two")
CODECS = ("int8", "onebit")
VALUES = ("bf16",)


@dataclasses.dataclass
class World:
    """Times that nothing disturbs: seconds of a unit's gradients by codec, of all parameters by codec, of the rest."""

    gradients: dict[str, dict[str, float]]
    values: dict[str, float]
    rest: float = 0.05

    def span(self, turn: Turn) -> float:
        return self.rest + sum(self.units(turn.routes).values()) + self.values[turn.values]

    def units(self, routes: Mapping[str, str]) -> dict[str, float]:
        return {u: by[routes.get(u, PLAIN)] for u, by in self.gradients.items()}

    def figures(self, turn: Turn) -> UnitTimes:
        return UnitTimes(turn.steps - turn.skip, self.span(turn), self.units(turn.routes))


def even(plain: float, **by: float) -> World:
    """All units alike."""
    return World({u: {PLAIN: plain, **by} for u in UNITS}, {PLAIN: 0.01, "bf16": 0.01})


def until_settled(trials: CodecTrials, world: World, turn: Turn | None = None) -> list[Turn]:
    """The turns until all is settled; the last is steady."""
    turns = [turn or trials.first()]
    while turns[-1].phase != "steady" or len(turns) == 1:
        turns.append(trials.review(world.figures(turns[-1])))
        assert len(turns) < 40
    return turns


def trials_of_all() -> CodecTrials:
    return CodecTrials(dict.fromkeys(CODECS, UNITS), VALUES)


seconds = st.floats(1e-4, 2.0)


@given(
    st.fixed_dictionaries(
        {u: st.fixed_dictionaries({PLAIN: seconds, **dict.fromkeys(CODECS, seconds)}) for u in UNITS}
    ),
    st.fixed_dictionaries({PLAIN: seconds, "bf16": seconds}),
)
def test_the_choice_is_near_the_best_single_codec_and_never_slower_than_plain(
    gradients: dict[str, dict[str, float]], values: dict[str, float]
) -> None:
    world = World(gradients, values)
    chosen = until_settled(trials_of_all(), world)[-1]
    singles = [Turn(dict.fromkeys(UNITS, c)) for c in CODECS] + [Turn()]
    assert world.span(chosen) <= world.span(Turn())
    assert world.span(chosen) <= min(map(world.span, singles)) / 0.98 + 1e-9
    if chosen.routes or chosen.values:
        assert world.span(chosen) < 0.98 * world.span(Turn())
    assert chosen.step_s is not None
    assert abs(chosen.step_s[0] - world.span(chosen)) < 1e-9


def test_each_unit_has_the_codec_that_is_best_for_it() -> None:
    world = even(0.2, int8=0.1, onebit=0.3)
    world.gradients["two"] = {PLAIN: 0.2, "int8": 0.3, "onebit": 0.05}
    world.gradients["one"] = {PLAIN: 0.1, "int8": 0.2, "onebit": 0.2}
    assert until_settled(trials_of_all(), world)[-1].routes == {"root": "int8", "two": "onebit"}


def test_a_codec_is_tried_on_no_unit_that_it_would_carry_nothing_of() -> None:
    turns = until_settled(CodecTrials({"int8": ["one"]}, ()), even(0.2, int8=0.1))
    assert {tuple(turn.routes) for turn in turns} == {(), ("one",)}


def test_nothing_is_chosen_where_no_codec_wins_and_steps_say_so() -> None:
    last = until_settled(trials_of_all(), even(0.01, int8=0.02, onebit=0.02))[-1]
    assert (last.routes, last.values) == ({}, "")
    assert last.said.endswith(" without")


def test_a_plain_step_that_was_slow_at_first_decides_nothing() -> None:
    trials, world = trials_of_all(), even(0.1, int8=0.15, onebit=0.2)
    world.rest = 2.0  # the first steps of a training
    turn = trials.review(world.figures(trials.first()))
    world.rest = 0.05
    assert not until_settled(trials, world, turn)[-1].routes


def test_parameters_codecs_are_tried_by_themselves_and_beside_the_best_of_gradients() -> None:
    world = even(0.2, int8=0.1, onebit=0.3)
    world.values = {PLAIN: 0.4, "bf16": 0.1}
    last = until_settled(trials_of_all(), world)[-1]
    assert (set(last.routes.values()), last.values) == ({"int8"}, "bf16")
    assert until_settled(CodecTrials({}, VALUES), world)[-1].values == "bf16"


def steady(trials: CodecTrials, world: World, turn: Turn, reviews: int) -> Turn:
    for _ in range(reviews):
        turn = trials.review(world.figures(turn))
    return turn


def test_another_link_is_noticed_and_all_is_tried_again_but_not_for_one_slow_review() -> None:
    trials, slow, fast = trials_of_all(), even(0.4, int8=0.1, onebit=0.2), even(0.01, int8=0.04, onebit=0.05)
    turn = steady(trials, slow, until_settled(trials, slow)[-1], 3)
    assert turn.routes
    turn = steady(trials, fast, turn, 1)
    assert turn.phase == "steady"
    turn = steady(trials, slow, turn, 2)
    assert turn.phase == "steady"
    turn = steady(trials, fast, turn, 2)
    assert (turn.phase, turn.routes) == ("watch", {})
    assert not until_settled(trials, fast, turn)[-1].routes


def test_links_that_change_all_the_time_are_not_measured_all_the_time() -> None:
    trials, worlds = trials_of_all(), (even(0.4, int8=0.1, onebit=0.2), even(0.01, int8=0.04, onebit=0.05))
    turn, spent, total = trials.first(), 0.0, 0.0
    for n in range(4000):
        world = worlds[n // 20 % 2]
        seconds_now = world.span(turn) * turn.steps
        spent += seconds_now if turn.phase != "steady" else 0.0
        total += seconds_now
        turn = trials.review(world.figures(turn))
    assert spent < 0.05 * total


def test_steps_that_broke_off_are_made_again() -> None:
    trials = trials_of_all()
    first = trials.first()
    again = trials.review(UnitTimes(0, 0.0, {}))
    assert (again.phase, again.routes) == (first.phase, first.routes)
    assert again.steps >= 2


def test_of_all_ranks_the_slowest_steps_count_and_the_units_that_waited_for_nobody() -> None:
    ranks = [UnitTimes(3, 0.2, {"one": 0.1, "two": 0.3}), UnitTimes(2, 0.3, {"one": 0.2})]
    assert UnitTimes.of_all(ranks) == UnitTimes(2, 0.3, {"one": 0.1, "two": 0.3})


def test_decisions_and_figures_travel_as_plain_values() -> None:
    turn = Turn({"one": "int8"}, "bf16", 5, 1, "steady", (0.1, 0.2), "said")
    assert Turn.from_wire({**turn.to_wire(), "step_s": [0.1, 0.2]}) == turn
    assert Turn.from_wire(Turn().to_wire()) == Turn()
    figures = UnitTimes.of([0.1, 0.3, 0.2], {"one": [0.2, 0.1, 0.4], "none": []})
    assert figures == UnitTimes(3, 0.2, {"one": 0.2})
    assert UnitTimes(**figures.to_wire()) == figures
