"""Examines each module in each format, from one FP32 forward and backward of each micro-batch.

Nothing is trained. Linears and convolutions are examined by their operands, product by product. Modules that compute
otherwise (activations, attention, a user's loss) run again in the format by themselves, as ``precision.rules`` would
run them. Norms, softmax and losses stay FP32 in every policy and are left out.

The predicted change of the loss is a first-order estimate, as in arXiv 2505.13060 (of a forward) and arXiv 2602.01410
(of gradients, by the update that they give):

- fprop and forward: |<dL/dy, y' - y>|, where y' is the result in the format.
- wgrad: what the error costs the next update, lr |<g, P (g' - g)>|, with AdamW's first preconditioner
  P = 1 / (|g| + 1e-8). A lost gradient counts with the whole decrease that it would have brought.
- dgrad: an estimate. The share of dx that is lost along dx, |<dx, dx' - dx>| / |dx|^2, times the decrease that one
  update of all products before the module brings: those whose gradients pass through dx, and some that do not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.precision import Float8, LossScale
from dtrain.engine.rng import keyed_rng
from dtrain.errors import ModelError
from dtrain.measure.probe.measures import Measure, Operand, add_to, count, energies, result
from dtrain.measure.probe.one_module import (
    FormatSwitch,
    Handovers,
    calls_modules,
    device_of,
    is_opaque,
    observe_handovers,
)
from dtrain.measure.probe.products import Operands, ProductCall, is_product
from dtrain.measure.probe.recording import (
    Call,
    Recording,
    floats_of,
    micro_batch_key,
    record,
    same_random_numbers,
    unchanged,
)
from dtrain.measure.probe.records import Analysis, ProductResult
from dtrain.precision.contract import resolve
from dtrain.precision.float8.options import Recipe
from dtrain.precision.forward import find_loss, set_matmul_precision
from dtrain.precision.histogram import Histogram
from dtrain.precision.loss_scale import fitting_scale
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.rules import fp32_class, is_compiled
from dtrain.train.setup import torch_settings_restored

FORMATS = ("tf32", "bf16", "fp16", "fp8")
"""Formats that can be examined."""

MicroBatch = Mapping[str, Any]
LossOf = Callable[[nn.Module, MicroBatch], Tensor]


def model_loss(model: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """Returns the loss that ``model`` itself returns.

    Raises:
        ModelError: it returns none.
    """
    loss = find_loss(model(**micro_batch))
    if loss is None:
        raise ModelError("the model returns no loss (a 0-dim tensor, or .loss); pass loss_of")
    return loss


@dataclass(frozen=True)
class ProbeSettings:
    """Settings for examining a model.

    Attributes:
        loss_of: runs the model on a micro-batch and returns its FP32 loss.
        seed: of dropout and other random numbers, which are the same in every forward of a micro-batch.
        lr: learning rate of the update in which errors of gradients are weighed.
        float8: options of FP8 products.
        fp16: context for computation in FP16 outside of products, such as an emulation where FP16 is slow.
        max_scale: largest loss scale at which FP16's gradients are examined.
    """

    loss_of: LossOf = model_loss
    seed: int = 0
    lr: float = 1e-3
    float8: Float8 = field(default_factory=Float8)
    fp16: Callable[[], AbstractContextManager[object]] = nullcontext
    max_scale: float = math.inf

    def handovers(self, model: nn.Module, micro_batch: MicroBatch) -> Handovers:
        """Returns what the modules hand each other in BF16 in the first micro-batch."""
        device = device_of(model)
        with keyed_rng(device, micro_batch_key(self.seed, 0)):
            return observe_handovers(model, lambda: self.loss_of(model, micro_batch), device)


def analyze(
    model: nn.Module, micro_batches: Sequence[MicroBatch], formats: Sequence[str], settings: ProbeSettings | None = None
) -> Analysis:
    """Examines every module of an FP32 model in every format of ``formats``; the model is as before afterwards.

    Args:
        model: on its device, in the mode in which it trains.
        micro_batches: keyword arguments of the model, one mapping for each micro-batch; at least one.
        formats: of ``FORMATS``; others (``fp32``) are left out. With ``fp8``, only Linears that
            ``precision=fp8`` puts into FP8 have results in it. The others compute in BF16 there, which is examined too.
    """
    wanted = {*formats, *(("bf16",) if "fp8" in formats else ())}
    with torch_settings_restored(), unchanged(model), torch.no_grad():
        set_matmul_precision(PrecisionPolicy.named("fp32"))  # the modes of the process may be those of a trial in TF32
        chosen = tuple(name for name in FORMATS if name in wanted)
        return _Analyzer(model, chosen, settings or ProbeSettings()).run(micro_batches)


_Key = tuple[str, str, str]  # module, product, format


class _Analyzer:
    def __init__(self, model: nn.Module, formats: tuple[str, ...], settings: ProbeSettings) -> None:
        self.model, self.formats, self.settings = model, formats, settings
        self.device = device_of(model)
        self.modules, self.unexamined = _examined(model)
        self.products = {name for name, module in self.modules.items() if is_product(module)}
        policy = PrecisionPolicy.named("fp8", float8=settings.float8).on(self.device)
        contract = resolve(policy, model)
        self.float8 = set(contract.float8_modules)
        self.recipe = contract.recipe or Recipe()
        self.blocks_float8 = {
            m.name: m.reason for m in contract.modules if m.name in self.products and m.format != "fp8"
        }
        self.largest_gradient = 0.0
        self.scale = 1.0
        self.switch = FormatSwitch(model, {}, settings.float8)
        self.measures: dict[_Key, list[Measure]] = defaultdict(list)
        self.at_scale_1: dict[_Key, list[Measure]] = defaultdict(list)
        self.gradients: dict[str, Histogram] = {}
        self.activation_gradients: dict[str, Histogram] = {}

    def run(self, micro_batches: Sequence[MicroBatch]) -> Analysis:
        if len(self.modules) > len(self.products):
            self._observe_handovers(micro_batches[0])
        for index, micro_batch in enumerate(micro_batches):
            recording = record(
                self.model,
                self.modules,
                lambda given=micro_batch: self.settings.loss_of(self.model, given),  # type: ignore[misc]
                self.device,
                micro_batch_key(self.settings.seed, index),
            )
            self._count_gradients(recording)
            self._examine(recording)
        return self._analysis()

    def _observe_handovers(self, micro_batch: MicroBatch) -> None:
        try:
            self.switch.handovers = self.settings.handovers(self.model, micro_batch)
        except Exception as error:  # of the user's model
            reason = f"the model fails in bf16: {_first_line(error)}"
            self.unexamined |= {name: reason for name in self.modules if name not in self.products}

    # -- the loss scale ---------------------------------------------------------------------------------------------

    def _count_gradients(self, recording: Recording) -> None:
        for name, gradient in recording.gradients.items():
            add_to(self.gradients, name, Histogram.of(gradient))
            self._see(gradient)
        for call in recording.calls:
            handed = self.switch.handovers.get(call.name)
            for index, dy in enumerate(call.gradients):
                if dy is None or not dy.dim():  # a loss is FP32
                    continue
                if call.name in self.products:
                    add_to(self.activation_gradients, call.name, Histogram.of(dy))
                    self._see(dy)
                elif handed and handed.outputs[index : index + 1] == (True,):
                    self._see(dy)
        self.scale = min(constant_scale(self.largest_gradient) or 1.0, self.settings.max_scale)

    def _see(self, gradient: Tensor) -> None:
        largest = float(gradient.abs().amax()) if gradient.numel() else 0.0
        if math.isfinite(largest):
            self.largest_gradient = max(self.largest_gradient, largest)

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def _examine(self, recording: Recording) -> None:
        found: dict[_Key, Measure] = {}
        at_scale_1: dict[_Key, Measure] = {}
        gain_before = 0.0  # of all products that were called before
        for call in recording.calls:
            if call.name in self.unexamined:
                continue
            if call.was_overwritten:
                self.unexamined[call.name] = "its input is changed in place after the call"
                continue
            if call.name not in self.products:
                self._run_again(call, found)
                continue
            product = ProductCall(self.modules[call.name], _operands(self.modules[call.name], call))
            for format_name in self.formats:
                if format_name == "fp8" and call.name not in self.float8:
                    continue
                scale = self.scale if format_name == "fp16" else 1.0
                _collect(found, call.name, format_name, product.measure(format_name, self.recipe, scale), gain_before)
                if scale != 1.0:
                    _collect(at_scale_1, call.name, format_name, product.measure(format_name, self.recipe), gain_before)
            gain_before += product.gain
        for key, measure in found.items():
            factor = 1.0 if key[1] in ("fprop", "forward") else self.settings.lr
            self.measures[key].append(replace(measure, change=measure.change * factor))
        for key, measure in at_scale_1.items():
            if key[1] != "fprop":
                self.at_scale_1[key].append(replace(measure, change=measure.change * self.settings.lr))

    def _run_again(self, call: Call, found: dict[_Key, Measure]) -> None:
        """Computes the module alone in BF16 and FP16; ``precision=fp8`` computes it in BF16."""
        bf16_noise = math.inf
        for format_name in ("bf16", "fp16"):
            if not {"fp16", format_name} & set(self.formats):  # BF16 also tells the cause of FP16's error
                continue
            try:
                measure = self._measured_again(call, format_name)
            except Exception as error:  # of the user's model
                self.unexamined[call.name] = f"it fails in {format_name}: {_first_line(error)}"
                return
            if format_name == "bf16":
                bf16_noise = measure.noise
            else:  # BF16 has three bits less, so a larger error than its own is one of range
                from_range = measure.noise > bf16_noise
                measure = replace(measure, unlimited_noise=0.0 if from_range else measure.noise)
            if format_name in self.formats:
                add_to(found, (call.name, "forward", format_name), measure)

    def _measured_again(self, call: Call, format_name: str) -> Measure:
        module = self.modules[call.name]
        inputs = floats_of((call.args, call.kwargs))
        slow = self.settings.fp16() if format_name == "fp16" else nullcontext()
        with self.switch.with_rounded_inputs(call.name, format_name):
            exact = self._outputs(module, call)
        with self.switch.in_format(call.name, format_name), slow:
            computed = self._outputs(module, call)
        total = Measure(Operand(), 0.0, 0.0, 0.0, 0.0)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[format_name]
        for x in inputs:
            total += Measure(count(x, x.to(dtype).to(x.dtype)), 0.0, 0.0, 0.0, 0.0)
        for reference, value, gradient in zip(exact, computed, call.gradients, strict=True):
            signal, noise, change = energies(reference.float(), value.float(), gradient)
            if math.isnan(signal):  # FP32 itself overflows
                continue
            total += Measure(count(reference, value), signal, noise, noise, change)
        return total

    def _outputs(self, module: nn.Module, call: Call) -> list[Tensor]:
        with same_random_numbers(self.device, call.random_state):
            return floats_of(module(*call.args, **call.kwargs))

    # -- all together -----------------------------------------------------------------------------------------------

    def _analysis(self) -> Analysis:
        order = {name: index for index, name in enumerate(self.modules)}

        def results(measures: Mapping[_Key, list[Measure]]) -> tuple[ProductResult, ...]:
            kept = [(key, values) for key, values in measures.items() if any(value.noise for value in values)]
            return tuple(result(*key, values) for key, values in sorted(kept, key=lambda item: order[item[0][0]]))

        has_scale = "fp16" in self.formats and self.largest_gradient > 0
        return Analysis(
            results(self.measures),
            self.gradients,
            self.activation_gradients,
            self.scale if has_scale else None,
            results(self.at_scale_1),
            self.unexamined,
            self.blocks_float8 if "fp8" in self.formats else {},
            {name: _inside(name, self.modules) for name in self.modules},
            {name: type(module).__name__ for name, module in self.modules.items()},
        )


def constant_scale(largest_gradient: float) -> float | None:
    """Returns the largest power of two with scale x gradient x 8 at most 65,504; None for a gradient of 0.

    The choice is that of the calibrated loss scale, whose limits a constant scale does not have.
    """
    if not largest_gradient:
        return None
    return fitting_scale(largest_gradient, LossScale("calibrated", min=2.0**-60, max=2.0**60))


def _examined(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Returns the modules to examine by name, and why others that compute cannot be."""
    examined: dict[str, nn.Module] = {}
    refused: dict[str, str] = {}
    outside = {
        child for m in model.modules() if fp32_class(m) or is_opaque(m) for child in m.modules() if child is not m
    }
    for name, module in model.named_modules():
        if module in outside or fp32_class(module) or type(module).forward is nn.Module.forward:
            continue
        if isinstance(module, (nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten)):
            continue
        if is_compiled(module):
            refused[name] = "it is compiled, and compiled code ignores hooks"
            continue
        examined[name] = module
    return examined, refused


def _operands(module: nn.Module, call: Call) -> Operands:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    x = call.args[0] if call.args else next(iter(call.kwargs.values()))
    detached = bias.detach() if isinstance(bias, Tensor) else None
    return Operands(x, weight.detach(), detached, call.gradients[0], call.needs_dx, weight.requires_grad)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _collect(
    found: dict[_Key, Measure], name: str, format_name: str, measures: Mapping[str, Measure], gain_before: float
) -> None:
    for product, measure in measures.items():
        if product == "dgrad":
            measure = replace(measure, change=measure.change * gain_before if gain_before else 0.0)
        add_to(found, (name, product, format_name), measure)


def _inside(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    if not calls_modules(modules[name]):
        return ()
    return tuple(other for other in modules if other != name and (not name or other.startswith(f"{name}.")))
