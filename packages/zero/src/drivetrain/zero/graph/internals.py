"""The private parts of torch that compiling needs, all in one place.

`torch.compile` is public, and so is handing it a backend; what a backend does with AOTAutograd is not, and moves
between versions. So every import and every assumption about it is here, each checked where it is made. What does not
hold is an `UnsupportedGraphError`, which makes the caller go on without compiling.

What is assumed: a backend is given the parameters themselves among its example inputs; AOTAutograd keeps the order of
the inputs, takes fake tensors in their place, and names a value the same in the forward and in the backward graph.
"""

from __future__ import annotations

import operator
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import fx

Function = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Function]


class UnsupportedGraphError(RuntimeError):
    """A graph that this way of compiling cannot run; the text says why."""


def unsupported() -> str | None:
    """Why this torch cannot do it, or None if it can."""
    try:
        aot = _aot()
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} lacks what compiling stands on ({error})"
    return "torch.compile is switched off (TORCH_COMPILE_DISABLE)" if aot.switched_off else None


@dataclass(frozen=True)
class _Aot:
    """Private names, looked up when they are needed: importing them takes seconds."""

    lower: Function
    partition: Function
    config: Any
    boxed_codegen: type
    tracing_context: Any
    errors: tuple[type[Exception], ...]
    alias_kinds: frozenset[Any]
    switched_off: bool


def _private(module: str, name: str) -> Any:
    return getattr(import_module(f"torch.{module}"), name)


def _aot() -> _Aot:
    kinds = _private("_functorch._aot_autograd.schemas", "OutputType")
    return _Aot(
        lower=_private("_functorch.aot_autograd", "aot_module_simplified"),
        partition=_private("_functorch.partitioners", "default_partition"),
        config=import_module("torch._functorch.config"),
        boxed_codegen=_private("fx.graph", "_BoxedCodeGen"),
        tracing_context=_private("_guards", "TracingContext"),
        errors=(_private("_dynamo.exc", "TorchDynamoException"), _private("_dynamo.exc", "FailOnRecompileLimitHit")),
        alias_kinds=frozenset((kinds.alias_of_input, kinds.is_input)),
        switched_off=_private("_dynamo.config", "disable"),
    )


def compile_errors() -> tuple[type[Exception], ...]:
    """What a function that was compiled raises if it cannot be compiled, now or for new inputs."""
    return _aot().errors


