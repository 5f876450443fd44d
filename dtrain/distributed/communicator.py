"""The interface of the collectives; a transport implements it, and nothing else in dtrain communicates.

Every collective goes through a ``Communicator``, which is passed as an argument. Each call is folded into a
rolling hash of the order of collectives, in the ``CollectiveSchedule``. The vote compares that hash across ranks,
because gloo returns wrong sums silently if two ranks issue equally shaped collectives in a different order. Sums are
FP32 always.

There are four transports, and ``dtrain.distributed.transport.choose.make_communicator`` chooses: ``SingleRank``,
``ProcessGroup`` (NCCL), ``GlooGroup`` (CPU ranks, through sockets) and ``HostMemory`` (CPU ranks of one host, which
read each other's buffers). What a transport needs - rings, messages, alignment, a process group - stays inside it. A
collective returns a handle; what follows it is written where the handle is waited for.

[Note: buffer reuse] A buffer that other ranks may read, one from ``Communicator.allocate``, may be written again
only after all of them have read it. No rank waits for that explicitly; it follows from the order of events:

- Compute replicas, masters that serve as replicas, and unsharded main grads are read during the ``wait`` of a
  collective. Every rank has left its waits before it votes, and these buffers are written only after the vote, which no
  rank leaves before all have joined it. So a collective on such a buffer must be waited for before the next vote, even
  if no rank needs its result. Shards are published after they are written, and read in waits until the next vote.
- Sharded main grads are written in each micro-batch, and other replicas read them from the sum that is started after
  the last addition until the waits that end the step's reductions.
- In ``reduce_scatter_sum(gathers=True)`` the owner writes its sum into the same range of every rank's buffer. No other
  rank reads or writes that range until the all-gather that follows has been waited for.
- A load writes masters, and the replicas after them. It agrees on a checkpoint first, which has the same effect.
- Unreduced gradients are written several times between two votes. A ``GradientExchange`` hands out their buffers
  and follows [Note: ring buffer reuse] in ``distributed.transport.ring``.

[Note: streams] On a GPU a collective that returns a ``Handle`` runs on NCCL's own stream, any other (a broadcast,
``gather_rows``) on the current stream. The host waits for neither; an engine does all its work on the current stream.

- NCCL's stream begins a collective after all that was queued on the current stream when it was issued. So its output
  may be new memory whose last owner has freed it, while the kernels of that owner are still queued.
- ``Handle.wait`` makes the current stream wait for that one collective. What is queued later may read its result,
  write its input, and free both.
- Until the wait torch's handle holds input and output, so their memory is not reused even if all references here are
  dropped. No tensor needs ``record_stream``. (Before torch 2.8 this took ``TORCH_NCCL_AVOID_RECORD_STREAMS``.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed.schedule import CollectiveSchedule


class Handle(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Returns when the result may be read on the current stream; later calls return at once.

        From then on the handle keeps no tensor alive.

        Raises:
            CommunicationError: the collective failed.
        """


@dataclass(frozen=True)
class GradientSend:
    """One flat buffer's gradient of a micro-batch, as it is sent to the owners of its shards.

    Attributes:
        label: name in messages.
        numel: elements, a multiple of the number of ranks.
        dtype: during reduction.
        filled: (start, stop) of the elements that the sender overwrites each time; the others read as zero.
    """

    label: str
    numel: int
    dtype: torch.dtype
    filled: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class GradientHandle(Protocol):
    """A gradient in flight to the owners of its shards.

    Attributes:
        number: 0, 1, ... over all sends of the exchange.
    """

    number: int

    def wait(self) -> tuple[Sequence[Tensor], Tensor]:
        """Returns this rank's shard of every rank's gradient, in rank order, and the ranks' weights [world_size] FP32.

        The shards are valid until ``release``.

        Raises:
            CommunicationError: the collective failed.
        """

    def release(self) -> None:
        """Ends the use of the shards; after ``wait``, and in the order of ``number``."""


class GradientExchange(Protocol):
    """The all-to-all of micro-batch gradients: its send buffers, their reuse, and the micro-batch's weight.

    The sends of a micro-batch start in the order of the exchange's list, on all ranks. A send is *finished* once its
    handle has been waited for and released.
    """

    @abstractmethod
    def begin(self, weight: Tensor) -> None:
        """Begins a micro-batch; ``weight``, FP32 0-dim on the device, is sent with its gradients."""

    def gap(self, index: int) -> int:
        """Returns the elements between the shards of send ``index`` in its buffer, which the exchange itself uses."""
        return 0

    @abstractmethod
    def open(self, index: int) -> Tensor:
        """Returns a buffer [numel + world_size * gap] for the next gradient of send ``index``, zero outside ``filled``.

        It neither waits nor communicates, so ranks may open in different orders.
        """

    @abstractmethod
    def finish_first(self) -> int:
        """Returns the number of the send that must be finished before the next one starts; negative: none.

        It depends on the sends alone, so all ranks wait for the same ones.
        """

    @abstractmethod
    def send(self, index: int) -> GradientHandle:
        """Starts the all-to-all of what was opened."""

    @abstractmethod
    def idle(self) -> list[Tensor]:
        """Returns the memory that is not in use: between steps, all of it."""

    @abstractmethod
    def max_nbytes(self) -> int:
        """Returns the most bytes of gradients that it holds at a time, by the sizes of the sends alone."""


