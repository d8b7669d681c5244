from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dadplug.model_sync.uneven_inputs import batches_before, has_turn


@given(steps=st.integers(1, 300), data=st.data())
def test_every_batch_has_its_turn_spread_over_the_epoch(steps, data):
    own = data.draw(st.integers(1, steps))
    turns = [has_turn(step, own, steps) for step in range(steps)]
    assert sum(turns) == own
    assert turns[0]
    assert turns[-1] or own == 1
    assert [sum(turns[:step]) for step in range(steps + 1)] == [
        batches_before(step, own, steps) for step in range(steps + 1)
    ]
    if own > 1:
        gaps = "".join("x" if turn else "." for turn in turns).strip("x").split("x")
        gaps = [len(gap) for gap in gaps]
        assert max(gaps) <= (steps - own) // (own - 1) + 1


def test_a_site_without_batches_never_has_a_turn():
    assert not any(has_turn(step, 0, 5) for step in range(5))
