"""What code outside an engine reads of its weights: their values, or an error; never a placeholder.

[Note: guarded parameters] Between the calls of an engine some parameters do not hold their weight: it is sharded, held
in FP8, or the FP32 master of a 16-bit compute weight. These parameters then have a subclass of their class, through
which torch passes every operation on them (``__torch_function__``). So every way to a value is covered: an attribute
of a module, ``parameters()``, ``state_dict``, a reference kept from before, a copy, a file. While a method of the
engine or a forward of its model runs, they have their own class, so that operations on them cost nothing more. In a
backward, whoever runs it, operations take a parameter as it is.

Shape, dtype, device, gradient and hooks are no values, and may always be asked. A value is an error by name, or, if
the engine shows its masters (``ParameterReads.show_masters``), read from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.errors import UsageError
from dtrain.parameters.running_backward import is_in_backward

_OWN = frozenset(
    """device is_cuda is_cpu is_meta get_device requires_grad requires_grad= requires_grad_ grad grad= grad_dtype
    grad_dtype= grad_fn is_leaf _version register_hook register_post_accumulate_grad_hook retain_grad retains_grad
    _backward_hooks _backward_hooks= _post_accumulate_grad_hooks _post_accumulate_grad_hooks= _grad _grad= output_nr
    data= __hash__ __dir__ _base _is_view is_inference is_ipu is_maia is_mps is_mtia is_vulkan is_xla is_xpu is_pinned
    is_shared is_distributed name name= names names= has_names volatile _cdata _grad_fn _python_dispatch
    _has_symbolic_sizes_strides __dlpack_device__ __sizeof__""".split()  # noqa: SIM905 - words are easier to read
)
"""What is asked of the parameter as it is."""
_SHAPE = frozenset(
    """shape size dim ndim ndimension numel nelement dtype element_size itemsize nbytes layout is_sparse is_sparse_csr
    is_sparse_csc is_coalesced sparse_dim dense_dim is_quantized is_mkldnn is_nested is_floating_point is_complex
    is_signed is_conj is_neg _is_zerotensor __len__ result_type is_same_size empty_like zeros_like ones_like
    full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full new_tensor
    new_empty_strided""".split()  # noqa: SIM905
)
"""What follows from shape and dtype."""
_STRIDES = frozenset({"stride", "is_contiguous", "storage_offset", "dim_order"})
_BYTES = frozenset({"untyped_storage", "storage", "_typed_storage", "data_ptr", "numpy", "__array__", "__dlpack__"})
_BYTES |= {"tolist", "__reduce_ex__"}
"""What would give the shard of a ``DTensor`` for the weight; torch's operations on it know that it is sharded."""


class GuardedParameter:
    """What the class of a guarded parameter adds to its own: see [Note: guarded parameters].

    Attributes:
        reads: of the engine; None once that is gone.
        gives_masters: whether values are read from the masters.
    """

    __slots__ = ()
    reads: Callable[[], ParameterReads | None]
    gives_masters: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation = _name(func)
        if operation in _OWN or is_in_backward():
            return _as_it_is(func, args, kwargs or {})
        if operation == "data":  # so that a write through it counts as one of the weight
            func = Tensor.detach
        answers: dict[int, Any] = {}  # by id of the parameter
        parameters: dict[int, Any] = {}  # by id of the answer

        def answer(value: Any) -> Any:
            if not isinstance(value, GuardedParameter):
                return value
            if id(value) not in answers:
                reads = value.reads()
                found = value if reads is None else reads.answer(value, operation, is_alone=len(args) == 1)
                answers[id(value)] = found
                parameters.setdefault(id(found), value)
            return answers[id(value)]

        args, kwargs = pytree.tree_map(answer, (args, dict(kwargs or {})))
        result = _as_it_is(func, args, kwargs)
        if func is Tensor.detach and isinstance(args[0], GuardedParameter) and (reads := args[0].reads()) is not None:
            result.__class__, result.weight_name = cls, reads.name_of(args[0])  # of a DTensor, as in a state_dict
        # `weight.to(device)` is the weight itself if it lies there, and so is what an operation in place returns
        return parameters.get(id(result), result)

    def __repr__(self: Any) -> str:
        reads = self.reads()
        if self.gives_masters or reads is None:
            return repr(self._copied("__repr__"))
        return f"Parameter '{reads.name_of(self)}' of {list(self.shape)}, {self.dtype}, whose values the engine holds"

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._copied("__deepcopy__")
        return memo[id(self)]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return self._copied("__reduce_ex__").__reduce_ex__(protocol)

    def _copied(self: Any, operation: str) -> nn.Parameter:
        """Returns an ordinary parameter of its own that has the values."""
        reads = self.reads()
        values = self if reads is None else reads.answer(self, operation, is_alone=True)
        return nn.Parameter(_as_it_is(Tensor.detach, (values,), {}).clone(), requires_grad=self.requires_grad)


