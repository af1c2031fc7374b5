"""A linear layer in tiles, so that it is never whole.

The problem: at stage 3 a layer is gathered whole around its use, and one very large layer (a vocabulary's, the wide
ones of a perceptron) sets the peak of the whole model. The idea: cut its matrix into tiles which are layers of their
own. Each is a unit (see `grouping`), gathered for its part of the product and released before the next one, in forward
and backward.

        in_splits 2, out_splits 3        y0 = W00 x0 + W01 x1 + b0
        W = [ W00 W01 ]                  y1 = W10 x0 + W11 x1 + b1
            [ W10 W11 ]                  y2 = W20 x0 + W21 x1 + b2
            [ W20 W21 ]                  y  = y0, y1, y2 end to end

Splitting outputs costs nothing but smaller products; splitting inputs adds up partial products, so that the rounding is
another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def split_sizes(total: int, splits: int) -> list[int]:
    """``total`` cut into ``splits`` parts that differ by at most 1, the larger ones first."""
    small, larger = divmod(total, splits)
    return [small + 1] * larger + [small] * (splits - larger)


class Tile(nn.Linear):
    """One block of a tiled matrix. Stage 3 gathers and releases it on its own, wherever it is.

    ``fan_in`` is the number of inputs of the whole matrix.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        fan_in: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.fan_in = fan_in
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw values from the distribution that ``torch.nn.Linear`` has for the whole matrix."""
        bound = self.fan_in**-0.5
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)


class TiledLinear(nn.Module):
    """As ``torch.nn.Linear``, with its weight in ``in_splits`` x ``out_splits`` tiles.

    At stage 3 about one tile is whole at a time, two with one gathered ahead. Every rank that calls the layer gathers
    each tile; a layer that only some ranks call belongs into a module that is gathered as a whole (`LeafRule`), in
    which tiles are not on their own.

    Args:
        in_features, out_features, bias, device, dtype: as ``torch.nn.Linear`` has them.
        in_splits, out_splits: into how many parts inputs and outputs are cut. Sizes need not be divisible.

    Raises:
        ValueError: there are more splits than features, or less than one.

    Attributes:
        tiles: by rows of the weight: the tile of input part i and output part j is ``tiles[j * in_splits + i]``. Those
            of the first input part have the bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ValueError(f"{name}_splits is {splits}; it must lie between 1 and {name}_features, {features}")
        self.in_features = in_features
        self.out_features = out_features
        self.in_splits = in_splits
        self.out_splits = out_splits
        self._in_sizes = split_sizes(in_features, in_splits)
        self._out_sizes = split_sizes(out_features, out_splits)
        self.tiles = nn.ModuleList(
            Tile(inputs, outputs, bias and column == 0, fan_in=in_features, device=device, dtype=dtype)
            for outputs in self._out_sizes
            for column, inputs in enumerate(self._in_sizes)
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 1) -> TiledLinear:
        """A copy of ``linear`` in tiles: same values, dtype, device, and parameters trained or frozen."""
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            in_splits=in_splits,
            out_splits=out_splits,
            device="meta",
            dtype=linear.weight.dtype,
        )
        made.to_empty(device=linear.weight.device)
        made.train(linear.training)
        made.copy_from(linear.weight, linear.bias)
        for tile in made.tiles:
            for name, parameter in tile.named_parameters():
                parameter.requires_grad_(linear.get_parameter(name).requires_grad)
        return made

    @torch.no_grad()
    def copy_from(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take the values of ``weight`` [out_features, in_features] and ``bias`` [out_features].

        Raises:
            ValueError: they have other shapes, or there is a bias on one side only.
        """
        wanted = (self.out_features, self.in_features)
        if tuple(weight.shape) != wanted:
            raise ValueError(f"the tiles make up a weight of shape {wanted}, got one of {tuple(weight.shape)}")
        if (bias is None) != (self._tile(0, 0).bias is None):
            has, got = ("a", "none") if bias is None else ("no", "one")
            raise ValueError(f"the layer has {has} bias, and got {got}")
        for j, rows in enumerate(weight.split(self._out_sizes)):
            for i, block in enumerate(rows.split(self._in_sizes, dim=1)):
                self._tile(i, j).weight.copy_(block)
        if bias is not None:
            for j, part in enumerate(bias.split(self._out_sizes)):
                self._tile(0, j).bias.copy_(part)

    def reset_parameters(self) -> None:
        """Draw values from the distribution of ``torch.nn.Linear`` of this size: tile by tile, so not the same ones."""
        for j in range(len(self._out_sizes)):
            for i in range(len(self._in_sizes)):
                self._tile(i, j).reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., in_features] to [..., out_features]."""
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"TiledLinear takes inputs whose last dimension is in_features, {self.in_features}; got a tensor of "
                f"shape {tuple(x.shape)}"
            )
        parts = (x,) if self.in_splits == 1 else x.split(self._in_sizes, dim=-1)
        rows = [self._row(j, parts) for j in range(self.out_splits)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def _row(self, j: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Each call gets a view of its own: backward is through with a tile when the gradient of its input is there,
        and that of an input which all tiles share is there last of all."""
        first, *rest = (self._tile(i, j)(part.view_as(part)) for i, part in enumerate(parts))
        total: torch.Tensor = first
        for partial in rest:
            total = total + partial
        return total

    def _tile(self, i: int, j: int) -> Tile:
        tile = self.tiles[j * self.in_splits + i]
        assert isinstance(tile, Tile)
        return tile

    def extra_repr(self) -> str:
        bias = self._tile(0, 0).bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )
