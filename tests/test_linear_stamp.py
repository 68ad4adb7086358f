"""The stamp: a pure resolver, one record per runner, and defaults that never become configuration."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.errors import InvariantError, UnknownNameError
from suite.kernels.linear import LINEAR_BACKENDS, linear_backend_class
from suite.kernels.linear.stamp import (
    KERNELS,
    LinearAttnBackends,
    LinearAttnFlags,
    PrefillFacts,
    gdn_prefill_default,
    resolve,
    stamp_of,
    stamp_runner,
)
from suite.kernels.pools.state import StateGeometry, StatePool

NAME = st.sampled_from(KERNELS)
MAYBE = st.none() | NAME
FLAGS = st.builds(LinearAttnFlags, base=NAME, decode=MAYBE, prefill=MAYBE, verify=MAYBE)
H200 = PrefillFacts(
    head_dims=(128, 128),
    capability=(9, 0),
    cuda_major=13,
    chunk_tokens=8192,
    dynamic_chunks=False,
    deterministic=False,
    state_dtype="float32",
    importable=True,
)


@given(flags=FLAGS, default=MAYBE)
def test_resolver(flags, default):
    stamp = resolve(flags, prefill_default=default)
    assert stamp.decode == (flags.decode or flags.base)
    assert stamp.prefill == (flags.prefill or default or flags.base)
    if flags.verify is not None:
        assert stamp.verify == flags.verify
    else:
        assert stamp.verify == ("flashinfer" if stamp.decode == "flashinfer" else "triton")


@given(flags=FLAGS, one=MAYBE, other=MAYBE)
def test_a_default_changes_prefill_alone_and_is_stored_nowhere(flags, one, other):
    before = dataclasses.asdict(flags)
    first, second = resolve(flags, prefill_default=one), resolve(flags, prefill_default=other)
    assert dataclasses.asdict(flags) == before
    assert dataclasses.replace(first, prefill=second.prefill) == second
    assert resolve(flags, prefill_default=one) == first
    if flags.prefill is not None:
        assert first == second


@given(flags=FLAGS, default=MAYBE, later=FLAGS)
def test_runners_keep_their_own_stamps(flags, default, later):
    target, draft = SimpleNamespace(), SimpleNamespace()
    stamp_runner(target, resolve(flags, prefill_default=default))
    stamp_runner(draft, resolve(later))  # a second runner resolves anew, without the first one's default
    assert stamp_of(target) == resolve(flags, prefill_default=default)
    assert stamp_of(draft) == resolve(later)


def test_unknown_names_are_named():
    with pytest.raises(UnknownNameError, match=r"linear_attn_decode: got 'tritn'.*did you mean 'triton'"):
        resolve(LinearAttnFlags(decode="tritn"))
    with pytest.raises(UnknownNameError, match=r"linear_attn_prefill_default: got 'auto'"):
        resolve(LinearAttnFlags(), prefill_default="auto")
    with pytest.raises(UnknownNameError, match=r"linear_backend: got 'gdm'.*did you mean 'gdn'"):
        linear_backend_class("gdm")


def test_a_stamp_is_frozen_and_final():
    runner = SimpleNamespace()
    stamp = resolve(LinearAttnFlags())
    stamp_runner(runner, stamp)
    stamp_runner(runner, stamp)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stamp.prefill = "flashinfer"
    with pytest.raises(InvariantError, match=r"stamped LinearAttnBackends.*already"):
        stamp_runner(runner, dataclasses.replace(stamp, prefill="flashinfer"))
    assert stamp_of(runner) == stamp


@pytest.mark.parametrize("name", sorted(LINEAR_BACKENDS))
def test_an_unstamped_runner_raises_in_the_real_constructor(name):
    shape = StateGeometry(
        layers=(0,), conv_dim=0 if name == "lightning" else 64, v_heads=2, v_dim=16, k_dim=16, taps_first=name == "kda"
    )
    pool = StatePool.static(shape, 1, "cpu")
    with pytest.raises(AttributeError, match="linear_attn_backends"):
        linear_backend_class(name)(runner=SimpleNamespace(), pool=pool, launcher="reference")
    with pytest.raises(TypeError, match="needs LinearAttnBackends, got str"):
        linear_backend_class(name)(
            runner=SimpleNamespace(linear_attn_backends="triton"), pool=pool, launcher="reference"
        )


def test_gdn_prefill_default():
    assert gdn_prefill_default(LinearAttnFlags(), H200) == "flashinfer"
    assert resolve(LinearAttnFlags(), prefill_default="flashinfer") == LinearAttnBackends(
        decode="triton", prefill="flashinfer", verify="triton"
    )
    for asked in (LinearAttnFlags(prefill="triton"), LinearAttnFlags(base="cutedsl")):
        assert gdn_prefill_default(asked, H200) is None
    for change in (
        {"head_dims": (128, 64)},
        {"capability": None},
        {"capability": (8, 0)},
        {"chunk_tokens": 65536},
        {"dynamic_chunks": True},
        {"deterministic": True},
        {"state_dtype": "bfloat16"},
        {"importable": False},
        {"capability": (10, 0)},
        {"capability": (10, 0), "state_dtype": "bfloat16", "cuda_major": 12},
    ):
        assert gdn_prefill_default(LinearAttnFlags(), dataclasses.replace(H200, **change)) is None, change
    blackwell = dataclasses.replace(H200, capability=(10, 3), state_dtype="bfloat16")
    assert gdn_prefill_default(LinearAttnFlags(), blackwell) == "flashinfer"