def reason_of(error: Exception) -> str:
    """What the compiler complains of and where, without its advice to developers."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return (
            "torch.compile has made as many versions for different inputs as it is allowed to "
            "(torch._dynamo.config.recompile_limit); pad inputs to fewer shapes, or compile with dynamic=True"
        )
    inner = getattr(error, "inner_exception", error)
    if not str(inner).strip():
        frames = traceback.extract_tb(inner.__traceback__)
        return f"{type(inner).__name__} in {frames[-1].name}" if frames else type(inner).__name__
    lines = [line.strip().removeprefix("Explanation: ") for line in str(inner).splitlines() if line.strip()]
    told = " ".join(lines[:2])[:300]
    places = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error).rpartition("from user code")[2])
    return f"{told} (in {places[-1][2]}, {Path(places[-1][0]).name}:{places[-1][1]})" if places else told


def compile_whole(function: Function, backend: Function, *, dynamic: bool | None) -> Function:
    """``function`` as one graph, handed to ``backend``. Calling it raises one of `compile_errors` where it is none."""

    def whole(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    # Compiled code is cached, and the number of versions limited, by code object: each engine has its own.
    whole.__code__ = whole.__code__.replace(co_name=f"whole_{id(function)}")
    compiled: Function = torch.compile(whole, backend=backend, fullgraph=True, dynamic=dynamic)
    return compiled


def lower(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    parameters: Sequence[int],
    *,
    forward: Compiler,
    backward: Compiler,
    decompositions: dict[Any, Any] | None = None,
) -> Function:
    """Turn a captured graph into a forward and a backward graph of aten operations, and compile these.

    Args:
        module: the graph, as torch gives it to a backend.
        inputs: its example inputs.
        parameters: indices of inputs that are placeholders of parameters now. They are traced as what they will be when
            the graph reads them: whole and contiguous.
        forward, backward: compile a graph; the function that they return takes its inputs in a list and may empty it.
        decompositions: for operations that are to be traced as others.

    Raises:
        UnsupportedGraphError: the graph writes to a parameter in ``parameters``, or hands it out.
    """
    aot = _aot()
    context = aot.tracing_context.get()
    traced = list(inputs)
    with context.fake_mode:
        for index in parameters:
            given = inputs[index]
            traced[index] = torch.empty(
                given.shape, dtype=given.dtype, device=given.device, requires_grad=given.requires_grad
            )
    settings = {"donated_buffer": False, "force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
    graphs: list[str] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs.append("joint")
        _make_views_at_use(joint.graph)
        parts: tuple[fx.GraphModule, fx.GraphModule] = aot.partition(joint, inputs, **options)
        return parts

    def backward_now(module: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        graphs.append("backward")
        return backward(module, inputs)

    with aot.config.patch({name: value for name, value in settings.items() if hasattr(aot.config, name)}):
        lowered: Function = aot.lower(
            module,
            traced,
            fw_compiler=_boxed_compiler(forward),
            bw_compiler=_boxed_compiler(backward_now),
            inference_compiler=_boxed_compiler(forward),
            partition_fn=partition,
            decompositions=decompositions,
        )
    if graphs == ["joint"]:
        raise UnsupportedGraphError("this torch compiles the backward pass only when it comes")
    _check_access(context.fw_metadata, frozenset(parameters), aot)
    # At run time the setting is torch's default again, which takes None for "some are donated" and refuses to keep a
    # graph for a second backward pass.
    context.fw_metadata.bw_donated_idxs = []
    return lowered


def _boxed_compiler(compiler: Compiler) -> Compiler:
    def compile_boxed(module: fx.GraphModule, inputs: Sequence[Any]) -> Function:
        function = compiler(module, inputs)

        def run(args: list[Any]) -> Any:
            return function(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return torch.compiler.disable(run)  # type: ignore[no-any-return]

    return compile_boxed


def _check_access(metadata: Any, parameters: frozenset[int], aot: _Aot) -> None:
    for index in parameters:
        info = metadata.input_info[index]
        if info.mutates_data or info.mutates_metadata:
            raise UnsupportedGraphError("the forward pass writes to a parameter that is split over ranks")
    for output in metadata.output_info:
        if output.output_type in aot.alias_kinds and output.base_idx in parameters:
            raise UnsupportedGraphError(
                "the forward pass returns a parameter that is split over ranks, or a view of it; return a copy"
            )


def inductor_decompositions() -> dict[Any, Any]:
    """The operations that inductor wants traced as others."""
    table: dict[Any, Any] = _private("_inductor.decomposition", "select_decomp_table")()
    return table


def compile_with_inductor(module: fx.GraphModule, inputs: Sequence[Any]) -> Function:
    """A graph of aten operations, compiled; it takes its inputs in a list."""
    config, compile_fx_inner = (
        import_module("torch._inductor.config"),
        _private("_inductor.compile_fx", "compile_fx_inner"),
    )
    # The next piece takes results as they were traced, so no other strides may be chosen for them.
    output = next(iter(module.graph.find_nodes(op="output")))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    context = _aot().tracing_context.get()
    reported, context.output_strides = context.output_strides, None
    try:
        with config.patch(layout_optimization=False, keep_output_stride=True):
            compiled: Function = compile_fx_inner(module, list(inputs))
    finally:
        context.output_strides = reported
    return compiled


# views ----------------------------------------------------------------------------------------------------------------


def is_view(node: fx.Node) -> bool:
    """Whether the result of ``node`` may share memory with its inputs."""
    if node.op != "call_function":
        return False
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)  # who knows
    if target is torch.ops.aten._unsafe_view.default:  # says that it is none, for autograd's sake
        return True
    return any(result.alias_info is not None for result in target._schema.returns)


def _make_views_at_use(graph: fx.Graph) -> None:
    """Make parameters be handed to backward themselves and not as views of them.

    A view of a parameter that backward got from forward would be of memory that is let go in between. So each user of
    such a view makes it anew, from the parameter.
    """
    roots = {node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("primals")}
    views = set(roots)
    for node in list(graph.nodes):
        if node.op == "output" or node in roots:
            continue
        if is_view(node) and any(source in views for source in node.all_input_nodes):
            views.add(node)
            continue
        copies: dict[fx.Node, fx.Node] = {}
        for source in node.all_input_nodes:
            if source in views and source not in roots:
                with graph.inserting_before(node):
                    node.replace_input_with(source, _copy_chain(graph, source, node, roots, views, copies))


def _copy_chain(
    graph: fx.Graph,
    view: fx.Node,
    user: fx.Node,
    roots: set[fx.Node],
    views: set[fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> fx.Node:
    if view in roots or view not in views:
        return view
    if view not in copies:
        made = {source: _copy_chain(graph, source, user, roots, views, copies) for source in view.all_input_nodes}
        copies[view] = graph.node_copy(view, lambda source: made[source])
        # The partitioner goes by this: a view belongs to the pass of its user.
        for tag in ("partitioner_tag", "is_backward"):
            copies[view].meta.pop(tag, None)
            if tag in user.meta:
                copies[view].meta[tag] = user.meta[tag]
    return copies[view]


# running --------------------------------------------------------------------------------------------------------------


def boxed(module: fx.GraphModule) -> Function:
    """``module`` as a function of a list of inputs, which it empties, so that each is freed after its last use."""
    module.graph.set_codegen(_aot().boxed_codegen())
    module.recompile()
    function: Function = module.forward
    return function
