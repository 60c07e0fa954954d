"""Modules with the signatures and the state dicts of `torch.nn`."""

import torch
from torch import Tensor

from .functional import add_layer_norm, add_rms_norm, l2_norm, layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_gated


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `rms_norm`. It has the same arguments, and `weight_offset`,
    `cast_before_weight`, `cast_order` and `out_dtype`.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).detach()
    tensor([[0.8485, 1.1314]])
    """

    def __init__(self, normalized_shape, eps: float | None = None, elementwise_affine: bool = True, device=None, dtype=None, *,
                 weight_offset: float = 0.0, cast_before_weight: bool = False, cast_order: str | None = None,
                 out_dtype: torch.dtype | None = None):
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.weight_offset, self.cast_before_weight = weight_offset, cast_before_weight
        self.cast_order, self.out_dtype = cast_order, out_dtype
        self._start()

    def reset_parameters(self) -> None:
        """Sets the weight so that weight + weight_offset is 1."""
        super().reset_parameters()
        if hasattr(self, "weight_offset"):
            self._start()

    def _start(self):
        if self.elementwise_affine and self.weight_offset:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """y, with the shape and dtype of x: (..., *normalized_shape)."""
        return rms_norm(x, weight=self.weight, eps=self.eps, normalized_shape=self.normalized_shape, weight_offset=self.weight_offset,
                        cast_before_weight=self.cast_before_weight, cast_order=self.cast_order, out_dtype=self.out_dtype)

    def extra_repr(self) -> str:
        """The arguments, as shown by `print(module)`."""
        extra = super().extra_repr()
        extra += f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        extra += "" if self.cast_order is None else f", cast_order={self.cast_order!r}"
        extra += "" if self.out_dtype is None else f", out_dtype={self.out_dtype}"
        return extra + (", cast_before_weight=True" if self.cast_before_weight else "")


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by `layer_norm`, with the same arguments.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.LayerNorm(2)(torch.tensor([[1.0, 3.0]])).detach()
    tensor([[-1.0000,  1.0000]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """y, with the shape and dtype of the input: (..., *normalized_shape)."""
        return layer_norm(input, weight=self.weight, bias=self.bias, eps=self.eps, normalized_shape=self.normalized_shape)


class AddRMSNorm(RMSNorm):
    """`y, h = norm(x, residual)`: `add_rms_norm`, with the arguments of `torch.nn.RMSNorm`, its state
    dict, `weight_offset` and `cast_before_weight`.

    >>> import torch, rmsnorm.torch as rt
    >>> y, h = rt.AddRMSNorm(2, eps=0.0)(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]))
    >>> h.detach()
    tensor([[3., 4.]])
    """

    def __init__(self, normalized_shape, eps: float | None = None, elementwise_affine: bool = True, device=None, dtype=None, *,
                 weight_offset: float = 0.0, cast_before_weight: bool = False):
        # The other options of `RMSNorm` do not go with a residual.
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset,
                         cast_before_weight=cast_before_weight)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(y, x + residual)."""
        return add_rms_norm(x, residual, weight=self.weight, eps=self.eps, normalized_shape=self.normalized_shape,
                            weight_offset=self.weight_offset, cast_before_weight=self.cast_before_weight)


class AddLayerNorm(LayerNorm):
    """`y, h = norm(x, residual)`: `add_layer_norm`, with the arguments and the state dict of `LayerNorm`.

    >>> import torch, rmsnorm.torch as rt
    >>> y, h = rt.AddLayerNorm(2)(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]))
    >>> y.detach()
    tensor([[-1.0000,  1.0000]])
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(y, x + residual)."""
        return add_layer_norm(x, residual, weight=self.weight, bias=self.bias, eps=self.eps, normalized_shape=self.normalized_shape)


