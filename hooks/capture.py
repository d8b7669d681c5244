"""Capture of the input activations and output deltas of each layer in a backward pass."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import products
from .factor import LINEAR, Factor, Form, Trace, stack_by_form
from .registry import LayerFamily, Recorder, capturable_layers, family_of, is_dense

if TYPE_CHECKING:
    from .chain import ChainTracer

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CALL = "_compiled_call_impl"  # attribute of a module, which torch leaves out of copies


@overload
def eager(function: _Function) -> _Function: ...


@overload
def eager(*, nested: bool) -> Callable[[_Function], _Function]: ...


def eager(function: Any = None, *, nested: bool = False) -> Any:
    """Decorate a function so that torch.compile does not trace it: the graph breaks, and the function runs eagerly.

    `torch.compiler.disable` does so, too, but imports the compiler, which takes seconds. These are the marks by which
    it is done.

    Args:
        function: the function; changed in place.
        nested: whether what it calls is compiled.

    Returns:
        The function.
    """
    if function is None:
        return partial(eager, nested=nested)
    frames: Any = torch._C._dynamo.eval_frame
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "a captured layer runs as it is"
    if hasattr(frames, "set_code_exec_strategy"):
        actions = frames._FrameAction
        inside = actions.DEFAULT if nested else actions.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(actions.SKIP, inside))
    else:
        frames.skip_code(function.__code__)
    return function


def being_exported() -> bool:
    """Return whether the running forward pass is traced for `torch.jit.trace` or `torch.export`, and trains nothing."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def _nothing() -> None:
    """Stand for a reference whose object is gone."""


class CallOverride:
    """Call of a module inside of a function, in the place that `nn.Module.compile` uses.

    Hooks and forward of the module stay as they are. What is made of the module has no part of it: copies, pickles,
    and modules that are traced or exported.

    Args:
        module: module whose calls are overridden until `restore`.
        around: method that gets the call, the module, and positional and keyword arguments, and returns what the call
            returns. It is not kept alive: without its object, the module is called as before.
        passed: calls are not overridden while it is not empty.
    """

    def __init__(self, module: nn.Module, around: Callable[..., Any], passed: Collection[Any] = ()) -> None:
        self._module = module
        self._passed = passed
        self._around: Callable[[], Any] = WeakMethod(around)
        self._inner = vars(module).get(_CALL)
        vars(module)[_CALL] = self

    @property
    def holds(self) -> bool:
        """Whether the module is still called by this override, and was not compiled since."""
        found = vars(self._module).get(_CALL)
        while isinstance(found, CallOverride) and found is not self:
            found = found._inner
        return found is self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._inner or self._module._call_impl
        return call(*args, **kwargs) if self._passed or being_exported() else self._call(call, args, kwargs)

    @eager(nested=True)
    def _call(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        around = self._around()
        return call(*args, **kwargs) if around is None else around(call, self._module, args, kwargs)

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # in copies by a ``__getstate__`` that does not leave the attribute out

    def restore(self) -> None:
        """Restore the module's own call; a second call does nothing."""
        self._around = _nothing  # where another override calls this one
        if vars(self._module).get(_CALL) is self:
            vars(self._module)[_CALL] = self._inner
            if self._inner is None:
                del vars(self._module)[_CALL]


class ForwardOverride:
    """Forward that is set on a module instance; hooks on the module keep working.

    Args:
        module: module whose forward is replaced until `restore`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def plain(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the module's own forward."""
        outputs: Tensor = type(self.module).forward(self.module, *args, **kwargs)
        return outputs

    def restore(self) -> None:
        """Restore the module's own forward; a second call does nothing."""
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_forward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Callable[[nn.Module], Any], tuple[nn.Module]]:
        return _own_forward, (self.module,)


