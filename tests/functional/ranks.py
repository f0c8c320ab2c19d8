"""Two ranks in one process."""

import torch


def on_two_ranks(loss_of_rank, reduce_groups):
    """Call `loss_of_rank(rank, reduction)` for ranks 0 and 1, the reduction being over the rows of both.

    The first calls only collect what each rank brings to the reduction.
    """
    brought = []

    def collect(values, group_index):
        brought.append((values, group_index))
        return torch.zeros_like(values)

    for rank in (0, 1):
        loss_of_rank(rank, collect)
    reduced = reduce_groups(*(torch.cat(parts) for parts in zip(*brought, strict=True)))
    parts = reduced.split([len(values) for values, _ in brought])
    return [loss_of_rank(rank, lambda values, group_index, part=parts[rank]: part) for rank in (0, 1)]
