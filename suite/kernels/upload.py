"""Host integers to the device, without waiting for it: every kernel launch that follows sees them."""

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.ArrayLike, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of the shape of `values` on `device`; never shares memory with `values`."""
    host = torch.from_numpy(np.array(values, dtype=np.int64)).to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
