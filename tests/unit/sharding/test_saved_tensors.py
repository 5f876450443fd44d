"""What autograd saves of an unsharded replica: references, which survive that it is resharded; and storage reuse."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.sharding.saved_tensors import SavedTensorRef, SavedTensors
from dtrain.sharding.storage_pool import FlatTensor, StoragePool

CPU = torch.device("cpu")


def make_group(*copies: Tensor) -> Any:
    """Returns a group of one replica with these copies."""
    layout = SimpleNamespace(dtype=copies[0].dtype)
    return SimpleNamespace(replicas=[SimpleNamespace(layout=layout, flat=[FlatTensor(copy) for copy in copies])])


def test_a_view_is_found_again_in_other_memory() -> None:
    unsharded: list[Any] = []
    group, saved = make_group(torch.arange(24.0), torch.arange(24.0) + 100), SavedTensors(unsharded.append)
    saved.add(group)
    (replica,) = group.replicas
    first, second = (flat.tensor for flat in replica.flat)
    views = [
        first,
        first[4:16].view(3, 4).t(),
        first[4:16].view(3, 4)[:, 1:3].detach(),
        second[5],
        nn.Parameter(second[::2]),
    ]
    wanted = [(view.clone(), view.stride(), view.storage_offset()) for view in views]
    packed = [saved.pack(view) for view in views]
    assert all(isinstance(found, SavedTensorRef) and found.group is group for found in packed)
    del views
    saved.remove(group)  # resharded, then unsharded elsewhere
    replica.flat = [FlatTensor(flat.tensor.clone()) for flat in replica.flat]
    saved.add(group)
    for found, (values, stride, offset) in zip(packed, wanted, strict=True):
        got = saved.unpack(found)
        assert torch.equal(got, values)
        assert (got.stride(), got.storage_offset()) == (stride, offset)
        assert got.untyped_storage().data_ptr() in {flat.tensor.data_ptr() for flat in replica.flat}
        assert saved.unpack(found) is got, "made once"
    assert unsharded == [group] * 2 * len(packed)


class Marked(Tensor):
    """A subclass."""


def test_other_tensors_are_saved_as_they_are() -> None:
    flat = torch.arange(8.0)
    group, saved = make_group(flat), SavedTensors(lambda group: None)
    saved.add(group)
    others = [flat[:4].view(torch.int32), flat[:4].clone(), flat[:4].as_subclass(Marked)]
    packed = [saved.pack(tensor) for tensor in others]
    saved.remove(group)
    others.append(flat[:4])  # the address may be another tensor's by now
    packed.append(saved.pack(others[-1]))
    group.replicas[0].flat = [FlatTensor(torch.zeros(8))]
    for tensor, found in zip(others, packed, strict=True):
        assert not isinstance(found, SavedTensorRef)
        assert saved.unpack(found).data_ptr() == tensor.data_ptr()


def test_a_storage_is_reused_only_when_nobody_holds_it() -> None:
    pool = StoragePool(CPU)
    first = pool.take(100, torch.float32, CPU)
    address = first.tensor.data_ptr()
    (view,) = first.views((((2, 5), (5, 1), 10),))
    pool.give(first)
    assert pool.take(100, torch.int64, CPU).tensor.data_ptr() != address, "of another size"
    again = pool.take(100, torch.float32, CPU)
    assert again is first, "with its views"
    assert again.views((((2, 5), (5, 1), 10),))[0] is view
    pool.give(again)
    del first, again, view
    second = pool.take(200, torch.bfloat16, CPU)
    whole = second.tensor
    assert (whole.data_ptr(), whole.shape, whole.dtype) == (address, (200,), torch.bfloat16)
    kept = whole.fill_(1)[10:20].view(2, 5)
    pool.give(second)
    del second, whole
    third = pool.take(200, torch.bfloat16, CPU).tensor.zero_()
    assert third.data_ptr() != address
    assert bool((kept == 1).all())


def test_a_device_has_an_allocator_of_its_own() -> None:
    pool = StoragePool(torch.device("cuda", 0))
    flat = FlatTensor(torch.zeros(10))
    reference = weakref.ref(flat.tensor.untyped_storage())
    pool.give(flat)
    del flat
    assert reference() is None, "which would not know that this memory is free"
