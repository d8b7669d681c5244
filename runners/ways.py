"""Ways to train, as data: a way is registered here, and all trainers know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        strategy: name of its strategy for Lightning; the class NAMEBase, the same for both packages, is in `module`.
        runner: name of its runner for Catalyst, in `dadplug.runners.catalyst`.
        module: module of the strategy in ``runners/_lightning``.
        names: names for ``Trainer(strategy=)`` besides those of methods, each with options and a description.
    """

    strategy: str
    runner: str
    module: str = "strategies"
    names: Mapping[str, tuple[Mapping[str, Any], str]] = field(default_factory=dict)


WAYS = (
    Way("DADStrategy", "DistributedRunner"),  # the names are those of methods
    Way(
        "AdaPMStrategy",
        "AdaPMRunner",
        "adapm",
        {"adapm": ({"mode": "dsgd"}, "embeddings in tables spread over the sites (AdaPM)")},
    ),
    Way(
        "HogwildStrategy",
        "HogwildRunner",
        "hogwild",
        {"hogwild": ({}, "processes of this machine train one model in shared memory (Hogwild!)")},
    ),
    Way(
        "LocalSGDStrategy",
        "LocalSGDRunner",
        names={
            "localsgd": ({}, "sites train alone and agree on parameters now and then"),
            "diloco": ({"outer_lr": 0.7, "outer_momentum": 0.9}, "local steps as in DiLoCo"),
        },
    ),
    Way(
        "ParameterServerStrategy",
        "ParameterServerRunner",
        names={"parameter_server": ({}, "asynchronous steps by one log of gradients")},
    ),
)

STRATEGIES = {way.strategy: way for way in WAYS}
RUNNERS = {way.runner: way for way in WAYS}
