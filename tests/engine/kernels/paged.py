"""Slots' caches cut into pages that lie in another order, and joined again."""

import torch


def table_of(slots, count):
    """Where each slot's pages are put, [slots, count]."""
    order = torch.randperm(slots * count, generator=torch.Generator().manual_seed(0))
    return order.view(slots, count).int()


def cut(states, table):
    """[..., slots, heads, capacity, dim] as [..., pages, heads, tokens a page, dim]."""
    count = table.shape[1]
    pages = states.unflatten(-2, (count, -1)).movedim(-3, -4).flatten(-5, -4)
    found = torch.empty_like(pages)
    found[..., table.flatten().long(), :, :, :] = pages
    return found


def join(pages, table):
    """The slots again."""
    found = pages[..., table.flatten().long(), :, :, :].unflatten(-4, table.shape)
    return found.movedim(-4, -3).flatten(-3, -2)
