"""``deepspeed.accelerator``: the device that there is, by DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import psutil
import torch


class Accelerator:
    """Forwards to ``torch.cuda`` where there is one, else to ``torch.cpu``."""

    def device_name(self, device_index: int | None = None) -> str:
        """Returns ``"cuda"`` or ``"cpu"``, with the number if one is given."""
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        """Returns the name of the current device."""
        return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"

    def device(self, device_index: int | None = None) -> Any:
        """Returns a context in which the device is the current one, or the device."""
        if torch.cuda.is_available() and device_index is not None:
            return torch.cuda.device(device_index)
        return torch.device(self.current_device_name())

    def set_device(self, device_index: int) -> None:
        """Makes a device the current one."""
        if torch.cuda.is_available():
            torch.cuda.set_device(device_index)

    def communication_backend_name(self) -> str:
        """Returns ``"nccl"`` or ``"gloo"``."""
        return "nccl" if torch.cuda.is_available() else "gloo"

    def is_available(self) -> bool:
        """Whether there is a device, which there is."""
        return True

    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 can be computed with."""
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether float16 can be computed with."""
        return True

    def random_seed(self) -> int:
        """Returns the seed."""
        return torch.initial_seed()

    initial_seed = random_seed

    def manual_seed(self, seed: int) -> None:
        """Seeds the devices."""
        torch.cuda.manual_seed_all(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """Gives torch's free device memory back."""
        torch.cuda.empty_cache()

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes that the device has; of host memory without one."""
        if torch.cuda.is_available():
            return int(torch.cuda.mem_get_info(device_index)[1])
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes that are free on the device; of host memory without one."""
        if torch.cuda.is_available():
            return int(torch.cuda.mem_get_info(device_index)[0])
        return int(psutil.virtual_memory().available)

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns what can be trained in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self.device_name()

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns a tensor in page-locked memory, where there is a device."""
        return tensor.pin_memory() if torch.cuda.is_available() else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return torch.cuda.is_available() and tensor.is_pinned()

    def range_push(self, msg: str) -> None:
        """Does nothing: ``tier.timeline`` has ranges."""

    def range_pop(self) -> None:
        """Does nothing."""

    def __getattr__(self, name: str) -> Any:
        """Returns what ``torch.cuda`` or ``torch.cpu`` has of this name."""
        if torch.cuda.is_available():
            return getattr(torch.cuda, name)
        if name in _COUNTS:  # which torch.cpu has not
            return lambda *_: 0
        return getattr(torch.cpu, name)


_COUNTS = {
    "max_memory_allocated", "max_memory_cached", "max_memory_reserved", "memory_allocated",
    "memory_cached", "memory_reserved", "reset_max_memory_allocated", "reset_max_memory_cached",
    "reset_peak_memory_stats",
}  # fmt: skip


_found = Accelerator()


def get_accelerator() -> Accelerator:
    """Returns the device that there is."""
    return _found
