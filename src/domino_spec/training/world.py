"""The processes that train together: one by default, several under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from domino_spec.targets import Target


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.size == 1

    def sum(self, value: float) -> float:
        """The sum over all processes."""
        if self.alone:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def sum_tensors(self, tensor: Tensor) -> Tensor:
        """The same for a tensor, in place."""
        if not self.alone:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether any process says so: all then act alike."""
        return flag if self.alone else self.sum(float(flag)) > 0


@contextmanager
def open_world(device: torch.device) -> Iterator[World]:
    """Join the other processes if torchrun started us, and leave them at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        if started:
            dist.destroy_process_group()


def shard(objective: nn.Module, target: Target, world: World, *, dtype: torch.dtype) -> None:
    """Spread drafter, optimiser and the target's layers over all processes (FSDP2).

    The drafter is one group: its layers are used twice, for the context and for the blocks. The
    target's embedding and lm_head stay whole, since the drafter borrows them.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    half = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    fully_shard(objective, mesh=mesh, mp_policy=policy)
    for layer in target.layers:
        fully_shard(layer, mesh=mesh)


def whole(value: Any) -> Any:
    """A state with its sharded tensors gathered on the CPU; every process must call it."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().to("cpu", copy=True)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(item) for item in value)
    return value


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor in the form of a parameter: on its device, in its shards."""
    if isinstance(parameter, DTensor):
        moved = value.to(parameter.device_mesh.device_type)
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
