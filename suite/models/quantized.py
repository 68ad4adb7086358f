"""How a parameter is stored: plainly, as MXFP4 blocks with scales, or as fp8 with a scale per square of weights.

Quantised tensors are dequantised one by one while the checkpoint streams in, on the device of the parameter they
fill. What config.json declares and what the tensors' headers say must agree, before a weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from suite.errors import CheckpointError, InputError
from suite.models.config import Fields
from suite.models.stored import TensorHeader

DTYPES = ("BF16", "F16", "F32")
FP8, BYTE = "F8_E4M3", "U8"
BLOCKS, SCALES, SCALE_INV = "_blocks", "_scales", "_scale_inv"
MXFP4_GROUP = 32  # elements that share a scale, two of them in a byte
# the sixteen E2M1 values: sign, two bits of exponent, one of mantissa
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127

Shape = tuple[int, ...]
Headers = Mapping[str, TensorHeader]


@dataclass(frozen=True)
class Quantization:
    """What config.json says of the stored weights. block: rows and columns that share an fp8 scale."""

    method: Literal["none", "mxfp4", "fp8"]
    block: tuple[int, int] = (128, 128)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Quantization":
        """From `quantization_config` of a config.json; none without one. Raises InputError by field."""
        if values.get("quantization_config") is None:
            return cls("none")
        fields = Fields(values["quantization_config"], "quantization_config.")
        method = fields.raw("quant_method")
        if method == "mxfp4":
            fields.raw("modules_to_not_convert", None)  # the headers say which are
            fields.refuse_unread()
            return cls("mxfp4")
        if method != "fp8":
            raise InputError("quantization_config.quant_method", method, "'mxfp4' or 'fp8'")
        fields.only("fmt", "e4m3", "e4m3")
        fields.raw("activation_scheme", None)  # activations stay as they are
        fields.raw("modules_to_not_convert", None)
        block = fields.raw("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(type(side) is int and side > 0 for side in block):
            raise InputError("quantization_config.weight_block_size", block, "two positive whole numbers")
        fields.refuse_unread()
        return cls("fp8", (block[0], block[1]))


class Recipe(Protocol):
    """The tensors that one parameter, or a view of it, is made of."""

    parts: tuple[str, ...]

    def check(self, held: Headers, shape: Shape) -> None:
        """Raise CheckpointError for the first part whose shape or dtype cannot fill `shape`."""

    def fill(self, target: torch.Tensor, *parts: torch.Tensor) -> None:
        """Write the parts into `target`."""


@dataclass(frozen=True)
class Plain:
    """One tensor of a float dtype."""

    parts: tuple[str]

    def check(self, held: Headers, shape: Shape) -> None:
        _require(held, self.parts[0], shape, DTYPES)

    def fill(self, target: torch.Tensor, *parts: torch.Tensor) -> None:
        target.copy_(parts[0])


@dataclass(frozen=True)
class Mxfp4:
    """gpt-oss' experts: blocks u8 [experts, outputs, groups, 16], low nibble first, and scales u8 [experts, outputs,
    groups], exponents of two. The parameter is [experts, inputs, outputs], inputs = 32 * groups."""

    parts: tuple[str, str]

    def check(self, held: Headers, shape: Shape) -> None:
        experts, inputs, outputs = shape
        if inputs % MXFP4_GROUP:
            raise CheckpointError(self.parts[0], inputs, f"inputs in whole groups of {MXFP4_GROUP}")
        scales = (experts, outputs, inputs // MXFP4_GROUP)
        _require(held, self.parts[0], (*scales, MXFP4_GROUP // 2), (BYTE,))
        _require(held, self.parts[1], scales, (BYTE,))

    def fill(self, target: torch.Tensor, *parts: torch.Tensor) -> None:
        for expert, blocks, scales in zip(target, *parts, strict=True):  # one at a time: fp32 is eight times larger
            expert.copy_(dequantize_mxfp4(blocks.to(target.device), scales.to(target.device)).T)


@dataclass(frozen=True)
class BlockFp8:
    """weight: e4m3 [outputs, inputs]; its factors: fp32, one per `block` of the weight, the last ones cut off."""

    parts: tuple[str, str]
    block: tuple[int, int]

    def check(self, held: Headers, shape: Shape) -> None:
        if len(shape) != 2:
            raise CheckpointError(self.parts[0], list(shape), "a matrix: fp8 scales lie over rows and columns")
        _require(held, self.parts[0], shape, (FP8,))
        squares = tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True))
        _require(held, self.parts[1], squares, ("F32",))

    def fill(self, target: torch.Tensor, *parts: torch.Tensor) -> None:
        weight, factors = (part.to(target.device) for part in parts)
        target.copy_(dequantize_fp8(weight, factors, self.block))


def recipes(held: Headers, shapes: Mapping[str, Shape], quantization: Quantization) -> dict[str, Recipe]:
    """How each parameter named in `shapes` is made of the tensors held.

    Raises CheckpointError for the first tensor, by name, that is missing, unused, of the wrong shape or dtype, or
    quantised otherwise than config.json says.
    """
    found = {name: _recipe(name, held, quantization) for name in shapes}
    used = {part for recipe in found.values() for part in recipe.parts}
    for name in sorted(used - set(held)):
        shape = f"shape {list(shapes[name])}" if name in shapes else "factors of the quantised one beside it"
        raise CheckpointError(name, "missing", f"a tensor of {shape} in the checkpoint")
    for name in sorted(set(held) - used):
        raise CheckpointError(name, f"a tensor of shape {list(held[name].shape)}", "no such tensor: the model has none")
    for name in sorted(found):
        found[name].check(held, shapes[name])
    return found


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks: u8 [rows, groups, 16], scales: u8 [rows, groups] -> fp32 [rows, 32 * groups].

    Values E2M1 * 2 ** (scale - 127) (OCP Microscaling Formats 1.0). Scale 255 is its NaN.
    """
    values = torch.tensor(E2M1, device=blocks.device)
    pairs = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)  # [rows, groups, 32]
    exponents = scales.int().sub(E8M0_BIAS).unsqueeze(-1)
    # 2 ** 128 is past fp32: half the scale twice
    half = exponents // 2
    wide = torch.ldexp(torch.ldexp(values[pairs.long()], half), exponents - half)
    return wide.masked_fill((scales == 255).unsqueeze(-1), torch.nan).flatten(-2)


