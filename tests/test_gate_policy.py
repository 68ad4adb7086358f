"""Policies: strict, dotted fields in every error, and the shipped ones are whole."""

import copy
import math
from pathlib import Path

import pytest

from suite.e2e.gate.policy import load_policy, parse_policy
from suite.errors import InputError
from suite.records import content_hash
from tests.gate_rig import policy_table

ROOT = Path(__file__).parents[1]


def change(path, value):
    """The table with the value at `path`, removed when it is `...`."""
    table = copy.deepcopy(policy_table())
    at = table
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return table


ITL = ("endpoints", "itl")
RULE = ("cells", 0)
ACCEPT = {"kind": "accept", "margin": 0.05, "min_prompts": 9, "floor": math.inf, "fail_when": "beyond_margin"}


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("margn",), 1, "margn"),
        (("alpha",), ..., "alpha"),
        (("alpha",), 0.0, "alpha"),
        (("alpha",), 1.0, "alpha"),
        (("alpha",), True, "alpha"),
        (("alpha",), math.nan, "alpha"),
        (("fdr",), math.inf, "fdr"),
        (("power",), "0.8", "power"),
        (("candidates",), [], "candidates"),
        (("candidates",), ["static"], "candidates"),
        (("candidates",), ["unified", "unified"], "candidates"),
        (("baseline",), "unified", "candidates"),
        (("launchers",), [], "launchers"),
        (("launchers",), ["vendor"], "launchers[0]"),
        (("smoke",), "maybe", "smoke"),
        (("rows", "crashed"), "pass", "rows.crashed"),
        (("rows", "wrong"), "ignore", "rows.wrong"),
        (("rows", "refused"), ..., "rows.refused"),
        ((*ITL, "margn"), 0.02, "endpoints.itl.margn"),
        ((*ITL, "margin"), 2, "endpoints.itl.margin"),
        ((*ITL, "margin"), math.nan, "endpoints.itl.margin"),
        ((*ITL, "margin"), ..., "endpoints.itl.margin"),
        ((*ITL, "kind"), "latencies", "endpoints.itl.kind"),
        ((*ITL, "metric"), "itl", "endpoints.itl.metric"),
        ((*ITL, "metric"), "max_logit_diff", "endpoints.itl.metric"),
        ((*ITL, "looks"), [], "endpoints.itl.looks"),
        ((*ITL, "looks"), [8, 4], "endpoints.itl.looks"),
        ((*ITL, "looks"), [2], "endpoints.itl.looks[0]"),
        ((*ITL, "fail_when"), "slower", "endpoints.itl.fail_when"),
        (("endpoints", "flips", "psi0"), 1.0, "endpoints.flips.psi0"),
        (("endpoints", "accept"), ACCEPT, "endpoints.accept.floor"),
        (("cells",), [], "cells"),
        (("cells",), ..., "cells"),
        (("cells",), [3], "cells[0]"),
        ((*RULE, "min_cells"), -1, "cells[0].min_cells"),
        ((*RULE, "selct"), {}, "cells[0].selct"),
        ((*RULE, "select"), {}, "cells[0].select"),
        ((*RULE, "select"), {"famly": "engine"}, "cells[0].select.famly"),
        ((*RULE, "select"), {"family": []}, "cells[0].select.family"),
        ((*RULE, "endpoints"), [], "cells[0].endpoints"),
        ((*RULE, "endpoints"), ["ttl"], "cells[0].endpoints"),
        ((*RULE, "endpoints"), ["flips"], "cells[0].endpoints"),
    ],
)
def test_what_is_wrong_is_named(path, value, field):
    with pytest.raises(InputError) as caught:
        parse_policy(change(path, value))
    assert caught.value.field == field


def test_a_good_policy_is_read():
    policy = parse_policy(policy_table())
    assert policy.endpoints["itl"].looks == (8,)
    assert policy.cells[0].select == {"family": ["engine"]}
    assert policy.cells[0].fits({"family": "engine", "model": "m"})
    assert not policy.cells[0].fits({"family": "kernel"})
    assert content_hash(policy) == content_hash(parse_policy(policy_table()))
    assert content_hash(policy) != content_hash(parse_policy(policy_table(alpha=0.04)))


def test_an_endpoint_may_have_its_own_alpha():
    policy = parse_policy(change((*ITL, "alpha"), 0.01))
    assert [policy.alpha_of(policy.endpoints[name]) for name in ("itl", "exact")] == [0.01, 0.05]


@pytest.mark.parametrize("content", [b"alpha = ", b"\xff", b"alpha = 1979-13-01"])
def test_a_file_that_is_no_toml_is_one_error(tmp_path, content):
    (tmp_path / "p.toml").write_bytes(content)
    with pytest.raises(InputError, match="valid TOML"):
        load_policy(tmp_path / "p.toml")
    with pytest.raises(InputError, match="readable"):
        load_policy(tmp_path / "absent.toml")


@pytest.mark.parametrize("name", ["merge", "nightly"])
def test_the_shipped_policies_are_whole(name):
    policy = load_policy(ROOT / "gates" / f"{name}.toml")
    assert policy.name == name
    assert policy.smoke == "required"
