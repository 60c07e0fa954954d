"""Modules with the signatures and the state dicts of `torch.nn`."""

import torch
from torch import Tensor

from .functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class _OverLastDimensions:
    """What the modules share: a norm over `normalized_shape`, whatever dimensions come before."""

    def _apply_norm(self, function, *rows):
        shape = self.normalized_shape
        if len(shape) == 1 and rows[0].shape[-1] == shape[0]:
            return function(*rows)
        if rows[0].shape[-len(shape):] != torch.Size(shape):
            raise RuntimeError(f"x must end in normalized_shape={list(shape)}, got the shape {list(rows[0].shape)}")
        if self.weight is not None:
            return function(*rows)
        # Without a weight nothing says how many dimensions are one row.
        found = function(*(tensor.flatten(-len(shape)) for tensor in rows))
        one = isinstance(found, Tensor)
        found = tuple(tensor.view(rows[0].shape) for tensor in ((found,) if one else found))
        return found[0] if one else found


class RMSNorm(_OverLastDimensions, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` by `rms_norm`: its arguments, and `weight_offset` and `cast_before_weight` of the function."""

    def __init__(self, normalized_shape, eps: float | None = None, elementwise_affine: bool = True, device=None, dtype=None, *,
                 weight_offset: float = 0.0, cast_before_weight: bool = False):
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.weight_offset, self.cast_before_weight = weight_offset, cast_before_weight
        self._start()

    def reset_parameters(self) -> None:
        """The weight that multiplies by one."""
        super().reset_parameters()
        if hasattr(self, "weight_offset"):
            self._start()

    def _start(self):
        if self.elementwise_affine and self.weight_offset:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """y, with the shape and dtype of x: (..., *normalized_shape)."""
        return self._apply_norm(lambda x: rms_norm(
            x, self.weight, self.eps, weight_offset=self.weight_offset, cast_before_weight=self.cast_before_weight
        ), x)

    def extra_repr(self) -> str:
        """The arguments."""
        extra = super().extra_repr()
        extra += f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return extra + (", cast_before_weight=True" if self.cast_before_weight else "")


class LayerNorm(_OverLastDimensions, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` by `layer_norm`, with its arguments."""

    def forward(self, x: Tensor) -> Tensor:
        """y, with the shape and dtype of x: (..., *normalized_shape)."""
        return self._apply_norm(lambda x: layer_norm(x, self.weight, self.bias, self.eps), x)


class AddRMSNorm(RMSNorm):
    """`y, h = norm(x, residual)`: `add_rms_norm`, with the arguments and the state dict of `RMSNorm`."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(y, x + residual)."""
        return self._apply_norm(lambda x, residual: add_rms_norm(
            x, residual, self.weight, self.eps, weight_offset=self.weight_offset, cast_before_weight=self.cast_before_weight
        ), x, residual)


class AddLayerNorm(LayerNorm):
    """`y, h = norm(x, residual)`: `add_layer_norm`, with the arguments and the state dict of `LayerNorm`."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(y, x + residual)."""
        return self._apply_norm(lambda x, residual: add_layer_norm(x, residual, self.weight, self.bias, self.eps), x, residual)
