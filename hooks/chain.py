"""Which layer's output became, through an elementwise function, which layer's input; checked call by call.

A link from a layer to its follower is read off autograd's graph in forward. In backward the follower hands over what
the layer's deltas should be if nothing else had used its output, ``(D W) * phi'(z)``, which autograd has computed
anyway; only a call whose deltas are these counts as followed. Skip connections, outputs that are used twice, hooks
that change gradients and second derivatives all show there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .chain_breaks import why_broken
from .elementwise import IDENTITY, Elementwise
from .form import LINEAR, Form
from .registry import Recorder
from .trace import Trace

_CALL, _MODULE = "chain call", "chain module"  # what autograd's nodes are marked with
_MOST_NODES = 10_000  # looked at behind a chain break
_numbers = itertools.count()


class TracedLayer(Protocol):
    """A layer whose calls are traced.

    Attributes:
        name: name of the layer in the model.
        module: the layer.
    """

    name: str
    module: nn.Module

    def record(self, activations: Tensor, deltas: Tensor, form: Form, trace: Trace | None) -> None:
        """Store one call's factors and its trace."""


class _Claim(NamedTuple):
    """What a follower says that the deltas of the layer before are."""

    backward_pass: int
    deltas: Tensor
    layer: str
    function: Elementwise
    key: int


class _Call:
    """One call of a layer; records in the layer's stead."""

    def __init__(self, layer: TracedLayer, source: _Call | None, function: Elementwise) -> None:
        self.layer = layer
        self._source = source
        self._function = function
        self._claims: list[_Claim] = []
        self._running: tuple[int, Tensor] | None = None

    def record(self, activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
        """Takes the call's factors, and finds out what the claims on its output are worth."""
        key, now = next(_numbers), torch._C._current_graph_task_id()
        claims = [claim for claim in self._claims if claim.backward_pass == now]
        self._claims.clear()
        if len(claims) == 1 and _same(claims[0], deltas):
            trace = Trace(key, claims[0].layer, claims[0].function, claims[0].key)
        elif not claims:
            trace = Trace(key)
        elif claims[0].deltas.shape != deltas.shape:
            trace = Trace(key, chain_break="has an output that is cut into other rows on its way")
        else:
            trace = Trace(key, chain_break="has an output that is used elsewhere too")
        self._running = key, activations
        self.layer.record(activations, deltas, form, trace)

    def hand_over(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> None:
        """Tells the call that made this one's input what its deltas are; called when backward has passed."""
        running, self._running = self._running, None
        gradient = grad_inputs[0]
        if self._source is None or running is None or gradient is None or gradient.shape[-1:] != running[1].shape[1:]:
            return
        key, activations = running
        rows = gradient.detach().reshape(-1, activations.shape[1])
        deltas = self._function.backward(rows, activations.to(rows.dtype))
        now = torch._C._current_graph_task_id()
        self._source._claims.append(_Claim(now, deltas, self.layer.name, self._function, key))


def _same(claim: _Claim, deltas: Tensor) -> bool:
    """Says whether deltas are the claimed ones, to the last digits."""
    if claim.deltas.shape != deltas.shape:
        return False
    expected = claim.deltas.to(deltas)
    if torch.equal(expected, deltas):
        return True
    rounding = 2 * torch.finfo(deltas.dtype).eps
    largest = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) if claim.function.rounds else 0.0
    relative = rounding if rounding < 1e-6 else 0.0  # that of half precision would let a small side path through
    return torch.allclose(deltas, expected, relative, rounding * largest, equal_nan=True)


class _Naming:
    """Marks a module's outputs as its own; a hook that does nothing in a copied or pickled model."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            node: Any = tensor.grad_fn if isinstance(tensor, Tensor) else None
            if node is not None and self._name:  # the innermost module comes first, and stays
                node.metadata.setdefault(_MODULE, (self._name, module))

    def __reduce__(self) -> tuple[type[_Naming], tuple[()]]:
        return _Naming, ()


class ChainTracer:
    """Follows layers' outputs through a model.

    Until `stop_naming` it also finds words for what breaks chains.

    Args:
        model: the model.

    Attributes:
        chain_breaks: by name of a layer, what comes behind it first that chains do not go through.
    """

    def __init__(self, model: nn.Module) -> None:
        self.chain_breaks: dict[str, str] = {}
        self._naming = [module.register_forward_hook(_Naming(name)) for name, module in model.named_modules() if name]

    def stop_naming(self) -> None:
        """Names nothing more."""
        for hook in self._naming:
            hook.remove()
        self._naming = []

    def call(self, layer: TracedLayer, inputs: Tensor, forward: Callable[[Recorder], Tensor]) -> Tensor:
        """Calls a layer.

        Args:
            layer: the layer.
            inputs: its input.
            forward: computes its output from it, and gives the factors to a recorder in backward.
        """
        source, function, broken = _source(inputs)
        if broken and self._naming:
            self._attribute(inputs.grad_fn, f"{layer.name} ({type(layer.module).__name__})")
        call = _Call(layer, source, function)
        output = forward(call.record)
        node: Any = output.grad_fn
        if node is not None:
            node.metadata[_CALL] = call
            node.register_hook(call.hand_over)
        return output

    def _attribute(self, node: Any, before: str) -> None:
        """Finds the layers behind a chain break, and for each what breaks first on the way from it."""
        todo, seen = [(node, IDENTITY, "")], {id(node): node}
        while todo and len(seen) < _MOST_NODES:
            node, passed, chain_break = todo.pop()
            call = node.metadata.get(_CALL)
            if call is not None:
                if chain_break:
                    self.chain_breaks.setdefault(call.layer.name, chain_break)
                continue
            function = Elementwise.of(node)
            if function is None or (function != IDENTITY and passed != IDENTITY):
                made_by = node.metadata.get(_MODULE)
                if function is not None and made_by is not None:
                    chain_break = f"{made_by[0]} ({type(made_by[1]).__name__}) is followed by another function"
                elif made_by is not None or not chain_break:  # without a name it is part of the module behind it
                    chain_break = why_broken(node, made_by, before)
            if function != IDENTITY:  # behind a chain break one function may come again
                passed = function or IDENTITY
            for behind, _ in node.next_functions:
                if behind is not None and id(behind) not in seen:
                    seen[id(behind)] = behind
                    todo.append((behind, passed, chain_break))


def _source(inputs: Tensor) -> tuple[_Call | None, Elementwise, bool]:
    """Finds the call that an input comes from, the function between, and whether something else comes between."""
    node: Any = inputs.grad_fn
    passed = IDENTITY
    while node is not None:
        call = node.metadata.get(_CALL)
        if call is not None:
            return call, passed, False
        function = Elementwise.of(node)
        if function is None or (function != IDENTITY and passed != IDENTITY):
            return None, IDENTITY, True
        passed = passed if function == IDENTITY else function
        node = node.next_functions[0][0]
    return None, IDENTITY, False
