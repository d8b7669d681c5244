from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dadplug.model_sync.samples import batches_before, takes_part


@given(steps=st.integers(1, 300), data=st.data())
def test_every_batch_is_used_once_spread_over_the_epoch(steps, data):
    own = data.draw(st.integers(1, steps))
    participates = [takes_part(step, own, steps) for step in range(steps)]
    assert sum(participates) == own
    assert participates[0]
    assert participates[-1] or own == 1
    assert [sum(participates[:step]) for step in range(steps + 1)] == [
        batches_before(step, own, steps) for step in range(steps + 1)
    ]
    if own > 1:
        gaps = "".join("x" if each else "." for each in participates).strip("x").split("x")
        gaps = [len(gap) for gap in gaps]
        assert max(gaps) <= (steps - own) // (own - 1) + 1


def test_a_site_without_batches_never_takes_part():
    assert not any(takes_part(step, 0, 5) for step in range(5))
