"""Masters, optimizer states and main grads in the memory of the host, while the device computes (``offload=cpu``).

The method is ZeRO-Offload's (Ren et al., USENIX ATC 2021): gradients leave the device during backward, the update runs
on the CPU, and the compute replicas return.

[Note: offload] The device holds the compute replicas and the gradients in flight; nothing else of the model's states.

- Gradients are reduced on the device in every micro-batch, at each stage. The shard of a single rank goes to the host
  as backward left it, in the reduce dtype; that of several ranks as their FP32 sum. The host adds it to the main grad.
- A copy to the host runs on a stream of its own, behind what was queued on the current stream, so it overlaps with
  backward. Its source is not written before the host has waited for it: the exchange gets its buffer back then.
- Two copies are in flight. The host waits for the older one before it starts a third, so it is at most two groups ahead
  of the copies, and the memory for them does not grow with the model.
- A replica is cast into a staging buffer and copied from there on the current stream, so gathers and the next forward
  follow it without a wait of the host. Buffers take turns with two staging buffers; the host waits for the last copy
  from a staging buffer before it casts into it again. So one copy overlaps with the update of the next buffer.
- Only buffers that are copied are pinned. Masters, states and main grads are read and written by the host alone, and
  the allocator of pinned memory rounds sizes up to powers of two.
- The host waits for the device twice a step: for the last gradients, and for the decision of the vote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dtrain.config.engines import Native
from dtrain.distributed.communicator import Communicator, GradientHandle
from dtrain.distributed.logging import logger
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.micro_batch_weight import RankWeights
from dtrain.sharding.accumulate import RunningSum

HOST = torch.device("cpu")
_NUM_SLOTS = 2


class Copied(Protocol):
    """A copy in flight."""

    def wait(self) -> None:
        """Returns when the host may read what was copied to it, and write what was copied from it."""


class DeviceLink:
    """Copies between the memories of a device and of the host; without a GPU, in a plan, they are made at once.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None  # of copies to the host

    def host_bytes(self, nbytes: int) -> Tensor:
        """Returns uint8 [nbytes] in host memory that the device can copy from and to."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._on_gpu)

    def start_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copied:
        """Starts the copy of each (target, source) to the host, behind what is queued on the current stream."""
        if not self._on_gpu:
            return self._copy(pairs)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._copy(pairs)
        return self._event(self._stream)

    def start_to_device(self, target: Tensor, source: Tensor) -> Copied:
        """Starts a copy to the device; what is queued on the current stream later may read ``target``."""
        copied = self._copy([(target, source)])
        return self._event(torch.cuda.current_stream(self.device)) if self._on_gpu else copied

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copied:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        return _AtOnce()

    def _event(self, stream: Any) -> Copied:
        event: Any = torch.cuda.Event()
        event.record(stream)
        return _EventCopy(event)

    def on_host(self, scalars: UpdateScalars) -> UpdateScalars:
        """Returns ``scalars`` with its tensors on the host, which waits for them."""
        both = torch.stack((scalars.grad_divisor, scalars.found_inf))
        target = self.host_bytes(both.nbytes).view(both.dtype)
        self.start_to_host([(target, both)]).wait()
        return scalars.with_tensors(target[0], target[1])


class _AtOnce:
    def wait(self) -> None:
        pass


class _EventCopy:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


# -- gradients to the host ---------------------------------------------------------------------------------------------


class _Slot:
    """Buffers of one copy to the host; they grow to the largest shard.

    Args:
        link: to the device.

    Attributes:
        on_device: uint8, for the sum over several ranks; empty for a single one.
        on_host: uint8, pinned.
        weight: FP32 [1], pinned.
    """

    def __init__(self, link: DeviceLink) -> None:
        self._link = link
        self.on_device = torch.empty(0, dtype=torch.uint8, device=link.device)
        self.on_host = link.host_bytes(0)
        self.weight = link.host_bytes(4).view(torch.float32)

    def device_view(self, like: Tensor) -> Tensor:
        """Returns FP32 of the size of ``like``."""
        nbytes = 4 * like.numel()
        if self.on_device.numel() < nbytes:
            self.on_device = torch.empty(nbytes, dtype=torch.uint8, device=self._link.device)
        return self.on_device[:nbytes].view(torch.float32)

    def host_view(self, like: Tensor) -> Tensor:
        """Returns a tensor of the size and dtype of ``like``."""
        if self.on_host.numel() < like.nbytes:
            self.on_host = self._link.host_bytes(like.nbytes)
        return self.on_host[: like.nbytes].view(like.dtype)


@dataclass(frozen=True)
class _Arrival:
    """A shard on its way to the host.

    Attributes:
        gradient_sum: what it is added to.
        copied: its copy.
        values: where it arrives.
        weight: FP32 [1], by which the host multiplies it.
        is_last: whether it is the last of the step.
        kept: if the copy reads a gradient as the exchange gave it: the weights there, and the handle to be released.
    """

    gradient_sum: RunningSum
    copied: Copied
    values: Tensor
    weight: Tensor
    is_last: bool
    kept: tuple[Tensor, GradientHandle] | None


class GradientArrivals:
    """Brings reduced shards to the host and adds them there, in the order of the reductions: [Note: offload].

    Args:
        link: to the device.
    """

    def __init__(self, link: DeviceLink) -> None:
        self._link = link
        self._slots = [_Slot(link) for _ in range(_NUM_SLOTS)]
        self._num_started = 0
        self._in_flight: deque[_Arrival] = deque()

    @property
    def on_device(self) -> list[Tensor]:
        return [slot.on_device for slot in self._slots]

    @property
    def on_host(self) -> list[Tensor]:
        return [slot.on_host for slot in self._slots]

    def push(
        self, gradient_sum: RunningSum, handle: GradientHandle, shards: Sequence[Tensor], weights: Tensor, is_last: bool
    ) -> None:
        """Starts to add ``shards`` [n] of all ranks, which ``handle`` returned, times ``weights``; releases that.

        Args:
            gradient_sum: on the host; complete after ``collect``.
            handle, shards, weights: of one complete reduction.
            is_last: whether it is the last of the step.
        """
        if len(self._in_flight) == _NUM_SLOTS:
            self._collect_oldest()
        slot = self._slots[self._num_started % _NUM_SLOTS]
        self._num_started += 1
        if len(shards) == 1:  # the host multiplies: the product would be FP32, twice the bytes of BF16
            source = shards[0]
            values = slot.host_view(source)
            pairs, kept = [(values, source), (slot.weight, weights)], (weights, handle)
        else:
            source = slot.device_view(shards[0])
            values = slot.host_view(source)
            RunningSum(source).push(shards, RankWeights(weights))
            handle.release()
            slot.weight.fill_(1.0)
            pairs, kept = [(values, source)], None
        copied = self._link.start_to_host(pairs)
        self._in_flight.append(_Arrival(gradient_sum, copied, values, slot.weight, is_last, kept))

    def _collect_oldest(self) -> None:
        arrival = self._in_flight.popleft()
        arrival.copied.wait()
        arrival.gradient_sum.push([arrival.values], RankWeights(arrival.weight), is_last=arrival.is_last)
        if arrival.kept is not None:
            arrival.kept[1].release()

    def collect(self) -> None:
        """Waits for all copies, and adds what has arrived."""
        while self._in_flight:
            self._collect_oldest()


class HostSum(RunningSum):
    """Adds what arrives on the device to a main grad on the host.

    Args:
        main_grad: FP32 [n], on the host.
        arrivals: brings the gradients there.
    """

    def __init__(self, main_grad: Tensor, arrivals: GradientArrivals) -> None:
        super().__init__(main_grad)
        self._arrivals = arrivals

    def receive(self, handle: GradientHandle, *, is_last: bool) -> Tensor:
        shards, weights = handle.wait()
        self._arrivals.push(self, handle, shards, weights, is_last)
        return weights

    def finish(self) -> None:
        self._arrivals.collect()
        super().finish()


# -- replicas to the device --------------------------------------------------------------------------------------------


class ReplicaStaging:
    """A staging buffer on the host, which several replicas use one after the other: [Note: offload].

    Args:
        link: to the device.
        nbytes: of the largest replica.
    """

    def __init__(self, link: DeviceLink, nbytes: int) -> None:
        self._link = link
        self.buffer = link.host_bytes(nbytes)
        self._copied: Copied | None = None  # the last copy from it

    def view(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.buffer[: numel * dtype.itemsize].view(dtype)

    def begin(self) -> None:
        """Returns when the buffer may be written."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None

    def send(self, target: Tensor) -> None:
        """Starts the copy of the buffer's first elements into ``target``."""
        self._copied = self._link.start_to_device(target, self.view(target.numel(), target.dtype))


