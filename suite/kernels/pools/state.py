"""Recurrent state: convolution windows and temporal states, one slot per request, over all linear layers.

A slot holds, for every layer, the last inputs of the causal convolution and the state matrix of every head.
Slot 0 is padding: padded rows of a batch read and write it, nobody else does. A negative slot is skipped.

*Virtual slots* are what the scheduler holds; *kernel slots* index the views here. On a static pool both
coincide as long as the slot lives; a freed slot translates to -1.

Two layouts, the same views. `static`: tensors of its own, layer-major. `strided`: the slots of a byte buffer
that others use as well; a slot is one envelope of `slot_bytes`, stream-major inside: the windows of all
layers, then the temporal states of all layers.
"""

from dataclasses import dataclass

import torch

from suite.errors import InputError
from suite.kernels.ops.state_rows import copy_rows
from suite.kernels.pools import POISON

STATE_DTYPES = (torch.float32, torch.bfloat16)
SKIP = -1


@dataclass(frozen=True, slots=True, eq=False)
class VirtualSlots:
    """State slots as the scheduler holds them, int64 [batch]. Meaningless to a kernel."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KernelSlots:
    """State slots as the views of a `StatePool` are indexed, int64 [batch]; 0 is padding, negative is skipped."""

    tensor: torch.Tensor


def require_kernel_slots(slots: object, where: str) -> torch.Tensor:
    """The tensor of `KernelSlots`; TypeError for anything else."""
    if not isinstance(slots, KernelSlots):
        raise TypeError(f"{where}: needs KernelSlots, got {type(slots).__name__}")
    return slots.tensor


@dataclass(frozen=True, kw_only=True)
class StateGeometry:
    """What one slot holds. conv_dim 0: this family has no convolution (Lightning).

    conv_width: inputs kept per channel, kernel - 1. taps_first: a window is [width, dim] (KDA) instead of
    [dim, width]. A temporal state is [v_heads, v_dim, k_dim].
    """

    layers: tuple[int, ...]
    conv_dim: int
    v_heads: int
    v_dim: int
    k_dim: int
    conv_width: int = 3
    taps_first: bool = False
    conv_dtype: torch.dtype = torch.bfloat16
    temporal_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise InputError("layers", self.layers, "at least one linear layer, each named once")
        for name in ("v_heads", "v_dim", "k_dim", "conv_width"):
            if (value := getattr(self, name)) < 1:
                raise InputError(name, value, "a positive number")
        if self.conv_dim < 0:
            raise InputError("conv_dim", self.conv_dim, "0 (no convolution) or a positive number of channels")
        for name in ("conv_dtype", "temporal_dtype"):
            if (dtype := getattr(self, name)) not in STATE_DTYPES:
                raise InputError(name, dtype, " or ".join(map(str, STATE_DTYPES)))

    @property
    def window_shape(self) -> tuple[int, int]:
        shape = (self.conv_dim, self.conv_width)
        return shape[::-1] if self.taps_first else shape

    @property
    def temporal_shape(self) -> tuple[int, int, int]:
        return (self.v_heads, self.v_dim, self.k_dim)

    @property
    def conv_bytes(self) -> int:
        """Bytes of one layer's window."""
        return self.conv_dim * self.conv_width * self.conv_dtype.itemsize

    @property
    def temporal_bytes(self) -> int:
        """Bytes of one layer's temporal state."""
        return self.v_heads * self.v_dim * self.k_dim * self.temporal_dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """The envelope of one slot over all layers, unpadded."""
        return len(self.layers) * (self.conv_bytes + self.temporal_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class StateViews:
    """One layer's state: conv [slots, *window_shape] or None, temporal [slots, v_heads, v_dim, k_dim].

    A slot's own elements are dense; the stride between slots is whatever the layout makes it.
    """

    conv: torch.Tensor | None
    temporal: torch.Tensor


class StatePool:
    """Per-layer views over `slots + 1` slots. Build with `static` or `strided`.

    `conv` [layers, slots + 1, *window] (None without convolution) and `temporal` [layers, slots + 1, v_heads,
    v_dim, k_dim] are all layers at once. With `poison` everything but slot 0 starts, and every freed slot
    ends, as NaN: alloc does not clear, so whoever reads a state that nobody wrote is seen.
    """

    def __init__(
        self, geometry: StateGeometry, conv: torch.Tensor | None, temporal: torch.Tensor, *, poison: bool
    ) -> None:
        self.geometry, self.conv, self.temporal, self.poison = geometry, conv, temporal, poison
        self.device = temporal.device
        if poison:
            self.poison_slots(torch.arange(1, self.slots + 1, device=self.device))

    @classmethod
    def static(
        cls, geometry: StateGeometry, slots: int, device: torch.device | str, *, poison: bool = False
    ) -> "StatePool":
        """Tensors of its own, zero-filled, for `slots` slots beside the padding one."""
        _require_slots(slots)
        shape = (len(geometry.layers), slots + 1)
        conv = torch.zeros(*shape, *geometry.window_shape, dtype=geometry.conv_dtype, device=device)
        temporal = torch.zeros(*shape, *geometry.temporal_shape, dtype=geometry.temporal_dtype, device=device)
        return cls(geometry, conv if geometry.conv_dim else None, temporal, poison=poison)

    @classmethod
    def strided(
        cls, geometry: StateGeometry, slots: int, buffer: torch.Tensor, offset: int = 0, *, poison: bool = False
    ) -> "StatePool":
        """Views over `buffer` (uint8, flat): slot s is the bytes `offset + s * slot_bytes` on.

        The buffer is taken as it is; only slot 0 is cleared. InputError when it is too small or when its
        address, the offset or an envelope does not keep elements aligned.
        """
        _require_slots(slots)
        if buffer.dtype is not torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
            raise InputError("buffer", (buffer.dtype, tuple(buffer.shape)), "a flat uint8 tensor")
        need = offset + (slots + 1) * geometry.slot_bytes
        if offset < 0 or buffer.numel() < need:
            raise InputError("buffer", buffer.numel(), f"at least {need} bytes for {slots + 1} slots from {offset}")
        layers, envelope = len(geometry.layers), geometry.slot_bytes
        buffer[offset : offset + envelope].zero_()
        conv = None
        if geometry.conv_dim:
            conv = _envelope_view(
                buffer, geometry.conv_dtype, offset, envelope, layers, slots + 1, geometry.window_shape
            )
        first = offset + layers * geometry.conv_bytes
        temporal = _envelope_view(
            buffer, geometry.temporal_dtype, first, envelope, layers, slots + 1, geometry.temporal_shape
        )
        return cls(geometry, conv, temporal, poison=poison)

    @property
    def slots(self) -> int:
        """Slots that may be handed out: the padding slot is not among them."""
        return self.temporal.shape[1] - 1

    def state_views(self, layer: int) -> StateViews:
        """The views of model layer `layer`; KeyError when it is no linear layer of this runner."""
        if layer not in self.geometry.layers:
            raise KeyError(f"layer {layer} has no recurrent state; linear layers are {self.geometry.layers}")
        at = self.geometry.layers.index(layer)
        return StateViews(conv=None if self.conv is None else self.conv[at], temporal=self.temporal[at])

    def streams(self) -> list[torch.Tensor]:
        """Every tensor that holds state, all layers at once: [layers, slots + 1, ...]."""
        return [self.temporal] if self.conv is None else [self.conv, self.temporal]

    def copy_slots(self, sources: KernelSlots, targets: KernelSlots) -> None:
        """Copy whole slots over all layers, in stream order; a pair with a negative member is skipped.

        Sources and targets must not overlap.
        """
        source, target = (require_kernel_slots(slots, "copy_slots") for slots in (sources, targets))
        for stream in self.streams():
            copy_rows(_rows(stream), target, _rows(stream), source)

    def poison_slots(self, kernel_slots: torch.Tensor) -> None:
        """Fill slots with NaN; does nothing unless the pool is poisoned."""
        if self.poison:
            for stream in self.streams():
                _rows(stream).view(torch.int16).index_fill_(1, kernel_slots, POISON)


class VerifyScratch:
    """Where verify leaves the state after every draft token, so that the committed state is only read.

    `conv` [layers, max_batch + 1, draft_tokens, *window] or None, `temporal` likewise. Row r serves position r
    of the batch; all padded and skipped positions share row `max_batch`. 0-filled, never rebound.
    """

    def __init__(self, pool: StatePool, max_batch: int, draft_tokens: int) -> None:
        for name, value in (("max_batch", max_batch), ("draft_tokens", draft_tokens)):
            if value < 1:
                raise InputError(name, value, "a positive number")
        geometry, self.max_batch, self.draft_tokens = pool.geometry, max_batch, draft_tokens
        self.geometry = geometry
        shape = (len(geometry.layers), max_batch + 1, draft_tokens)
        self.conv: torch.Tensor | None = None
        if geometry.conv_dim:
            self.conv = torch.zeros(*shape, *geometry.window_shape, dtype=geometry.conv_dtype, device=pool.device)
        self.temporal = torch.zeros(*shape, *geometry.temporal_shape, dtype=geometry.temporal_dtype, device=pool.device)

    def rows(self, kernel_slots: torch.Tensor) -> torch.Tensor:
        """The row of every position of a batch: its own for a real slot, the shared one otherwise. int64 [batch]."""
        if kernel_slots.numel() > self.max_batch:
            raise InputError("batch", kernel_slots.numel(), f"at most {self.max_batch} requests to verify at once")
        position = torch.arange(kernel_slots.numel(), device=kernel_slots.device)
        return torch.where(kernel_slots > 0, position, self.max_batch)

    def state_views(self, layer: int) -> StateViews:
        """One layer: conv [rows, draft_tokens, *window] or None, temporal [rows, draft_tokens, v_heads, V, K]."""
        at = self.geometry.layers.index(layer)
        return StateViews(conv=None if self.conv is None else self.conv[at], temporal=self.temporal[at])

    def commit(self, pool: StatePool, rows: torch.Tensor, slots: KernelSlots, nodes: torch.Tensor) -> None:
        """Make the state after draft token `nodes` [batch] the committed one, over all layers.

        Negative nodes and slots are skipped: their committed state stays as it was.
        """
        kernel_slots, nodes = require_kernel_slots(slots, "commit"), nodes.long()
        sources = torch.where(nodes >= 0, rows * self.draft_tokens + nodes, SKIP)
        scratch = [self.temporal] if self.conv is None else [self.conv, self.temporal]
        for stream, held in zip(pool.streams(), scratch, strict=True):
            copy_rows(_rows(stream), kernel_slots, held.view(held.shape[0], -1, _rows(stream).shape[2]), sources)


def _rows(stream: torch.Tensor) -> torch.Tensor:
    """[layers, slots, ...] -> [layers, slots, width]; never a copy."""
    return stream.view(*stream.shape[:2], -1)


def _require_slots(slots: int) -> None:
    if slots < 1:
        raise InputError("slots", slots, "at least 1 beside the padding slot")


def _envelope_view(
    buffer: torch.Tensor,
    dtype: torch.dtype,
    first: int,
    envelope: int,
    layers: int,
    slots: int,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """[layers, slots, *shape] of `dtype`: layer l of slot s starts at byte `first + s * envelope + l * its bytes`."""
    size = dtype.itemsize
    for name, value in (("address", buffer.data_ptr()), ("first byte", first), ("slot_bytes", envelope)):
        if value % size:
            raise InputError(name, value, f"a multiple of {size}, so that {dtype} states are aligned")
    numel = 1
    strides: list[int] = []
    for extent in reversed(shape):
        strides.insert(0, numel)
        numel *= extent
    typed = buffer[: buffer.numel() // size * size].view(dtype)
    return typed.as_strided((layers, slots, *shape), (numel, envelope // size, *strides), first // size)