class Communicator(Protocol):
    """Collectives over the ranks of one process group, or over a single rank.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        device: where the tensors of the collectives live.
        schedule: order of the collectives, also those over other axes of the mesh.
        process_group: for libraries that communicate themselves; None for a single rank.
    """

    rank: int
    world_size: int
    device: torch.device
    schedule: CollectiveSchedule
    process_group: dist.ProcessGroup | None

    @property
    def device_is_host(self) -> bool:
        """Whether the memory of the device is that of the host."""
        return self.device.type == "cpu"

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros [numel] that other ranks may read in place: [Note: buffer reuse].

        All ranks call in the same order. The memory lives as long as this object.
        """

    @abstractmethod
    def all_gather(self, output: Tensor, shard: Tensor, *, label: str) -> Handle:
        """Starts the all-gather of ``shard`` [n] into ``output`` [world_size * n], in rank order.

        ``shard`` may be this rank's slice of ``output``.
        """

    def publish(self, shards: Sequence[Tensor]) -> None:
        """Declares that ``shards``, from ``allocate``, keep their bytes until the next vote; all ranks call.

        Until then other ranks may read them at any time, so their all-gathers need not announce them again. Each call
        replaces the shards of the last one.
        """
        return

    @abstractmethod
    def reduce_scatter_sum(
        self, output: Tensor, flat: Tensor, *, label: str, dtype: torch.dtype = torch.float32, gathers: bool = False
    ) -> Handle:
        """Starts the sum of ``flat`` [world_size * n] over the ranks; ``output`` [n] is this rank's shard. Both FP32.

        ``output`` may be this rank's slice of ``flat``, because no other rank reads that slice.

        Args:
            output, flat: see above.
            label: name in messages.
            dtype: to which each rank's part is rounded before it is sent; sums are FP32.
            gathers: whether ``output`` is a slice of ``flat``, and the next collective on both is their all-gather. A
                transport may write the sum to all ranks at once, so none may use its ``flat`` before that has ended.
        """

    @abstractmethod
    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        *,
        total: int,
        label: str,
    ) -> Handle:
        """Starts sending consecutive parts of ``input`` to the ranks; ``output`` gets a part of each, in rank order.

        Both are 1-D, of one dtype, and share no memory. If ``input`` is from ``allocate`` on every rank, the others
        read it in place: [Note: buffer reuse].

        Args:
            output, input: see above.
            output_sizes: elements that each rank sends to this one.
            input_sizes: elements that this rank sends to each; any may be 0.
            total: elements that all ranks send; it is recorded, because the sizes differ between the ranks.
            label: name in messages.
        """

    @abstractmethod
    def all_reduce_max(self, tensor: Tensor, *, label: str) -> Handle:
        """Starts the maximum of each element of ``tensor`` over the ranks, in place.

        No element may be NaN: a backend may drop it.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, src: int = 0, label: str) -> None:
        """Overwrites ``tensor`` (contiguous, any dtype) on every rank with that of rank ``src``."""

    @abstractmethod
    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        """Returns [world_size, n]: the 1-D ``row`` of every rank; for small records. A single rank's is a view.

        gloo blocks until the rows have arrived, NCCL only until the collective is queued on the current stream.
        """

    @abstractmethod
    def exchange_text(self, text: str) -> list[str]:
        """Returns the text of every rank, in rank order. The host waits for the device, except on a single rank."""

    def agree(self, op: str, label: str, tensor: Tensor) -> None:
        """Records a collective that a library issues next over ``process_group``; all ranks call.

        gloo returns when every rank has called it, so that the library's never meets another one; NCCL at once.
        """
        self.schedule.record(op, label, tensor)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        # read, because NCCL alone would not stop the host
        self.gather_rows(torch.zeros(1, dtype=torch.uint8, device=self.device), label="barrier").cpu()

    def flush(self) -> None:
        """Announces to the other ranks what is ready so far, without waiting; a transport may do so later otherwise.

        A wait flushes too; earlier is better if this rank computes before it waits. All ranks call this at the same
        point in the order of collectives.
        """
        return

    @abstractmethod
    def gradient_exchange(self, sends: Sequence[GradientSend], num_early: int) -> GradientExchange:
        """Returns the exchange of the gradients of a micro-batch; all ranks call in the same order.

        Args:
            sends: in the order in which they start.
            num_early: number of them, at the end, that are opened before the others are sent.
        """

    def foreign_nbytes(self) -> int:
        """Returns the resident bytes of other ranks' memory that this rank reads in place; they are theirs."""
        return 0

    @abstractmethod
    def split(self, shard_size: int) -> tuple[Communicator, Communicator]:
        """Returns communicators over the axes of ``dtrain.distributed.mesh.Mesh``; all ranks call.

        The first is over the ``shard_size`` consecutive ranks that include this one, the second over the ranks at the
        same place of each such block. ``shard_size`` divides the number of ranks, and is neither 1 nor all of them.
        """

    @abstractmethod
    def sibling(self) -> Communicator:
        """Returns a communicator of the same ranks for another thread, with a process group of its own; all ranks call.

        It always goes over gloo and takes CPU tensors; its time-out is this one's. A process group has one sibling, for
        one thread at a time. It is released with this one; its thread must have ended by then.

        Raises:
            CommunicationError: it could not be made, because a rank has died or hangs.
        """

    def release(self) -> None:
        """Drops the process group, whose threads end with the last reference to it; nothing may be in flight.

        A gloo thread that still holds a tensor when the interpreter ends aborts the process. Not to be called after a
        failure: the threads may wait for a rank that never answers.
        """
        return


def require_fp32(op: str, tensor: Tensor) -> None:
    """Raises ``TypeError`` unless ``tensor`` is FP32."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"{op} forms partial sums, so it takes float32 tensors; got {tensor.dtype}")


def recorded(dtype: torch.dtype, numel: int) -> Tensor:
    """Returns what stands in the schedule for ``numel`` elements that are in no memory of their own."""
    return torch.empty(numel, dtype=dtype, device="meta")


def byte_view(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` as it is sent: FP8 as uint8, because not every backend knows every FP8 format."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
