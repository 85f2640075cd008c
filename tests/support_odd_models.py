"""Modules of torch in odd shapes, and small models of diffusers, for the sweep over models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support_nn import seed
from support_shrunk import Inputs, NotSmallError, said
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Made = tuple[Callable[[], nn.Module], Inputs]
TORCH: dict[str, Made] = {}


def _of(name: str, inputs: Callable[[int], dict[str, Any]]) -> Callable[[Any], Any]:
    """Registers what makes a module."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            seed(11)
            return build()

        TORCH[name] = (make, inputs)
        return build

    return register


def _x(*shape: int, name: str = "x") -> Inputs:
    return lambda n: {name: torch.randn(3 + n, *shape)}


def _seq(n: int) -> dict[str, Any]:
    return {"x": torch.randn(2, 6 + n, 32)}


class Around(nn.Module):
    """A module whose forward is a function of what it holds."""

    def __init__(self, call: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.call = call
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, **given: Any) -> Any:
        return self.call(self, **given)


@_of("Transformer", lambda n: {"src": torch.randn(2, 5 + n, 32), "tgt": torch.randn(2, 4 + n, 32)})
def _transformer() -> nn.Module:
    return nn.Transformer(32, 4, 2, 2, 64, batch_first=True)


@_of(
    "Transformer, norm first, not batch first",
    lambda n: {"src": torch.randn(5, 2 + n, 32), "tgt": torch.randn(4, 2 + n, 32)},
)
def _transformer_norm_first() -> nn.Module:
    return nn.Transformer(32, 4, 2, 2, 64, norm_first=True, bias=False)


@_of("TransformerEncoder, fast path and nested tensors", lambda n: {"x": torch.randn(3, 6 + n, 32)})
def _encoder() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[1, 3:] = True
        return m.encoder(x, src_key_padding_mask=mask)

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return Around(call, encoder=nn.TransformerEncoder(layer, 3))


@_of("MultiheadAttention, batch first", _seq)
def _attention() -> nn.Module:
    return Around(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(32, 4, batch_first=True))


@_of(
    "MultiheadAttention, other dims, no weights",
    lambda n: {
        "q": torch.randn(2, 5 + n, 32),
        "k": torch.randn(2, 7, 16),
        "v": torch.randn(2, 7, 24),
    },
)
def _attention_dims() -> nn.Module:
    a = nn.MultiheadAttention(32, 4, kdim=16, vdim=24, batch_first=True, add_bias_kv=True)
    return Around(lambda m, q, k, v: m.a(q, k, v, need_weights=False), a=a)


@_of("LSTM, bidirectional, projected", _seq)
def _lstm() -> nn.Module:
    return Around(
        lambda m, x: m.r(x), r=nn.LSTM(32, 24, 2, bidirectional=True, proj_size=8, dropout=0.1)
    )


@_of("GRU, bidirectional, packed", lambda n: {"x": torch.randn(3, 6 + n, 32)})
def _gru() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True)
        out, last = m.r(packed)
        return rnn.pad_packed_sequence(out)[0], last

    return Around(call, r=nn.GRU(32, 24, 2, bidirectional=True, batch_first=True))


@_of("RNN cells in a loop", lambda n: {"x": torch.randn(4 + n, 2, 32)})
def _cells() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        h, c = torch.zeros(2, 24), torch.zeros(2, 24)
        g = torch.zeros(2, 24)
        for one in x:
            h, c = m.lstm(one, (h, c))
            g = m.gru(h, g)
        return h, c, g

    return Around(call, lstm=nn.LSTMCell(32, 24), gru=nn.GRUCell(24, 24))


@_of(
    "EmbeddingBag, weights and offsets",
    lambda n: {"i": torch.randint(64, (10 + n,)), "o": torch.tensor([0, 3, 7])},
)
def _bag() -> nn.Module:
    return Around(
        lambda m, i, o: m.b(i, o, per_sample_weights=torch.ones(len(i))),
        b=nn.EmbeddingBag(64, 32, mode="sum"),
    )


