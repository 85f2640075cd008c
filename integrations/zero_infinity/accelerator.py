"""``deepspeed.accelerator``: the device that there is, by DeepSpeed's names."""

from __future__ import annotations

from typing import Any

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

    def empty_cache(self) -> None:
        """Gives torch's free device memory back."""
        torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        """Returns what ``torch.cuda`` or ``torch.cpu`` has of this name."""
        return getattr(torch.cuda if torch.cuda.is_available() else torch.cpu, name)


_found = Accelerator()


def get_accelerator() -> Accelerator:
    """Returns the device that there is."""
    return _found