class EagerForward(ForwardOverride):
    """Forward of a module as it is, which torch.compile does not inline: it calls the module, with its overrides.

    The compiler calls modules of other classes than torch's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.__code__ = type(module).forward.__code__  # which torch.export looks at

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.plain(*args, **kwargs) if being_exported() else self._eager(*args, **kwargs)

    @eager(nested=True)
    def _eager(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.plain(*args, **kwargs)


def overridden(module: nn.Module) -> bool:
    """Return whether a module's forward is overridden.

    Args:
        module: the module.
    """
    return isinstance(vars(module).get("forward"), ForwardOverride)


def _own_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


class OwnHook(partial[Any]):
    """Hook of this package on a tensor or an optimizer, as opposed to a hook of the user.

    Args:
        function: the function to call.
        args: positional arguments to call it with, before those of the call.
    """


def has_user_hooks(*parameters: Tensor | None) -> bool:
    """Return whether a parameter has hooks on its gradient that are not of this package."""
    for parameter in parameters:
        if parameter is not None:
            kinds: tuple[Any, Any] = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            for hooks in kinds:
                if hooks and not _OWN.issuperset(map(type, hooks.values())):
                    return True
    return False


_OWN = {OwnHook}


class CapturedLayer:
    """One captured layer, and the factors that its last backward passes have recorded.

    The layer's forward is replaced on the instance by one that saves the same tensors as autograd, and records
    ``(activations, deltas)`` in backward. A pair is committed when the weight's gradient is due in the same backward
    pass, so that `torch.autograd.grad` for inputs alone records nothing.

    Attributes:
        name: name of the layer in the model, as in `named_modules`.
        module: captured layer.
        family: family of the layer.
        fed_by_data: whether a captured input was the result of no operation, as the model's raw input.
        left_out: why a call was left to autograd: its input was of a kind that has no factors; empty if none was.
        committed: the committed factors; not to be changed.
        wrap_recorder: called in each captured forward with the layer, its input and the function that receives the
            factors in backward; returns the function that receives them instead, and passes them on. None for none.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        family: LayerFamily,
        weight_gradients: bool,
        tracer: ChainTracer | None = None,
        fastest: bool = False,
    ) -> None:
        self.name = name
        self.module = module
        self.family = family
        self.weight_gradients = weight_gradients
        self.fastest = fastest
        self.tracer = tracer if family.known_form(module) == LINEAR else None
        self.fed_by_data = False
        self.left_out = ""
        self.wrap_recorder: Callable[[CapturedLayer, Tensor, Recorder], Recorder] | None = None
        self.weight: nn.Parameter = getattr(module, family.weight)
        self._bias: nn.Parameter | None = getattr(module, family.bias, None)
        self._pending: dict[int, Any] = {}  # lists of factors, by backward pass
        self.committed: list[Factor] = []
        self._versions: list[int] = []  # of the factors' activations, when they were committed
        self._released = False
        self._kept = 0  # number of factors whose inputs have been copied or cannot be overwritten
        self._hook = self.weight.register_post_accumulate_grad_hook(OwnHook(self.commit))
        self._forward = _CapturedForward(self)

    @property
    def bias(self) -> nn.Parameter | None:
        """Parameter whose gradient is the sum of the deltas; None if there is none that requires a gradient."""
        return self._bias if self._bias is not None and self._bias.requires_grad else None

    def record(self, activations: Tensor, deltas: Tensor, form: Form = LINEAR, trace: Trace | None = None) -> None:
        """Record the factors of one call; the layer's family calls it during backward."""
        if self._released:
            self._add_gradients(Factor(activations, deltas, form).to(self.weight.dtype))
            return
        now = torch._C._current_graph_task_id()
        if now not in self._pending:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._pending.pop, now, None))
        self._pending.setdefault(now, []).append(Factor(activations, deltas, form, trace=trace))

    def _add_gradients(self, factor: Factor) -> None:
        """Add to ``.grad`` what autograd does not form, of a call before the release whose backward pass follows it."""
        gradients = {} if self.weight_gradients else {self.weight: factor.gradient().view_as(self.weight)}
        if gradients and self.bias is not None:
            gradients[self.bias] = factor.bias_gradient()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def commit(self, _: Any = None) -> None:
        """Commit the factors of the running backward pass; called when the weight's gradient is due in it."""
        for factor in self._pending.pop(torch._C._current_graph_task_id(), ()):
            self.committed.append(factor)
            self._versions.append(factor.activations._version)

    def take(self) -> list[Factor]:
        """Return the committed factors, one per call, and clear them.

        Raises:
            RuntimeError: if the layer's input has been overwritten since backward.
        """
        factors, versions = self.committed, self._versions
        self.committed, self._versions, self._kept = [], [], 0
        for factor, version in zip(factors, versions, strict=True):
            if factor.activations._version != version:
                raise RuntimeError(
                    f"the input of layer {self.name!r} was changed in place after backward() and before its gradient "
                    "was synchronized: change a copy, or call synchronize() first"
                )
        return factors

    def clear(self) -> None:
        """Clear the committed factors."""
        self.committed, self._versions, self._kept = [], [], 0

    def peek(self) -> list[Factor]:
        """Return the committed factors without clearing them."""
        return list(self.committed)

    def keep_inputs(self, owned: Container[int] = ()) -> None:
        """Copy committed inputs that the user may overwrite, for example a buffer that a loader fills with every batch.

        Args:
            owned: addresses of memory that the user owns, in addition to that of inputs without a gradient.
        """
        for index in range(self._kept, len(self.committed)):
            factor = self.committed[index]
            if self.fed_by_data or factor.activations.untyped_storage().data_ptr() in owned:
                self.committed[index] = replace(factor, activations=factor.activations.clone())
                self._versions[index] = 0
        self._kept = len(self.committed)

    def copy_factors(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace the committed factors by copies.

        Args:
            copy: makes a copy of a tensor.
        """
        for index, factor in enumerate(self.committed):
            activations = copy(factor.activations)
            self.committed[index] = replace(factor, activations=activations, deltas=copy(factor.deltas))
            self._versions[index] = activations._version
        self._kept = len(self.committed)

    def release(self) -> None:
        """Restore the layer's own forward."""
        self._released = True
        self._hook.remove()
        self._pending.clear()
        self.clear()
        self._forward.restore()


def _is_data_leaf(inputs: Tensor) -> bool:
    """Return whether an input that requires a gradient is the result of no operation, as data with `requires_grad_()`.

    What reentrant checkpointing detaches is one, too, but while backward runs.
    """
    return inputs.is_leaf and not isinstance(inputs, nn.Parameter) and torch._C._current_graph_task_id() == -1


class _CapturedForward(ForwardOverride):
    """Forward of a captured layer."""

    def __init__(self, layer: CapturedLayer) -> None:
        super().__init__(layer.module)
        self._layer = layer
        self._replaced = type(layer.module).forward
        self._input = list(signature(self._replaced).parameters)[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        exported = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None  # `being_exported`
        plain = exported or type(self.module).forward is not self._replaced  # by a program since
        return self.plain(*args, **kwargs) if plain else self._captured(*args, **kwargs)

    @eager
    def _captured(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output, and capture the factors, where that is possible.

        It is not, and autograd computes the gradients, where `torch.func.functional_call` or a change of the model
        has put other tensors in the place of weight and bias, where they have hooks of the user's, which have to see
        a gradient, inside transforms of `torch.func`, in forward-mode differentiation, and while the model is exported.
        """
        layer, parameters = self._layer, self.module._parameters
        weight, bias, family = layer.weight, layer._bias, layer.family
        inputs: Any = args[0] if args else kwargs.get(self._input)
        captures = (
            torch.is_grad_enabled()
            and weight.requires_grad
            and parameters.get(family.weight) is weight
            and parameters.get(family.bias) is bias
            and torch._C._functorch.peek_interpreter_stack() is None
            and forward_ad._current_level < 0
            and (layer.weight_gradients or not has_user_hooks(weight, bias))
        )
        if not captures:
            return self.plain(*args, **kwargs)
        ordinary = type(inputs) is Tensor and inputs.layout is torch.strided and not inputs.is_nested
        if not (ordinary or is_dense(inputs)):
            kind = "nested" if getattr(inputs, "is_nested", False) else getattr(inputs, "layout", "no tensor")
            layer.left_out = f"its input is not a dense tensor ({kind}, {type(inputs).__name__})"
            return self.plain(*args, **kwargs)
        layer.fed_by_data |= not inputs.requires_grad or _is_data_leaf(inputs)
        thread, before = products.thread, products.thread.fastest
        thread.fastest = before or layer.fastest
        try:
            if layer.tracer is not None:
                return layer.tracer.call(layer, inputs, partial(self._traced, inputs, args, kwargs))
            record = layer.record if layer.wrap_recorder is None else layer.wrap_recorder(layer, inputs, layer.record)
            return family.forward_untraced(self.module, record, layer.weight_gradients, *args, **kwargs)
        finally:
            thread.fastest = before

    def _traced(self, inputs: Tensor, args: Any, kwargs: dict[str, Any], record: Recorder) -> Tensor:
        layer = self._layer
        record = record if layer.wrap_recorder is None else layer.wrap_recorder(layer, inputs, record)
        return layer.family.forward(self.module, record, layer.weight_gradients, *args, **kwargs)


class LayerCapture:
    """Capture of the factors of a model's layers; usable by itself in any training loop.

    Args:
        model: model whose layers with a registered family are captured, see `dadplug.hooks.register_family`.
        names: names of the layers to capture, as in `named_modules`; by default all layers that can be captured.
        weight_gradients: whether to compute ``.grad`` of captured weights and biases as well. If False, the matrix
            product that forms them does not run, and only the factors are available.
        trace_chains: whether factors of fully connected layers have a `dadplug.hooks.Trace` of the layer's output.
        fastest: whether linear layers may compute by a faster library than autograd's, whose rounding differs, see
            `dadplug.hooks.products`.

    Attributes:
        layers: the captured layers by name.
        tracer: tracer of chains; None without `trace_chains`.

    Raises:
        ValueError: if a name in `names` is not a layer of the model that can be captured.

    Example:
        >>> with LayerCapture(model) as capture:
        ...     criterion(model(inputs), targets).backward()
        ...     factor = capture.factors["fc1"]
        >>> factor.activations.shape, factor.deltas.shape
        (torch.Size([16, 784]), torch.Size([16, 2048]))
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str] | None = None,
        *,
        weight_gradients: bool = True,
        trace_chains: bool = False,
        fastest: bool = False,
    ) -> None:
        capturable = capturable_layers(model)
        wanted = list(capturable) if names is None else list(names)
        for name in wanted:
            if name not in capturable:
                raise ValueError(f"no layer named {name!r} can be captured; those that can: {', '.join(capturable)}")
        self.tracer: ChainTracer | None = None
        if trace_chains:
            from .chain import ChainTracer  # which one method needs

            self.tracer = ChainTracer(model)
        self.layers: dict[str, CapturedLayer] = {}
        faster = fastest and products.has_faster_kernels()
        for name in wanted:
            module = capturable[name]
            family = family_of(module)
            assert family is not None
            self.layers[name] = CapturedLayer(name, module, family, weight_gradients, self.tracer, faster)

    @property
    def factors(self) -> dict[str, Factor]:
        """Factors since the last `clear` by layer name, rows of repeated calls stacked; only layers that have some."""
        factors = {}
        for name, layer in self.layers.items():
            stacked = stack_by_form(layer.peek())
            if len(stacked) > 1:  # a convolution of inputs of several sizes
                stacked = [Factor.stack([factor.matrix(layer.weight.shape) for factor in stacked])]
            if stacked:
                factors[name] = stacked[0]
        return factors

    def clear(self) -> None:
        """Clear the factors, as ``zero_grad`` clears gradients."""
        for layer in self.layers.values():
            layer.clear()

    def release(self, name: str) -> None:
        """Stop capturing one layer.

        Args:
            name: name of the layer, a key of `layers`.
        """
        self.layers.pop(name).release()

    def detach(self) -> None:
        """Stop capturing and restore the forward of every layer; may be called twice."""
        for name in list(self.layers):
            self.release(name)
        if self.tracer is not None:
            self.tracer.stop_naming()

    def __enter__(self) -> LayerCapture:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()