@_of("Embedding with max_norm and padding", lambda n: {"i": torch.randint(64, (3, 5 + n))})
def _max_norm() -> nn.Module:
    e = nn.Embedding(64, 32, max_norm=1.0, padding_idx=0)
    return Around(lambda m, i: m.l(m.e(i)), e=e, l=nn.Linear(32, 8))


def _normed(norm: Callable[[nn.Module], nn.Module], count: int) -> nn.Module:
    layers = [norm(nn.Linear(32, 32)) for _ in range(count)]
    return Around(lambda m, x: m.s(x), s=nn.Sequential(*layers))


@_of("weight_norm, as a parametrization", _x(32))
def _weight_norm() -> nn.Module:
    return _normed(parametrizations.weight_norm, 3)


@_of("weight_norm, old", _x(32))
def _weight_norm_old() -> nn.Module:
    return _normed(nn.utils.weight_norm, 3)


@_of("spectral_norm", _x(32))
def _spectral() -> nn.Module:
    return _normed(parametrizations.spectral_norm, 3)


@_of("spectral_norm, old", _x(32))
def _spectral_old() -> nn.Module:
    return _normed(nn.utils.spectral_norm, 3)


@_of("orthogonal", _x(32))
def _orthogonal() -> nn.Module:
    return _normed(parametrizations.orthogonal, 2)


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


@_of("parametrize, cached", _x(32))
def _cached() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        with parametrize.cached():
            return m.l(m.l(x))

    layer = nn.Linear(32, 32)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return Around(call, l=layer)


@_of("a child's weights used directly", _x(32))
def _direct() -> nn.Module:
    return Around(
        lambda m, x: F.linear(F.linear(x, m.a.weight, m.a.bias), m.b.weight.T),
        a=nn.Linear(32, 48),
        b=nn.Linear(32, 48),
    )


@_of("one module called several times", _x(32))
def _several() -> nn.Module:
    return Around(lambda m, x: m.a(m.b(m.a(m.a(x)))), a=nn.Linear(32, 32), b=nn.Linear(32, 32))


@_of("one module in two places", _x(32))
def _two_places() -> nn.Module:
    shared = nn.Linear(32, 32)
    return Around(
        lambda m, x: m.s(x),
        s=nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, nn.Linear(32, 32)), shared),
    )


@_of("tied weights of other modules", lambda n: {"i": torch.randint(64, (3, 5 + n))})
def _tied() -> nn.Module:
    e, h = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    h.weight = e.weight
    return Around(lambda m, i: m.h(m.l(m.e(i))), e=e, l=nn.Linear(32, 32), h=h)


@_of("views of one storage", _x(32))
def _views() -> nn.Module:
    flat = torch.randn(2 * 32 * 32) / 6
    m = Around(lambda m, x: F.linear(F.linear(x, m.a), m.b))
    m.a = nn.Parameter(flat[: 32 * 32].view(32, 32))
    m.b = nn.Parameter(flat[32 * 32 :].view(32, 32))
    return m


@_of("ParameterList and ParameterDict", _x(32))
def _lists() -> nn.Module:
    many = nn.ParameterList([nn.Parameter(torch.randn(32, 32) / 6) for _ in range(4)])
    named = nn.ParameterDict({"one": torch.randn(32), "two": nn.Parameter(torch.randn(32))})

    def call(m: Any, x: Tensor) -> Any:
        for w in m.many:
            x = x @ w
        for name in m.named:
            x = x + m.named[name]
        return x * m.many[-1].sum()

    return Around(call, many=many, named=named)


@_of("lazy modules, called before", _x(32))
def _lazy_called() -> nn.Module:
    m = Around(lambda m, x: m.s(x), s=nn.Sequential(nn.LazyLinear(24), nn.ReLU(), nn.LazyLinear(8)))
    m(x=torch.randn(2, 32))
    return m


