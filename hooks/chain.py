"""Tracing of chains of layers: the layer whose output is, through an elementwise function, the input of the next one.

A link from a layer to its follower is read off autograd's graph in forward. In backward the follower passes on what
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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from .factor import IDENTITY, LINEAR, Elementwise, Form, Trace
from .registry import Recorder

_MIXES = "mixes rows"
_ACROSS = "mixes the numbers of a row"
_HIDDEN = "has a derivative that its output does not tell"
_REASONS: list[tuple[tuple[type[nn.Module], ...], str]] = [
    ((_DropoutNd,), "draws its own numbers"),
    ((nn.MultiheadAttention, nn.RNNBase), _MIXES),
    ((_ConvNd,), "is no fully connected layer"),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.GLU), _ACROSS),
    ((nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish), _HIDDEN),
    ((nn.PReLU,), "has a slope that is trained"),
]


def why_broken(node: Any, made_by: tuple[str, nn.Module] | None, before: str) -> str:
    """Return the reason for which an operation breaks a chain, such as ``3 (BatchNorm1d) mixes rows``.

    Args:
        node: node of the operation in autograd's graph.
        made_by: name and module whose forward ends with the operation, if there is one.
        before: layer that follows the operation.
    """
    if "Compiled" in node.name():
        return f"torch.compile's code before {before} cannot be looked into"
    if made_by is None:
        return f"{node.name()}, an operation outside of modules before {before}, is no function that chains go through"
    name, module = made_by
    title = f"{name} ({type(module).__name__})"
    if isinstance(module, _BatchNorm) and module.training:
        return f"{title} {_MIXES}"
    if isinstance(module, nn.Linear):
        weight = module._parameters.get("weight")  # a parametrised one would be computed anew, with side effects
        frozen = weight is not None and not weight.requires_grad
        return f"{title} is frozen" if frozen else f"{title} sends no factors"
    for types, reason in _REASONS:
        if isinstance(module, types):
            return f"{title} {reason}"
    return f"{title} is no function that chains go through"


_CALL, _MODULE = "chain call", "chain module"  # what autograd's nodes are marked with
_MOST_NODES = 10_000  # looked at behind a chain break
_numbers = itertools.count()


class TracedLayer(Protocol):
    """Layer whose calls are traced.

    Attributes:
        name: name of the layer in the model.
        module: the layer.
    """

    name: str
    module: nn.Module

    def record(self, activations: Tensor, deltas: Tensor, form: Form, trace: Trace | None) -> None:
        """Store one call's factors and its trace."""


class _Claim(NamedTuple):
    """Deltas of the layer before, as its follower computes them."""

    backward_pass: int
    deltas: Tensor
    layer: str
    function: Elementwise
    key: int


class _Call:
    """One call of a traced layer, which records the factors together with a trace."""

    def __init__(self, layer: TracedLayer, source: _Call | None, function: Elementwise) -> None:
        self.layer = layer
        self._source = source
        self._function = function
        self._claims: list[_Claim] = []
        self._running: tuple[int, Tensor] | None = None

    def record(self, activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
        """Record the call's factors, and compare its deltas with those that its followers claim."""
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
        """Pass the claimed deltas to the call that made this one's input; called after this call's backward."""
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
    """Return whether deltas equal the claimed ones, up to rounding."""
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
    """Forward hook that marks a module's outputs as its own; in a copied or pickled model it does nothing."""

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
    """Tracer of layers' outputs through a model.

    Until `stop_naming` it also finds the reasons for which chains break.

    Args:
        model: model whose layers are traced.

    Attributes:
        chain_breaks: by name of a layer, the first chain break behind it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.chain_breaks: dict[str, str] = {}
        self._naming = [module.register_forward_hook(_Naming(name)) for name, module in model.named_modules() if name]

    def stop_naming(self) -> None:
        """Remove the hooks that name modules."""
        for hook in self._naming:
            hook.remove()
        self._naming = []

    def call(self, layer: TracedLayer, inputs: Tensor, forward: Callable[[Recorder], Tensor]) -> Tensor:
        """Call a layer and trace the call.

        Args:
            layer: layer to call.
            inputs: its input.
            forward: function that computes the output, and passes the factors to a recorder in backward.
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
        """Find the layers behind a chain break, and record for each the first break on the path from it."""
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
    """Return the call that an input comes from, the function between, and whether the chain is broken between them."""
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
