"""Objects with one of their parts replaced, for tests of what other sites may have made up."""

import copy
import dataclasses
import math
import random


def altered_item(item, chance: random.Random):
    """Return an object with one of its parts replaced by another value, which may be of another type."""
    fields = [each.name for each in dataclasses.fields(item)] if dataclasses.is_dataclass(item) else []
    places = fields or ([*item] if isinstance(item, dict) else [*range(len(item))] if isinstance(item, list) else [])
    if not places or chance.random() < 0.1:
        rest = item[1:] if isinstance(item, list) else item
        return chance.choice([None, -1, 0, 3, 1 << 20, 1 << 40, 1 << 62, 0.5, math.nan, math.inf, "x", [], {}, rest])
    made, place = copy.copy(item), chance.choice(places)
    if fields:
        object.__setattr__(made, place, altered_item(getattr(item, place), chance))
    else:
        made[place] = altered_item(item[place], chance)
    return made
