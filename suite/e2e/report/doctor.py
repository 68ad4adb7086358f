"""What each attention backend can do on this machine."""

import os
from typing import TypedDict

from suite.kernels.attention.support import BACKENDS, SUPPORT, backend_class

REAL_LAUNCHERS = ("native", "interpreter")  # they run the backend's own kernels; `reference` only its index logic


class DoctorRow(TypedDict):
    """One backend here. `refusal` says why it is not usable, with need and got."""

    backend: str
    family: str
    usable: bool
    launchers: list[str]
    refusal: str | None


def doctor_rows() -> list[DoctorRow]:
    """One row per registered backend, on the GPU where there is one and on the CPU elsewhere. Imports torch."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # as the child of an interpreter cell does, before triton is imported
    return [doctor_row(name, device) for name in BACKENDS]


def doctor_row(name: str, device: str) -> DoctorRow:
    refusals = dict(backend_class(name).launchers(device))
    usable = any(refusals.get(launcher, "absent") is None for launcher in REAL_LAUNCHERS)
    reasons = [f"{launcher}: {reason}" for launcher, reason in refusals.items() if reason is not None]
    return DoctorRow(
        backend=name,
        family=", ".join(SUPPORT[name].families),
        usable=usable,
        launchers=[launcher for launcher, reason in refusals.items() if reason is None],
        refusal=None
        if usable
        else "; ".join(reasons) or f"{name}: needs a native or interpreter launcher, has none: it is the oracle",
    )