class RMSNormAdd(RMSNorm):
    """`h = norm(x, residual)`: `rms_norm_add`, with the arguments of `torch.nn.RMSNorm`, its state dict,
    `weight_offset` and `cast_before_weight`.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.RMSNormAdd(2, eps=0.0)(torch.tensor([[3.0, -3.0]]), torch.tensor([[1.0, 3.0]])).detach()
    tensor([[2., 2.]])
    """

    def __init__(self, normalized_shape, eps: float | None = None, elementwise_affine: bool = True, device=None, dtype=None, *,
                 weight_offset: float = 0.0, cast_before_weight: bool = False):
        # The other options of `RMSNorm` do not go with a residual.
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset,
                         cast_before_weight=cast_before_weight)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + norm(x)."""
        return rms_norm_add(x, residual, weight=self.weight, eps=self.eps, normalized_shape=self.normalized_shape,
                            weight_offset=self.weight_offset, cast_before_weight=self.cast_before_weight)


class LayerNormAdd(LayerNorm):
    """`h = norm(x, residual)`: `layer_norm_add`, with the arguments and the state dict of `LayerNorm`.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.LayerNormAdd(2, eps=0.0)(torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 2.0]])).detach()
    tensor([[1., 3.]])
    """

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + norm(x)."""
        return layer_norm_add(x, residual, weight=self.weight, bias=self.bias, eps=self.eps, normalized_shape=self.normalized_shape)


class L2Norm(RMSNorm):
    """`l2_norm`, with its options, and the arguments and the state dict of `RMSNorm`. It has no weight by default.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.L2Norm(2)(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def __init__(self, normalized_shape, eps: float = 1e-6, elementwise_affine: bool = False, device=None, dtype=None, *, groups: int = 1,
                 clamped: bool = False, weight_offset: float = 0.0, cast_order: str | None = None, out_dtype: torch.dtype | None = None):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset, cast_order=cast_order,
                         out_dtype=out_dtype)
        self.groups, self.clamped = groups, clamped

    def forward(self, x: Tensor) -> Tensor:
        """y, with the shape of x: (..., *normalized_shape)."""
        return l2_norm(x, weight=self.weight, eps=self.eps, groups=self.groups, clamped=self.clamped, normalized_shape=self.normalized_shape,
                       weight_offset=self.weight_offset, cast_order=self.cast_order, out_dtype=self.out_dtype)

    def extra_repr(self) -> str:
        """The arguments, as shown by `print(module)`."""
        extra = super().extra_repr() + (f", groups={self.groups}" if self.groups != 1 else "")
        return extra + (", clamped=True" if self.clamped else "")


class RMSNormGated(RMSNorm):
    """`y = norm(x, gate)`: `rms_norm_gated`, with its options, the other arguments of `RMSNorm` and its state
    dict: that of `Qwen3NextRMSNormGated`, `MambaRMSNormGated` and `Zamba2RMSNormGated` of transformers and
    of FLA's and mamba_ssm's gated norms.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.RMSNormGated(2, eps=0.0, activation="sigmoid")(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])).detach()
    tensor([[0.4243, 0.8271]])
    """

    def __init__(self, normalized_shape, eps: float | None = None, activation: str = "silu", *, norm_before_gate: bool = True,
                 groups: int = 1, elementwise_affine: bool = True, device=None, dtype=None, weight_offset: float = 0.0,
                 cast_before_weight: bool = False, cast_order: str | None = None, out_dtype: torch.dtype | None = None):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset,
                         cast_before_weight=cast_before_weight, cast_order=cast_order, out_dtype=out_dtype)
        self.activation, self.norm_before_gate, self.groups = activation, norm_before_gate, groups

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """y, with the shape and dtype of x: (..., *normalized_shape). Without a gate, the norm alone."""
        return rms_norm_gated(x, gate, self.weight, self.eps, activation=self.activation, norm_before_gate=self.norm_before_gate,
                              groups=self.groups, normalized_shape=self.normalized_shape, weight_offset=self.weight_offset,
                              cast_before_weight=self.cast_before_weight, cast_order=self.cast_order, out_dtype=self.out_dtype)

    def extra_repr(self) -> str:
        """The arguments, as shown by `print(module)`."""
        extra = f"{super().extra_repr()}, activation={self.activation!r}"
        extra += "" if self.norm_before_gate else ", norm_before_gate=False"
        return extra + (f", groups={self.groups}" if self.groups != 1 else "")
