"""A diffusers pipeline with tiers: transformer, text encoders and VAE under one manager.

    from tiermem.integrations.diffusers import offload

    pipe = FluxPipeline.from_pretrained(..., torch_dtype=torch.bfloat16)
    with offload(pipe, hbm="6GiB"):
        image = pipe("a cat that reads a book").images[0]

The pipeline is called as usual. What streams is decided for all its models together: while the
transformer denoises, the text encoders are in HBM only if there is spare room.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiermem import CapacityError, ConfigError, TierManager

# Methods that change modules or weights: the models are ordinary ones while they run.
_CHANGING = (
    "load_lora_weights",
    "unload_lora_weights",
    "fuse_lora",
    "unfuse_lora",
    "delete_adapters",
    "load_ip_adapter",
    "unload_ip_adapter",
    "load_textual_inversion",
)

# Methods of a model that may give it another dtype or memory format; pipelines call the first (a
# VAE that overflows in float16 is float32 while it decodes).
_CASTING = ("to", "float", "half", "bfloat16", "double")

# Methods that would move the models themselves.
_MOVING = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")

# Methods of a model that would do so, or give its weights another dtype at each use.
_REFUSED = ("enable_group_offload", "enable_layerwise_casting")


class _Instead:
    """Replaces a method of a model; copies and pickles of the model have the original method."""

    def __init__(self, model: nn.Module, method: str, call: Callable[..., Any]) -> None:
        self._model, self._method, self._call = model, method, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, self._method)


class PipelineTiers(TierManager):
    """The manager of a pipeline's models.

    Attributes:
        pipe: The pipeline.
    """

    def __init__(self, pipe: Any, device: str | torch.device, **settings: Any) -> None:
        """Opens the tiers and wraps every model of the pipeline.

        Args:
            pipe: The pipeline, in host memory.
            device: Where its models compute.
            **settings: Settings of :class:`tiermem.TierManager`.
        """
        models = _models_of(pipe)
        super().__init__(device, **settings)
        self.pipe = pipe
        self._here: dict[str, nn.Module] = {}
        self._patched: list[str] = []
        try:
            self._wrap(models)
            self._patch()
        except BaseException:
            self._unwrap()
            TierManager.close(self)
            raise

    def _wrap(self, models: dict[str, nn.Module]) -> None:
        for name, model in models.items():
            self.wrap(model)
            self._here[name] = model
            for method in _REFUSED:
                if hasattr(model, method):
                    refusal = functools.partial(self._refuse, f"pipe.{name}.{method}")
                    model.__dict__[method] = _Instead(model, method, refusal)
            for method in _CASTING:
                cast = functools.partial(self._cast, name, model, method)
                model.__dict__[method] = _Instead(model, method, cast)

    def _unwrap(self) -> None:
        while self._here:
            _, model = self._here.popitem()
            _unpatch(model)
            self.unwrap(model)

    def _cast(self, name: str, model: nn.Module, cast: str, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``model.to`` and the like: the model is unwrapped, changed and wrapped again.

        Args:
            name: The component's.
            model: The component.
            cast: The name of the method.
            *args: Its arguments.
            **kwargs: Others of them.

        Returns:
            What the method returns.

        Raises:
            CapacityError: If it does not fit in the budgets afterwards; the model is unchanged.
        """
        method = functools.partial(getattr(type(model), cast), model)
        change = _change(model, cast, args, kwargs)
        if not change:
            return method(*args, **kwargs)
        _unpatch(self._here.pop(name))
        with torch.inference_mode(mode=False):  # weights that are made in it cannot be wrapped
            self.unwrap(model)
            former = {key: torch.empty_like(t, device="meta") for key, t in _tensors_of(model)}
            try:
                result = method(**change) if cast == "to" else method()
                self._wrap({name: model})
            except CapacityError as error:
                for key, tensor in _tensors_of(model):
                    was = torch.empty_like(former[key], device=tensor.device)
                    tensor.data = was.copy_(tensor.data)
                self._wrap({name: model})
                now = change.get("dtype", change.get("memory_format"))
                raise CapacityError(
                    f"component {name!r} has no room in tiers as {now}, and is as it was: {error}"
                ) from error
        return result

    def _patch(self) -> None:
        """Patches methods that change modules, so that these are ordinary ones while they run."""
        for name in _CHANGING:
            method = getattr(self.pipe, name, None)
            if method is not None:
                setattr(self.pipe, name, self._around(method))
                self._patched.append(name)
        for name in _MOVING:
            if hasattr(self.pipe, name):
                setattr(self.pipe, name, functools.partial(self._refuse, f"pipe.{name}"))
                self._patched.append(name)

    def _refuse(self, what: str, *_: Any, **__: Any) -> None:
        """Replaces methods with which diffusers would move or cast the models itself.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{what}(): the models of this pipeline are in tiermem's tiers; choose one: close() "
            "what offload returned (or leave its `with` block) before"
        )

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.closed or not self._here:  # unwrapped already: one such method calls another
                return method(*args, **kwargs)
            self._unwrap()
            try:
                return method(*args, **kwargs)
            finally:
                self._wrap(_models_of(self.pipe))

        return call

    def close(self, *, discard: bool = False) -> None:
        """Makes the pipeline an ordinary one in host memory again, and gives everything back.

        Args:
            discard: Whether to drop the models' weights; see :meth:`tiermem.TierManager.close`.
        """
        super().close(discard=discard)  # if it raises, the pipeline stays as it is
        for model in self._here.values():
            _unpatch(model)
        self._here.clear()
        for name in self._patched:
            self.pipe.__dict__.pop(name, None)
        self._patched.clear()


def offload(
    pipe: Any,
    hbm: int | str | None = None,
    dram: int | str | None = None,
    nvme: Any = None,
    *,
    device: str | torch.device = "cuda",
    **settings: Any,
) -> PipelineTiers:
    """Moves the models of a pipeline into tiers.

    Args:
        pipe: A diffusers pipeline whose models are in host memory or on the device.
        hbm: Budget of device memory for weights; bytes or text such as ``"6GiB"``.
        dram: Budget of host memory.
        nvme: A folder on a fast disk, or several, or None.
        device: Where the models compute.
        **settings: Others of :class:`tiermem.TierManager`.

    Returns:
        The manager. Closing it (or leaving its ``with`` block) makes the pipeline an ordinary one.

    Raises:
        ConfigError: If it is not a pipeline, or diffusers or accelerate offload it already.
        CapacityError: If it does not fit in a budget; the pipeline is unchanged.
    """
    settings = {"hbm": hbm, "dram": dram, "nvme": nvme, **settings}
    return PipelineTiers(pipe, device, **settings)


def _models_of(pipe: Any) -> dict[str, nn.Module]:
    """Returns the models of a pipeline, by component, each once.

    Raises:
        ConfigError: If it has none, or another system moves them already.
    """
    components = getattr(pipe, "components", None)
    if not isinstance(components, dict):
        raise ConfigError(f"{type(pipe).__name__} is no diffusers pipeline: it has no components")
    models: dict[str, nn.Module] = {}
    for name, component in components.items():
        if isinstance(component, nn.Module) and not any(component is m for m in models.values()):
            _refuse_hooks(name, component)
            models[name] = component
    if not models:
        raise ConfigError(f"{type(pipe).__name__} has no models to offload")
    return models


def _unpatch(model: nn.Module) -> None:
    for name in (*_REFUSED, *_CASTING):
        model.__dict__.pop(name, None)


def _tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _change(model: nn.Module, cast: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the dtype and the memory format that a call of ``model.to`` or the like gives.

    Empty if every tensor has that dtype already, or if the call would change the device, too.

    Args:
        model: The model, in tiers.
        cast: The name of the method.
        args: Its arguments.
        kwargs: Others of them.
    """
    floats = [tensor for _, tensor in _tensors_of(model) if tensor.is_floating_point()]
    found: dict[str, Any] = {"dtype": getattr(torch, cast, None)}
    if cast == "to":
        try:
            parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
        except (TypeError, RuntimeError):  # the method itself says what is wrong
            return {}
        device, found["dtype"], _, found["memory_format"] = parsed
        if not all(_is_on(device, tensor) for tensor in floats):
            return {}
    found = {key: value for key, value in found.items() if value is not None}
    others = any(tensor.dtype is not found.get("dtype", tensor.dtype) for tensor in floats)
    return found if others or "memory_format" in found else {}


def _is_on(device: torch.device | None, tensor: torch.Tensor) -> bool:
    if device is None:
        return True
    return device.type == tensor.device.type and device.index in (None, tensor.device.index)


def _refuse_hooks(name: str, model: nn.Module) -> None:
    for module in model.modules():
        hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
        if hasattr(module, "_hf_hook") or any("group_offload" in key for key in hooks):
            raise ConfigError(
                f"component {name!r} is offloaded already by diffusers or accelerate; choose one: "
                "remove theirs (pipe.remove_all_hooks()) or load the pipeline again before "
                "tiermem's offload"
            )
        if any("layerwise_casting" in key for key in hooks):
            raise ConfigError(
                f"component {name!r} has layerwise casting, which gives its weights another dtype "
                "at each use; load the pipeline again without it: weights in tiers need no smaller "
                "dtype to fit"
            )


__all__ = ["PipelineTiers", "offload"]