class _Late(nn.Module):
    """Makes a parameter at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.scale: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(x.shape[-1]) * 2)
        return self.a(x) * self.scale


@_of("a parameter made at the first call", _x(32))
def _late() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), _Late()) if False else _named(_Late())


def _named(inner: nn.Module) -> nn.Module:
    return Around(lambda m, x: m.inner(x), inner=inner)


@_of("a module that returns its own weight", _x(32))
def _returns() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        return {"y": y, "w": m.a.weight, "v": m.b.weight.view(-1)}

    return Around(call, a=nn.Linear(32, 32), b=nn.Linear(32, 32))


@_of("checkpointed Sequential", _x(32))
def _checkpointed() -> nn.Module:
    s = nn.Sequential(
        *[nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.ReLU()) for _ in range(6)]
    )

    def call(m: Any, x: Tensor) -> Any:
        x = m.first(x)
        x = checkpoint_sequential(m.s, 3, x, use_reentrant=False)
        return checkpoint(m.last, x, use_reentrant=True)

    return Around(call, first=nn.Linear(32, 32), s=s, last=nn.Linear(32, 8))


@_of("torch.compile, eager backend", _x(32))
def _compiled() -> nn.Module:
    s = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    return Around(lambda m, x: m.s(x), s=torch.compile(s, backend="eager"))


@_of("torch.compile, aot_eager backend, the whole", _x(32))
def _compiled_aot() -> nn.Module:
    s = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32))
    return Around(lambda m, x: m.s(x), s=torch.compile(s, backend="aot_eager"))


@_of("functional_call with other values", _x(32))
def _functional() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        changed = {"weight": m.a.weight * 2, "bias": m.a.bias + 1}
        return torch.func.functional_call(m.a, changed, (x,)) + m.b(x)

    return Around(call, a=nn.Linear(32, 32), b=nn.Linear(32, 32))


@_of("functional_call of own parameters", _x(32))
def _functional_own() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        return torch.func.functional_call(m.s, dict(m.s.named_parameters()), (x,))

    return Around(call, s=nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))


@_of("vmap over an ensemble, stacked", _x(32))
def _vmap() -> nn.Module:
    models = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def call(m: Any, x: Tensor) -> Any:
        stacked = {
            n: torch.stack([dict(e.named_parameters())[n] for e in m.models])
            for n in ("weight", "bias")
        }
        return torch.func.vmap(lambda p: torch.func.functional_call(m.models[0], p, (x,)))(stacked)

    return Around(call, models=models)


@_of("a penalty by func.grad", _x(32))
def _penalty() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        x = x.requires_grad_()
        with torch.enable_grad():
            y = m.s(x).sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
        return y + (g**2).sum()

    return Around(call, s=nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)))


@_of("hooks of every kind", _x(32))
def _hooks() -> nn.Module:
    s = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])
    s[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    s[1].register_forward_hook(lambda m, args, out: out + m.weight.mean())
    s[1].register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))
    s[2].register_full_backward_pre_hook(lambda m, go: tuple(g * 3 for g in go))
    s[2].weight.register_hook(lambda g: g * 0.5)
    s.register_state_dict_post_hook(lambda m, state, prefix, local: None)
    return Around(lambda m, x: m.s(x), s=s)


@_of("a wrapper that forwards attributes", _x(32))
def _forwarding() -> nn.Module:
    class Outer(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

        def forward(self, x: Tensor) -> Any:
            return self.module(x) @ self.weight

    return Outer(nn.Linear(32, 32))


@_of("convolutions, channels last, batch norm", lambda n: {"x": torch.randn(2 + n, 3, 16, 16)})
def _channels() -> nn.Module:
    s = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 3),
        nn.GroupNorm(2, 4),
    )
    return Around(lambda m, x: m.s(x), s=s.to(memory_format=torch.channels_last))


@_of("SyncBatchNorm-like running buffers, counted", lambda n: {"x": torch.randn(2 + n, 4, 16)})
def _norms() -> nn.Module:
    s = nn.Sequential(
        nn.Conv1d(4, 4, 3),
        nn.BatchNorm1d(4, momentum=None),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    )
    return Around(lambda m, x: m.s(x), s=s)


@_of("complex weights", lambda n: {"x": torch.randn(2 + n, 16, dtype=torch.complex64)})
def _complex() -> nn.Module:
    return Around(lambda m, x: m.l(x).abs(), l=nn.Linear(16, 16, dtype=torch.complex64))


@_of("weights of several dtypes", _x(32))
def _dtypes() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        return m.c(m.b(m.a(x).bfloat16()).double())

    return Around(
        call, a=nn.Linear(32, 32), b=nn.Linear(32, 32).bfloat16(), c=nn.Linear(32, 8).double()
    )


@_of("integer and boolean parameters, frozen", _x(32))
def _integers() -> nn.Module:
    m = Around(lambda m, x: m.l(x)[:, m.order] * m.mask + m.empty.sum(), l=nn.Linear(32, 32))
    m.order = nn.Parameter(torch.randperm(32), requires_grad=False)
    m.mask = nn.Parameter(torch.rand(32) > 0.5, requires_grad=False)
    m.empty = nn.Parameter(torch.empty(0, 4))
    return m


@_of("scalars, and a parameter that nobody uses", _x(32))
def _scalars() -> nn.Module:
    m = Around(lambda m, x: m.l(x) * m.scale, l=nn.Linear(32, 32))
    m.scale = nn.Parameter(torch.tensor(2.0))
    m.idle = nn.Parameter(torch.randn(50, 50))
    return m


@_of("not contiguous weights", _x(32))
def _strided() -> nn.Module:
    m = Around(lambda m, x: F.linear(x, m.w) * m.e, l=nn.Linear(4, 4))
    m.w = nn.Parameter((torch.randn(32, 48) / 6).T)
    m.e = nn.Parameter(torch.randn(96)[::2])
    return m


@_of("layers skipped at random", _x(32))
def _skipped() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        for layer in m.layers:
            if not m.training or torch.rand(()) > 0.4:
                x = torch.tanh(layer(x))
        return x

    return Around(call, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(6)))


@_of("experts by index, in a dict", _x(32))
def _experts() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        chosen = m.gate(x).argmax(-1)
        return torch.stack([m.experts[str(int(c))](row) for c, row in zip(chosen, x, strict=True)])

    return Around(
        call,
        gate=nn.Linear(32, 4),
        experts=nn.ModuleDict({str(i): nn.Linear(32, 16) for i in range(4)}),
    )


@_of("recursion into itself", _x(32))
def _recursion() -> nn.Module:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(32, 32)

        def forward(self, x: Tensor, depth: int = 3) -> Any:
            return self.l(x) if depth == 0 else torch.tanh(self.l(self(x, depth - 1)))

    return Deep()


@_of("a graph's module", _x(32))
def _fx() -> nn.Module:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.w = nn.Parameter(torch.randn(32))

        def forward(self, x: Tensor) -> Any:
            return self.a(x) * self.w

    return torch.fx.symbolic_trace(Inner())


@_of("weights in a plain list and in a dict", _x(32))
def _plain_list() -> nn.Module:
    m = Around(lambda m, x: x @ m.held[0] + m.by_name["b"], a=nn.Linear(32, 32))
    m.held = [m.a.weight]
    m.by_name = {"b": m.a.bias}
    return m


@_of("weights read through data and detach", _x(32))
def _data() -> nn.Module:
    return Around(
        lambda m, x: m.a(x) + m.a.weight.data.mean() + m.b.weight.detach().norm(),
        a=nn.Linear(32, 32),
        b=nn.Linear(32, 32),
    )


@_of("an average of weights kept in forward", _x(32))
def _average() -> nn.Module:
    def call(m: Any, x: Tensor) -> Any:
        if m.training:
            with torch.no_grad():
                for own, other in zip(m.slow.parameters(), m.fast.parameters(), strict=True):
                    own.lerp_(other, 0.1)
        return m.fast(x) + m.slow(x)

    slow = nn.Linear(32, 32).requires_grad_(False)
    return Around(call, fast=nn.Linear(32, 32), slow=slow)


@_of("AveragedModel beside", _x(32))
def _swa() -> nn.Module:
    fast = nn.Linear(32, 32)
    slow = torch.optim.swa_utils.AveragedModel(
        fast, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )

    def call(m: Any, x: Tensor) -> Any:
        if m.training:
            m.slow.update_parameters(m.fast)
        return m.fast(x) + m.slow(x)

    return Around(call, fast=fast, slow=slow)


@_of("a copy made inside forward", _x(32))
def _copied() -> nn.Module:
    return Around(
        lambda m, x: m.a(x) + copy.deepcopy(m.b)(x).detach(),
        a=nn.Linear(32, 32),
        b=nn.Linear(32, 32),
    )


@_of("own __call__, own forward on the instance", _x(32))
def _patched() -> nn.Module:
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    a.forward = lambda x, old=a.forward: old(x) * 2  # type: ignore[method-assign]
    return Around(lambda m, x: m.b.forward(m.a(x)), a=a, b=b)


@_of("slots, properties and old attribute names", _x(32))
def _properties() -> nn.Module:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._w = nn.Parameter(torch.randn(32, 32))

        @property
        def weight(self) -> Tensor:
            return self._w.tanh()

        def forward(self, x: Tensor) -> Any:
            return F.linear(x, self.weight)

    return Around(lambda m, x: m.i(x), i=Inner())


@_of("pruned", _x(32))
def _pruned() -> nn.Module:
    from torch.nn.utils import prune

    layer = nn.Linear(32, 32)
    prune.l1_unstructured(layer, "weight", 0.5)
    return Around(lambda m, x: m.l(x), l=layer)


@_of(
    "adaptive softmax, bilinear, PReLU",
    lambda n: {"x": torch.randn(4 + n, 32), "y": torch.randint(100, (4 + n,))},
)
def _softmax() -> nn.Module:
    return Around(
        lambda m, x, y: m.s(m.p(m.b(x, x)), y),
        b=nn.Bilinear(32, 32, 32),
        p=nn.PReLU(32),
        s=nn.AdaptiveLogSoftmaxWithLoss(32, 100, [20, 50]),
    )


@_of("quantization stubs, fake quantized", _x(32))
def _fake_quantized() -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    s = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    s.qconfig = get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return Around(lambda m, x: m.s(x), s=prepare_qat(s.train()))


@_of("dynamically quantized", _x(32))
def _quantized() -> nn.Module:
    s = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    return Around(
        lambda m, x: m.l(m.s(x)),
        l=nn.Linear(8, 8),
        s=torch.ao.quantization.quantize_dynamic(s, {nn.Linear}),
    )


@_of("no parameters at all", _x(32))
def _nothing() -> nn.Module:
    return Around(lambda m, x: m.s(x), s=nn.Sequential(nn.ReLU(), nn.Softmax(-1)))


@_of("a subclass of Parameter", _x(32))
def _subclass() -> nn.Module:
    class Own(nn.Parameter):
        pass

    m = Around(lambda m, x: x @ m.w)
    m.w = Own(torch.randn(32, 32))
    m.w.tag = "kept"
    return m


# -- diffusers -------------------------------------------------------------------------------


def _of_diffusers(
    name: str, inputs: Inputs, **config: Any
) -> tuple[Callable[[], Made], Callable[[], Any]]:
    def cls() -> Any:
        import diffusers

        found = getattr(diffusers, name, None)
        if found is None:
            raise NotSmallError(f"diffusers has no {name} here")
        return found

    def made() -> Made:
        def make() -> nn.Module:
            seed(11)
            model: nn.Module = cls()(**config)
            return model

        try:
            seed(3)
            with torch.no_grad():
                make().eval()(**inputs(0))
        except NotSmallError:
            raise
        except Exception as error:
            raise NotSmallError(said(error)) from error
        return make, inputs

    return made, cls


def _image(channels: int, size: int = 16, **more: Callable[[int], Tensor]) -> Inputs:
    return lambda n: {
        "sample": torch.randn(1 + n, channels, size, size),
        "timestep": torch.tensor([7] * (1 + n)),
        **{k: v(1 + n) for k, v in more.items()},
    }


def _states(n: int) -> Tensor:
    return torch.randn(n, 8, 32)


_BLOCKS: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 32,
}
_DIT: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


def _hidden(channels: int, **more: Callable[[int], Any]) -> Inputs:
    return lambda n: {
        "hidden_states": torch.randn(1 + n, channels, 16, 16),
        "timestep": torch.tensor([7] * (1 + n)),
        **{k: v(1 + n) for k, v in more.items()},
    }


DIFFUSERS: dict[str, Any] = {
    "UNet2DModel": _of_diffusers(
        "UNet2DModel",
        _image(3),
        sample_size=16,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        **_BLOCKS,
    ),
    "UNet2DConditionModel": _of_diffusers(
        "UNet2DConditionModel",
        _image(4, encoder_hidden_states=_states),
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **_BLOCKS,
    ),
    "UNet1DModel": _of_diffusers(
        "UNet1DModel",
        lambda n: {"sample": torch.randn(1 + n, 14, 16), "timestep": torch.tensor([7] * (1 + n))},
        block_out_channels=(8, 8, 16, 16),
        in_channels=14,
        out_channels=14,
        time_embedding_type="positional",
        use_timestep_embedding=True,
        out_block_type="OutConv1DBlock",
        flip_sin_to_cos=False,
        freq_shift=1.0,
        mid_block_type="MidResTemporalBlock1D",
        down_block_types=("DownResnetBlock1D",) * 4,
        up_block_types=("UpResnetBlock1D",) * 3,
        act_fn="swish",
    ),
    "UNet3DConditionModel": _of_diffusers(
        "UNet3DConditionModel",
        lambda n: {
            "sample": torch.randn(1, 4, 2 + n, 16, 16),
            "timestep": torch.tensor(7),
            "encoder_hidden_states": torch.randn(1, 4, 32),
        },
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        layers_per_block=1,
    ),
    "AutoencoderKL": _of_diffusers(
        "AutoencoderKL",
        lambda n: {"sample": torch.randn(1 + n, 3, 16, 16)},
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **_BLOCKS,
    ),
    "AutoencoderTiny": _of_diffusers(
        "AutoencoderTiny",
        lambda n: {"sample": torch.rand(1 + n, 3, 16, 16)},
        encoder_block_out_channels=(32, 32),
        decoder_block_out_channels=(32, 32),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    ),
    "VQModel": _of_diffusers(
        "VQModel",
        lambda n: {"sample": torch.randn(1 + n, 3, 16, 16)},
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        num_vq_embeddings=32,
        **_BLOCKS,
    ),
    "AsymmetricAutoencoderKL": _of_diffusers(
        "AsymmetricAutoencoderKL",
        lambda n: {"sample": torch.randn(1 + n, 3, 16, 16)},
        down_block_out_channels=(32, 64),
        up_block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_down_block=1,
        layers_per_up_block=1,
    ),
    "ControlNetModel": _of_diffusers(
        "ControlNetModel",
        _image(
            4, encoder_hidden_states=_states, controlnet_cond=lambda n: torch.randn(n, 3, 128, 128)
        ),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        conditioning_embedding_out_channels=(16, 32, 96, 256),
        **_BLOCKS,
    ),
    "DiTTransformer2DModel": _of_diffusers(
        "DiTTransformer2DModel",
        _hidden(4, class_labels=lambda n: torch.ones(n, dtype=torch.long)),
        sample_size=16,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=32,
        patch_size=2,
        norm_num_groups=4,
        **_DIT,
    ),
    "PixArtTransformer2DModel": _of_diffusers(
        "PixArtTransformer2DModel",
        _hidden(
            4,
            encoder_hidden_states=_states,
            added_cond_kwargs=lambda n: {"resolution": None, "aspect_ratio": None},
        ),
        sample_size=16,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=32,
        caption_channels=32,
        norm_num_groups=4,
        **_DIT,
    ),
    "SD3Transformer2DModel": _of_diffusers(
        "SD3Transformer2DModel",
        _hidden(4, encoder_hidden_states=_states, pooled_projections=lambda n: torch.randn(n, 64)),
        sample_size=16,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        **_DIT,
    ),
    "FluxTransformer2DModel": _of_diffusers(
        "FluxTransformer2DModel",
        lambda n: {
            "hidden_states": torch.randn(1 + n, 16, 4),
            "encoder_hidden_states": torch.randn(1 + n, 8, 32),
            "pooled_projections": torch.randn(1 + n, 32),
            "timestep": torch.tensor([1.0] * (1 + n)),
            "img_ids": torch.randn(16, 3),
            "txt_ids": torch.randn(8, 3),
        },
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ),
    "AuraFlowTransformer2DModel": _of_diffusers(
        "AuraFlowTransformer2DModel",
        _hidden(4, encoder_hidden_states=_states),
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_projection_dim=32,
        joint_attention_dim=32,
        out_channels=4,
        pos_embed_max_size=64,
    ),
    "SanaTransformer2DModel": _of_diffusers(
        "SanaTransformer2DModel",
        _hidden(4, encoder_hidden_states=_states),
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=16,
    ),
    "CogVideoXTransformer3DModel": _of_diffusers(
        "CogVideoXTransformer3DModel",
        lambda n: {
            "hidden_states": torch.randn(1 + n, 1, 4, 8, 8),
            "encoder_hidden_states": torch.randn(1 + n, 8, 8),
            "timestep": torch.tensor([7] * (1 + n)),
        },
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
    ),
    "LTXVideoTransformer3DModel": _of_diffusers(
        "LTXVideoTransformer3DModel",
        lambda n: {
            "hidden_states": torch.randn(1 + n, 32, 4),
            "encoder_hidden_states": torch.randn(1 + n, 8, 16),
            "timestep": torch.randint(1000, (1 + n,)),
            "encoder_attention_mask": torch.ones(1 + n, 8).bool(),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
        qk_norm="rms_norm_across_heads",
    ),
    "WanTransformer3DModel": _of_diffusers(
        "WanTransformer3DModel",
        lambda n: {
            "hidden_states": torch.randn(1 + n, 4, 2, 8, 8),
            "encoder_hidden_states": torch.randn(1 + n, 8, 16),
            "timestep": torch.randint(1000, (1 + n,)),
        },
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ),
    "HunyuanDiT2DModel": _of_diffusers(
        "HunyuanDiT2DModel",
        _hidden(4),
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        hidden_size=16,
    ),
    "Lumina2Transformer2DModel": _of_diffusers(
        "Lumina2Transformer2DModel",
        _hidden(
            4,
            encoder_hidden_states=_states,
            encoder_attention_mask=lambda n: torch.ones(n, 8, dtype=torch.bool),
        ),
        sample_size=16,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        ffn_dim_multiplier=None,
        norm_eps=1e-5,
        scaling_factor=1.0,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 64, 64),
        cap_feat_dim=32,
    ),
    "PriorTransformer": _of_diffusers(
        "PriorTransformer",
        lambda n: {
            "hidden_states": torch.randn(1 + n, 8),
            "timestep": 2,
            "proj_embedding": torch.randn(1 + n, 8),
            "encoder_hidden_states": torch.randn(1 + n, 7, 8),
        },
        num_attention_heads=2,
        attention_head_dim=4,
        num_layers=2,
        embedding_dim=8,
        num_embeddings=7,
        additional_embeddings=4,
    ),
    "StableCascadeUNet": _of_diffusers(
        "StableCascadeUNet",
        lambda n: {
            "sample": torch.randn(1 + n, 4, 8, 8),
            "timestep_ratio": torch.rand(1 + n),
            "clip_text_pooled": torch.randn(1 + n, 1, 16),
        },
        conditioning_dim=32,
        block_out_channels=(16, 32),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        in_channels=4,
        out_channels=4,
        clip_text_pooled_in_channels=16,
        block_types_per_layer=(
            ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ),
        switch_level=(False,),
        timestep_ratio_embedding_dim=8,
    ),
    "T5FilmDecoder": _of_diffusers("T5FilmDecoder", lambda n: {}, input_dims=8),
}
