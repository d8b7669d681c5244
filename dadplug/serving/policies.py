"""Policies that select the models of a request, and learn from feedback: fixed, Exp3 and Exp4.

With K models, and losses l in [0, 1]:

- Exp3.S (Auer, Cesa-Bianchi, Freund, Schapire, SIAM J. Comput. 32, 2002, section 8) runs one model, drawn with
  p_i = (1 - gamma) w_i / W + gamma / K. Feedback on model i: x = (1 - l) / p_i, w_i <- w_i exp(gamma x / K); then each
  weight gains ``share`` e / K of their sum W, so that a model that has become better is found again.
- Exp4 as Clipper uses it runs all models, and each model is one expert: w_i <- w_i exp(-eta l_i). Then each weight
  becomes (1 - share) w_i + share W / K (fixed share, Herbster and Warmuth, 1998).

Weights are kept for each context, such as a site, and are uniform in a context without feedback.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..registry import Registry

_SMALLEST = 1e-300  # a weight never becomes zero


class Choice(NamedTuple):
    """Models of one request.

    Attributes:
        models: names of the models to run.
        weights: weight of each model in the answer, with sum 1 over all models.
        probability: probability with which the model was drawn.
    """

    models: tuple[str, ...]
    weights: dict[str, float]
    probability: float = 1.0


class Policy:
    """Base of the policies: weights by context.

    Attributes:
        models: names of the models, set by `bind`.
    """

    def __init__(self) -> None:
        self.models: tuple[str, ...] = ()
        self._weights: dict[str, dict[str, float]] = {}

    def bind(self, models: Sequence[str]) -> None:
        """Set the models; weights of former models are dropped.

        Args:
            models: names of the models.
        """
        self.models = tuple(models)
        self._weights = {}

    def weights(self, context: str) -> dict[str, float]:
        """Return the weights of a context by model, with sum 1.

        Args:
            context: the context.
        """
        return dict(self._weights.get(context) or dict.fromkeys(self.models, 1.0 / len(self.models)))

    def contexts(self) -> list[str]:
        """Return the contexts that have had feedback."""
        return list(self._weights)

    def has_room(self, context: str, most: int) -> bool:
        """Return whether a context has weights, or can have some.

        Args:
            context: the context.
            most: largest number of contexts with weights.
        """
        return context in self._weights or len(self._weights) < most

    def choose(self, context: str) -> Choice:
        """Return the models of a request.

        Args:
            context: its context.
        """
        raise NotImplementedError

    def learn(self, context: str, choice: Choice, losses: Mapping[str, float]) -> None:
        """Learn from feedback.

        Args:
            context: context of the request.
            choice: its choice.
            losses: loss in [0, 1] of each model that ran; 1 for one that failed.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the weights as plain values."""
        return {"policy": type(self).__name__, "models": list(self.models), "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weights.

        Args:
            state: result of `state_dict`.

        Raises:
            ValueError: if it is of another policy or other models, or damaged; nothing has changed then.
        """
        try:
            kind, models, weights = state["policy"], state["models"], state["weights"]
            if kind != type(self).__name__ or sorted(models) != sorted(self.models):
                raise ValueError(
                    f"the weights are of {kind} with the models {', '.join(models)}; these are {type(self).__name__} "
                    f"with {', '.join(self.models)}"
                )
            loaded = {
                str(context): {name: float(values[name]) for name in self.models} for context, values in weights.items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the saved weights are damaged: {type(error).__name__}: {error}") from error
        if not all(math.isfinite(value) and value > 0 for values in loaded.values() for value in values.values()):
            raise ValueError("the saved weights are damaged: a weight is not positive")
        self._weights = {context: _normalised(values) for context, values in loaded.items()}


POLICIES: Registry[str, type[Policy]] = Registry("policy")


@POLICIES.register("fixed")
class Fixed(Policy):
    """The same model for all requests.

    Args:
        model: its name; None for the first.
    """

    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self._model = model

    def bind(self, models: Sequence[str]) -> None:
        """Set the models; see `Policy.bind`.

        Args:
            models: names of the models.

        Raises:
            ValueError: if the model is not one of them.
        """
        if self._model is not None and self._model not in models:
            raise ValueError(f"unknown model {self._model!r}; valid ones are {', '.join(models)}")
        super().bind(models)

    def weights(self, context: str) -> dict[str, float]:
        """Return weight 1 for the model; see `Policy.weights`.

        Args:
            context: the context.
        """
        chosen = self._model or self.models[0]
        return {name: float(name == chosen) for name in self.models}

    def choose(self, context: str) -> Choice:
        """Return the model; see `Policy.choose`.

        Args:
            context: the context.
        """
        return Choice((self._model or self.models[0],), self.weights(context))

    def learn(self, context: str, choice: Choice, losses: Mapping[str, float]) -> None:
        """Do nothing; see `Policy.learn`.

        Args:
            context: the context.
            choice: the choice.
            losses: the losses.
        """


@POLICIES.register("exp3")
class Exp3(Policy):
    """One model for each request, drawn by its weight (Exp3.S).

    Args:
        gamma: share of the requests that try models uniformly at random, and the rate of learning, in (0, 1].
        share: part of the weights that is spread over all models at each feedback; 0 for Exp3 without shares.
        seed: seed of the draws; None for an arbitrary one.

    Raises:
        ValueError: if a value is out of range.
    """

    def __init__(self, gamma: float = 0.1, share: float = 1e-3, seed: int | None = None) -> None:
        super().__init__()
        if not 0 < gamma <= 1 or not 0 <= share < 1:
            raise ValueError(f"gamma has to be in (0, 1] and share in [0, 1), not {gamma} and {share}")
        self._gamma, self._share, self._random = gamma, share, random.Random(seed)

    def choose(self, context: str) -> Choice:
        """Draw a model; see `Policy.choose`.

        Args:
            context: the context.
        """
        weights = self.weights(context)
        drawn = {name: (1 - self._gamma) * weights[name] + self._gamma / len(weights) for name in weights}
        (name,) = self._random.choices(list(drawn), list(drawn.values()))
        return Choice((name,), weights, drawn[name])

    def learn(self, context: str, choice: Choice, losses: Mapping[str, float]) -> None:
        """Raise the weight of the model by its reward; see `Policy.learn`.

        Args:
            context: the context.
            choice: the choice.
            losses: the loss of its model.
        """
        weights, k = self.weights(context), len(self.models)
        ((name, loss),) = losses.items()
        shared = math.e * self._share / k  # of W, which is 1 before the update
        weights[name] *= math.exp(self._gamma * (1 - loss) / choice.probability / k)
        self._weights[context] = _normalised({each: value + shared for each, value in weights.items()})


@POLICIES.register("exp4")
class Exp4(Policy):
    """All models for each request, combined by their weights.

    Args:
        eta: rate of learning.
        share: part of the weights that is spread over all models at each feedback.

    Raises:
        ValueError: if a value is out of range.
    """

    def __init__(self, eta: float = 0.3, share: float = 1e-3) -> None:
        super().__init__()
        if eta <= 0 or not 0 <= share < 1:
            raise ValueError(f"eta has to be positive and share in [0, 1), not {eta} and {share}")
        self._eta, self._share = eta, share

    def choose(self, context: str) -> Choice:
        """Return all models; see `Policy.choose`.

        Args:
            context: the context.
        """
        return Choice(self.models, self.weights(context))

    def learn(self, context: str, choice: Choice, losses: Mapping[str, float]) -> None:
        """Lower the weights of models by their losses; see `Policy.learn`.

        Args:
            context: the context.
            choice: the choice.
            losses: the losses.
        """
        weights = self.weights(context)
        for name, loss in losses.items():
            weights[name] *= math.exp(-self._eta * loss)
        weights, shared = _normalised(weights), self._share / len(weights)
        self._weights[context] = {name: (1 - self._share) * value + shared for name, value in weights.items()}


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: max(value / total, _SMALLEST) for name, value in weights.items()}


def policy_of(given: str | Policy) -> Policy:
    """Return a policy by its name, or the one that is given.

    Raises:
        ValueError: if no policy has this name.
    """
    return POLICIES[given]() if isinstance(given, str) else given