def dequantize_fp8(weight: torch.Tensor, factors: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """weight: e4m3 [rows, columns], factors: fp32 [ceil(rows / block), ceil(columns / block)] -> fp32."""
    rows, columns = weight.shape
    wide = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * wide


def _recipe(name: str, held: Headers, quantization: Quantization) -> Recipe:
    """By what is there: blocks instead of the tensor, factors beside it or an fp8 dtype, or just the tensor."""
    if name + BLOCKS in held or name + SCALES in held:
        if quantization.method != "mxfp4":
            part = name + (BLOCKS if name + BLOCKS in held else SCALES)
            raise CheckpointError(part, f"MXFP4 {held[part].dtype}", f"unquantised experts, {name}")
        return Mxfp4((name + BLOCKS, name + SCALES))
    if name + SCALE_INV in held or (name in held and held[name].dtype == FP8):
        if quantization.method != "fp8":
            part = name if name in held else name + SCALE_INV
            raise CheckpointError(part, held[part].dtype, f"unquantised weights, one of {', '.join(sorted(DTYPES))}")
        return BlockFp8((name, name + SCALE_INV), quantization.block)
    return Plain((name,))


def _require(held: Headers, name: str, shape: Shape, dtypes: tuple[str, ...]) -> None:
    if held[name].shape != shape:
        raise CheckpointError(name, list(held[name].shape), f"shape {list(shape)}")
    if held[name].dtype not in dtypes:
        expected = f"one of {', '.join(sorted(dtypes))}" if len(dtypes) > 1 else dtypes[0]
        raise CheckpointError(name, held[name].dtype, expected)
