"""Who is served when there isn't room for all: turns in a pass, places in the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from e2sci.runtime.places import Places
from e2sci.runtime.turns import in_turn


@dataclass(eq=False)
class Someone:
    """A seat as turns and places see it."""

    owner: str = "a"
    passed_over: int = 0
    acceptance: float = 0.9
    active: float = 0.0
    sequence: int | None = None
    evictions: int = 0
    session: Someone = field(init=False)

    def __post_init__(self) -> None:
        self.session = self

    def evicted(self) -> None:
        self.evictions += 1


people = st.lists(
    st.builds(Someone, st.sampled_from("abc"), st.integers(0, 3), st.floats(0, 1)), max_size=12
)


@given(people)
def test_everyone_has_a_turn(waiting):
    order = in_turn(waiting)
    assert Counter(map(id, order)) == Counter(map(id, waiting))


@given(people)
def test_of_one_client_who_was_passed_over_then_who_has_credit(waiting):
    for owner in "abc":
        keys = [(-s.passed_over, -s.acceptance) for s in in_turn(waiting) if s.owner == owner]
        assert keys == sorted(keys)


def test_a_client_with_many_requests_gets_no_more_than_one_with_few():
    waiting = [Someone("big") for _ in range(50)] + [Someone("small")]
    assert "small" in [s.owner for s in in_turn(waiting)[:2]]


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1)), min_size=1, max_size=30),
    st.integers(1, 8),
)
def test_nobody_starves(crowd, room):
    """Whatever credit says: with room for some in a pass, each is served again within as many
    passes as it takes to serve everyone once, for each client."""
    seats = [Someone(owner, acceptance=credit) for owner, credit in crowd]
    clients = len({seat.owner for seat in seats})
    served = Counter()
    longest = Counter()
    for _ in range(200):
        order = in_turn(seats)
        for seat in order[:room]:
            served[seat] += 1
            seat.passed_over = 0
        for seat in order[room:]:
            seat.passed_over += 1
            longest[seat] = max(longest[seat], seat.passed_over)
    bound = -(-len(seats) * clients // room) + clients
    assert max(longest.values(), default=0) <= bound
    assert min(served[seat] for seat in seats) >= 1


# ---- places -----------------------------------------------------------------------------------


def places(slots):
    freed = []
    return Places(slots, lambda place, _: freed.append(place)), freed


def never(_):
    return False


def always(_):
    return True


def test_free_places_go_to_the_line_in_order():
    room, _ = places(2)
    crowd = [Someone(owner=str(i)) for i in range(3)]
    for seat in crowd:
        room.join(seat)
    assert room.give(never) == crowd[:2]
    assert {crowd[0].sequence, crowd[1].sequence} == {0, 1}
    assert room.line == [crowd[2]]
    room.leave(crowd[0])
    assert room.give(never) == [crowd[2]]


def test_who_holds_fewest_comes_first():
    room, _ = places(3)
    crowd = [Someone("a"), Someone("a"), Someone("a"), Someone("b")]
    for seat in crowd:
        room.join(seat)
    assert [s.owner for s in room.give(never)] == ["a", "b", "a"]


def test_the_longest_quiet_gives_its_place_up_and_is_emptied():
    room, freed = places(2)
    old, new, third = Someone(active=1.0), Someone(active=2.0), Someone()
    for seat in (old, new, third):
        room.join(seat)
    assert room.give(never) == [old, new]
    place = old.sequence
    assert room.give(always) == [third]
    assert (old.sequence, old.evictions, third.sequence) == (None, 1, place)
    assert freed == [place]
    assert new.evictions == 0


def test_nobody_is_in_line_twice_or_seated_and_in_line():
    room, _ = places(1)
    seat = Someone()
    room.join(seat)
    room.join(seat)
    assert room.line == [seat]
    room.give(never)
    room.join(seat)
    assert room.line == []


@given(st.lists(st.tuples(st.sampled_from(["join", "give", "leave"]), st.integers(0, 5))))
def test_no_place_is_lost_or_given_twice(steps):
    room, _ = places(3)
    crowd = [Someone(owner="ab"[i % 2], active=i) for i in range(6)]
    for what, who in steps:
        if what == "join":
            room.join(crowd[who])
        elif what == "leave":
            room.leave(crowd[who])
        else:
            room.give(lambda seat: seat.active < 3)
        held = [seat.sequence for seat in crowd if seat.sequence is not None]
        assert len(held) == len(set(held)) == len(room.taken) <= 3
        assert sorted([*held, *room._free._kept]) == [0, 1, 2]
