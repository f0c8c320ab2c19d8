"""Which part of a tensor a rank holds, and how parts and wholes are made of each other."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local_tensor(tensor: Tensor) -> Tensor:
    """Give the part that this rank holds, as a view of the same memory; all of it if the tensor is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """Give the rows [start, stop) along the first axis that this rank holds; a tensor without axes has one row."""
    num_rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, num_rows
    start, stop = 0, num_rows
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    for index, (size, placement) in enumerate(zip(tensor.device_mesh.shape, tensor.placements, strict=True)):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "policies are sharded along the first axis"
            chunk = -(-(stop - start) // size)  # as `torch.chunk` cuts: the last parts may be short or empty
            begin = min(start + coordinate[index] * chunk, stop)
            start, stop = begin, min(begin + chunk, stop)
    return start, stop


def is_first_holder(tensor: Tensor, rank: int) -> bool:
    """Whether this rank, of those that hold the very same rows, is the one that hands them over."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    return all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if not isinstance(placement, Shard)
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Give the whole tensor; all ranks must ask together. Unsharded tensors are given back as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Parts that were moved to host memory cannot be sent from there.
    on_device = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(on_device, DTensor), "of the same kind"
    return on_device.full_tensor()


def with_rows(rows: Tensor, like: DTensor) -> DTensor:
    """Take this rank's rows for its part of a tensor that is sharded as `like` is, of the same shape."""
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """Copy the rows that this rank holds of `like` from a whole tensor, to the device of `like`.

    A tensor of another shape, or for one that is not sharded, is given back as it is.
    """
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    start, stop = local_rows(like)
    return with_rows(whole[start:stop].to(local_tensor(like).device, copy=True), like)
