"""Autograd's traversal in Python, for tensors of a device that C++ has no threads for.

The nodes are C++'s own, with their formulas, saved-tensor hooks and hooks of accumulated gradients, in the order in
which C++ runs them: the latest node first, and a node that accumulates a gradient before all others.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_ACCUMULATE = "AccumulateGrad"

Hooks = dict[tuple[Any, int], list[Callable[[Tensor], Tensor | None]]]
"""Hooks of tensors, by the node that made the tensor (or accumulates its gradient) and the number of the output."""


class Autograd:
    """The traversal, and the hooks of tensors, which C++ would call before a node gets its gradients."""

    def __init__(self) -> None:
        self._hooks: Hooks = {}

    def register_hook(self, tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Stands in for ``Tensor.register_hook``."""
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        hooks = self._hooks.setdefault((edge.node, edge.output_nr), [])
        hooks.append(hook)
        return SimpleNamespace(remove=lambda: hooks.remove(hook))

    def _hooked(self, node: Any, slots: dict[int, Tensor]) -> dict[int, Tensor]:
        for number, grad in slots.items():
            for hook in self._hooks.get((node, number), ()):
                replacement = hook(grad)
                grad = grad if replacement is None else replacement
            slots[number] = grad
        return slots

    def run_backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], *_: Any, **__: Any) -> tuple[()]:
        """Stands in for the C++ engine of ``torch.autograd.backward``."""
        roots = [torch.autograd.graph.get_gradient_edge(output) for output in outputs]
        missing = _dependencies([edge.node for edge in roots])
        received: dict[Any, dict[int, Tensor]] = {}
        ready: list[tuple[int, int, Any]] = []
        order = count()

        def give(node: Any, number: int, grad: Tensor | None) -> None:
            if grad is not None:
                slots = received.setdefault(node, {})
                grad = _fitted(grad, node, number)
                slots[number] = slots[number] + grad if number in slots else grad

        def push(node: Any) -> None:
            first = -(1 << 62) if _is_accumulation(node) else -node._sequence_nr()
            heapq.heappush(ready, (first, next(order), node))

        with torch.no_grad():
            for edge, grad in zip(roots, grads, strict=True):
                give(edge.node, edge.output_nr, grad)
            for node in {edge.node for edge in roots if not missing[edge.node]}:
                push(node)
            while ready:
                node = heapq.heappop(ready)[-1]
                slots = self._hooked(node, received.pop(node, {}))
                results = _apply(node, slots) if slots else None
                for position, (following, number) in enumerate(node.next_functions):
                    if following is None:
                        continue
                    if results is not None:
                        give(following, number, results[position])
                    missing[following] -= 1
                    if not missing[following]:
                        push(following)
        return ()


def _dependencies(roots: Sequence[Any]) -> Counter[Any]:
    """Returns, for each node, the number of edges that lead to it."""
    missing: Counter[Any] = Counter()
    stack, seen = list(roots), set(roots)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None:
                continue
            missing[following] += 1
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return missing


def _is_accumulation(node: Any) -> bool:
    return bool(node.name().endswith(_ACCUMULATE))


def _apply(node: Any, slots: dict[int, Tensor]) -> Sequence[Tensor | None]:
    if _is_accumulation(node) and node.variable.grad is None and slots[0].stride() == node.variable.stride():
        # C++ takes a gradient that nobody else holds; here Python holds it, and the node itself would copy
        node.variable.grad = slots[0].detach()
        for hook in list((node.variable._post_accumulate_grad_hooks or {}).values()):
            hook(node.variable)
        return ()
    inputs = [slots.get(number) for number in range(len(node._input_metadata))]
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # for which C++ fills these in
        filled = [
            torch.zeros(data.shape, dtype=data.dtype, device=data.device) if grad is None else grad
            for grad, data in zip(inputs, node._input_metadata, strict=True)
        ]
        results = node.apply(*filled)
    else:
        results = node(*inputs)
    return results if isinstance(results, tuple) else (results,)


def _fitted(grad: Tensor, node: Any, number: int) -> Tensor:
    """Sums ``grad`` over what was broadcast, and casts it to the dtype of the tensor that it belongs to."""
    data = node._input_metadata[number]
    if tuple(grad.shape) != tuple(data.shape):
        grad = grad.sum_to_size(tuple(data.shape))
    return grad if grad.dtype == data.dtype else grad.to(data.dtype)
