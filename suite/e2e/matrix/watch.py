"""What happened to the GPU and to the compiler while a child took times: clocks, throttling, compilations.

NVML answers for the GPU. Kernels compiled inside a timed window would be timed with it, so Triton tells
of each.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from suite.errors import InputError
from suite.records import Guards


@dataclass
class Watch:
    """One timed window; `guards()` once it is over."""

    device: str
    compiles: int = 0
    clocks: list[float] = field(default_factory=list)
    throttle: int = 0

    def guards(self) -> Guards:
        if self.device != "cuda":
            return Guards(compiles=self.compiles)
        return Guards(
            gpu_uuid=gpu_uuid(),
            sm_mhz=(self.clocks[0], self.clocks[-1]),
            throttle=self.throttle,
            compiles=self.compiles,
        )

    def look(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            clock, throttle = clock_and_throttle()
            self.clocks.append(clock)
            self.throttle |= throttle

    def count(self, **compiled: Any) -> None:
        """Triton's hook: called after each compilation."""
        self.compiles += 1


@contextlib.contextmanager
def watch(device: str) -> Iterator[Watch]:
    """Watch the timed window that the `with` holds. The work must be warm: an idle GPU clocks low."""
    from triton import knobs

    seen = Watch(device)
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = seen.count
    try:
        seen.look()
        yield seen
        seen.look()
    finally:
        knobs.runtime.jit_post_compile_hook = before


def gpu_uuid() -> str:
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def clock_and_throttle() -> tuple[float, int]:
    """(SM clock in MHz, NVML's mask of throttle reasons) of the GPU in use."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise InputError("pynvml", None, "the package nvidia-ml-py, which tells the GPU's clocks") from error
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid())
    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    return float(clock), int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