_Gather = Callable[[Collection[str]], Mapping[str, Tensor] | None]


class States(Protocol):
    """What the guard needs of ``dtrain.parameters.model_states.ModelStates``."""

    module: nn.Module
    engine: str
    zero_stage: int
    shapes: dict[str, tuple[int, ...]]

    @property
    def parameters(self) -> dict[str, nn.Parameter]: ...

    def unreachable_parameters(self) -> Collection[str]: ...

    def unsharded_parameters(self) -> dict[str, nn.Parameter]: ...


class ParameterReads:
    """Guards the parameters of one engine between its calls; its methods enter it as a context manager.

    Args:
        states: of the engine, before its library replaces parameters.

    Attributes:
        open_names: parameters that hold whole masters now, to be read and written as they are.
    """

    def __init__(self, states: States) -> None:
        # weak references here and in the classes, so that a dropped model is freed at once
        self._states = weakref.ref(states)
        self._shapes = {name: p.shape for name, p in states.module.named_parameters()}
        self.open_names: Collection[str] = ()
        self._gather: _Gather | None = None
        self._parameters: dict[str, nn.Parameter] = {}  # that are guarded between calls
        self._classes: list[tuple[str, Any, type, type]] = []  # of these by name: own, guarded
        self._guarded: list[tuple[str, Any, type, type]] = []  # now
        self._made: dict[type, type] = {}
        self._names: dict[int, str] = {}
        self._stand_ins: dict[str, Tensor] = {}  # of a weight's shape, dtype and device, with memory of one element
        self._masters: dict[str, tuple[Tensor, int]] = {}  # that were read since the last call, with their versions
        self._depth = 0

    # -- when ------------------------------------------------------------------------------------------------------

    @property
    def is_entered(self) -> bool:
        """Whether the engine is at work."""
        return self._depth > 0

    @property
    def gives_masters(self) -> bool:
        """Whether values are read from the masters."""
        return self._gather is not None

    @property
    def is_needed(self) -> bool:
        """Whether any parameter is guarded between calls."""
        return bool(self._parameters)

    def begin(self, gather: _Gather | None = None) -> None:
        """Guards parameters between calls from now on, once all states are complete.

        Args:
            gather: returns copies of the weights of those names, whole, which answer reads of values, or None if the
                engine is gone; all ranks call it together. None: such reads are errors.
        """
        states = self._states()
        assert states is not None
        self._release()
        self._gather = gather
        self._made, self._names, self._parameters = {}, {}, {}
        every, elsewhere = states.parameters, states.unreachable_parameters()
        found = {name for name, p in every.items() if name in elsewhere or hasattr(p, "device_mesh")}
        if gather is not None and (found or any(every[name].dtype != torch.float32 for name in states.shapes)):
            found |= states.shapes.keys()
        for name, p in every.items():
            if name in found:
                self._parameters[name] = p
                has_master = gather is not None and name in states.shapes
                one = torch.full((), torch.nan, dtype=torch.float32 if has_master else p.dtype, device=p.device)
                self._stand_ins[name] = one.expand(self._shapes[name])
        self._classes = [self._named(name, p) for name, p in self._parameters.items()]
        self._guard()

    def end(self) -> None:
        """Guards nothing any more."""
        self._release()
        self._parameters, self._classes = {}, []

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1 and self._parameters:
            self._release()
            try:
                self._take_writes()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        self._depth = max(self._depth - 1, 0)  # 0 if another hook failed before the forward began
        if not self._depth and self._parameters:
            self._guard()

    def _guard(self) -> None:
        if self._guarded:  # inside a guard that a failed forward left
            return
        self._guarded = self._classes
        if self.open_names:
            self._guarded = [one for one in self._guarded if one[0] not in self.open_names]
        states = self._states()
        if self._gather is not None and states is not None and (unsharded := states.unsharded_parameters()):
            self._guarded = [*self._guarded, *(self._named(name, p) for name, p in unsharded.items())]
        for _, parameter, _, guarded in self._guarded:
            parameter.__class__ = guarded

    def _release(self) -> None:
        for _, parameter, own, _ in self._guarded:
            parameter.__class__ = own
        self._guarded = []

    def _named(self, name: str, parameter: Any) -> tuple[str, Any, type, type]:
        """Returns the parameter, its own class and the guarded one."""
        own = type(parameter)
        if own not in self._made:
            fields = {"__slots__": (), "reads": weakref.ref(self), "gives_masters": self.gives_masters}
            self._made[own] = type(own.__name__, (GuardedParameter, own), fields)
        self._names[id(parameter)] = name
        return name, parameter, own, self._made[own]

    def _take_writes(self) -> None:
        """Writes to the parameters what was written to the masters that were read; then drops these.

        Raises:
            UsageError: a parameter cannot hold its weight.
        """
        masters, self._masters = self._masters, {}
        written = [name for name, (values, version) in masters.items() if values._version != version]
        states = self._states()
        if not written or states is None:
            return
        lost = {
            *states.unreachable_parameters(),
            *(n for n, p in self._parameters.items() if hasattr(p, "device_mesh")),
        }
        if lost_names := [name for name in written if name in lost]:
            raise lost_write(states, lost_names)
        with torch.no_grad():  # noticed as any write: [Note: written weights]
            for name in written:
                self._parameters[name].copy_(masters[name][0])

    # -- what ------------------------------------------------------------------------------------------------------

    def name_of(self, parameter: Any) -> str:
        """Returns the name of a guarded parameter."""
        return getattr(parameter, "weight_name", None) or self._names[id(parameter)]

    def answer(self, parameter: Any, operation: str, *, is_alone: bool) -> Any:
        """Returns what ``operation`` is to work on in the place of ``parameter``, its only argument or not.

        Raises:
            UsageError: it needs values, and none are gathered.
        """
        name = self.name_of(parameter)
        is_shown = self._gather is not None
        if not is_shown and hasattr(parameter, "device_mesh"):
            return self._refuse(name) if operation in _BYTES else parameter
        if operation in _SHAPE or (operation == "type" and is_alone):
            return self._stand_ins[name]
        if operation in _STRIDES:
            return torch.empty_like(self._stand_ins[name], device="meta")
        if not is_shown:
            self._refuse(name)
        master = self._master(name)
        if torch.is_grad_enabled() and parameter.requires_grad:
            return _as_it_is(_ReadMaster.apply, (parameter, master), {})
        return master

    def _refuse(self, name: str) -> NoReturn:
        states = self._states()
        place = "" if states is None else f" (engine={states.engine}, zero_stage={states.zero_stage})"
        raise UsageError(
            f"'{name}' is read outside a forward of the engine, which holds its values elsewhere meanwhile{place}; "
            f"compute what needs it inside the model's forward, generate with `with engine.full_model():`, take "
            f"engine.master_state(), which gives all weights in full, or write inside `with engine.modify_weights():`"
        )

    def _master(self, name: str) -> Tensor:
        if not self._masters:
            assert self._gather is not None
            with torch.inference_mode(False), torch.no_grad():  # later operations need version counters
                gathered = self._gather(self._parameters.keys())
            if gathered is None:
                raise UsageError(
                    f"'{name}' is read, but the engine of the model is gone, and the FP32 masters with it; keep a "
                    f"reference to the engine, or take engine.master_state() before"
                )
            self._masters = {key: (values, values._version) for key, values in gathered.items()}
        return self._masters[name][0]


def lost_write(states: States, names: Sequence[str], kept: Sequence[str] = ()) -> UsageError:
    """Returns the error of writes to the parameters ``names``; those to ``kept`` are not lost."""
    others = f"; other writes are kept ({len(kept)}, such as '{kept[0]}')" if kept else ""
    return UsageError(
        f"parameter '{names[0]}' was written to while engine={states.engine} at zero_stage={states.zero_stage} holds "
        f"its weight elsewhere, so the write is lost (written so: {len(names)}){others}; write weights inside `with "
        f"engine.modify_weights():`, or load a checkpoint with engine.load"
    )


class _ReadMaster(torch.autograd.Function):
    """Gives the master; its gradient is that of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, master: Tensor) -> Tensor:
        return master.view_as(master)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _as_it_is(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls ``func`` without passing through a guard."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    """Returns the name of an operation; of an attribute's assignment with ``=`` at its end."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        attribute = getattr(func.__self__, "__name__", "")
        return attribute if func.__name__ == "__get__" else f"{attribute}="
    return str(func.__name__)