# -- both --------------------------------------------------------------------------------------------------------------


class Offload:
    """Transfers between a rank's device and its masters, states and main grads on the host: [Note: offload].

    Args:
        link: to the device.

    Attributes:
        arrivals: brings gradients to the host.
    """

    def __init__(self, link: DeviceLink) -> None:
        self.arrivals = GradientArrivals(link)
        self._link = link
        self._staging: list[ReplicaStaging] = []
        self._largest = 0  # elements of a replica's part on this rank

    def staging(self, replicas: Sequence[Tensor]) -> list[ReplicaStaging]:
        """Returns the staging buffer of each of ``replicas``, 1-D and in the order of the update; called once."""
        sizes = [replica.nbytes for replica in replicas]
        self._largest = max((replica.numel() for replica in replicas), default=0)
        self._staging = [ReplicaStaging(self._link, max(sizes[n::_NUM_SLOTS], default=0)) for n in range(_NUM_SLOTS)]
        return [self._staging[number % _NUM_SLOTS] for number in range(len(sizes))]

    def scalars(self, scalars: UpdateScalars) -> UpdateScalars:
        """Returns ``scalars`` with its tensors on the host, which waits for them."""
        return self._link.on_host(scalars)

    def max_device_nbytes(self, num_ranks: int) -> int:
        """Returns the most bytes of ``on_device``, which is allocated when it is first used."""
        return _NUM_SLOTS * 4 * self._largest if num_ranks > 1 else 0

    @property
    def on_device(self) -> list[Tensor]:
        """Buffers of copies on the device."""
        return self.arrivals.on_device

    @property
    def on_host(self) -> list[Tensor]:
        """Buffers of copies on the host, pinned."""
        return [*self.arrivals.on_host, *(staging.buffer for staging in self._staging)]


def offload_of(options: Native, comm: Communicator) -> Offload | None:
    """Returns what offloads the states of a model; None: they stay where its replicas are."""
    if options.offload == "none":
        return None
    if comm.device_is_host:
        logger.info("offload=cpu changes nothing here: the rank's device is a CPU, whose memory is the host's")
        return None
    threads = torch.get_num_threads()
    logger.info("offload=cpu: states on the host; they are updated by %d thread%s", threads, "s" if threads > 1 else "")
    return Offload(DeviceLink(comm.device))
