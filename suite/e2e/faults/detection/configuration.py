"""Configuration faults: what was asked for is not what ran, or one runner's choice becomes another's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from suite.e2e.faults.detection.layers import REFERENCE, layers
from suite.e2e.faults.detection.rig import Rig, RigConfig
from suite.e2e.faults.detection.signals import cell_of, passed, ruled
from suite.e2e.faults.fault import Setting, Signal, plants
from suite.e2e.faults.seams import unplanted
from suite.e2e.matrix.plan import load_plan
from suite.errors import InputError
from suite.kernels.attention import support
from suite.kernels.linear import stamp as stamping
from suite.kernels.linear.stamp import LinearAttnBackends, LinearAttnFlags
from suite.records import Arm
from suite.scan.rules import load_rules
from suite.scan.sources import scan

STAMP = "suite.kernels.linear.stamp"
DIFFERS, FLAGS, UNSTAMPED = "stamp.differs", "stamp.flags_changed", "stamp.unstamped_runner_ran"
HERE = "suite.e2e.faults.detection.configuration"


def stamps(setting: Setting) -> Iterator[Signal]:
    """Two runners with flags of their own, in both orders of building, and one that nobody stamps."""

    class Runner:
        """What a stamp is set on: a class of this call's own, for a fault may leave something on it."""

    flags = LinearAttnFlags(prefill="flashinfer", verify="cutedsl"), LinearAttnFlags(base="cutedsl", decode="triton")
    want = (
        LinearAttnBackends(decode="triton", prefill="flashinfer", verify="cutedsl"),
        LinearAttnBackends(decode="triton", prefill="helion", verify="triton"),
    )
    for order in ((0, 1), (1, 0)):
        runners = [Runner(), Runner()]
        before = [repr(each) for each in flags]
        for which in order:
            stamping.stamp_runner(runners[which], stamping.resolve(flags[which], prefill_default="helion"))
        for which in order:
            if (got := stamping.stamp_of(runners[which])) != want[which]:
                yield Signal(name=DIFFERS, text=f"runner {which} of order {order}: {got}, asked for {want[which]}")
        if [repr(each) for each in flags] != before:
            yield Signal(name=FLAGS, text=f"the operator's flags are {flags} now, they were {before}")
    try:
        got = stamping.stamp_of(Runner())
    except AttributeError:
        return
    yield Signal(name=UNSTAMPED, text=f"a runner that nobody stamped runs {got}")


def launched(setting: Setting) -> Iterator[Signal]:
    """A cell asks for a launcher; the outcome says which one its backend has."""
    rig = Rig(RigConfig(backend="triton", launcher="interpreter", graph=False, device=setting.device))
    cell = cell_of(backend="triton", launcher="interpreter")
    yield from ruled(cell, Arm(pool="static"), passed(launcher=rig.backend.launcher), None)


def built(setting: Setting) -> Iterator[Signal]:
    """A cell asks for a backend and a page size; the runner says what it has."""
    for name in ("fa3", "triton"):
        backend = support.backend_class(name)
        if backend.name != name:
            yield Signal(name="support.another_backend", text=f"asked for {name}, got {backend.name}")
    rig = Rig(RigConfig(page_size=8, graph=False, device=setting.device))
    if rig.translator.page_size != 8:
        text = f"asked for pages of 8 tokens, the runner has pages of {rig.translator.page_size}"
        yield Signal(name="support.another_page_size", text=text)


MATRIX = """
name = "typo"
[workloads.tiny]
requests = 2
prompt_tokens = 8
new_tokens = 4
batch = 2
chunk_tokens = 8
[defaults]
family = "engine"
model = "gpt-oss-mini"
backend = "reference"
launcher = "reference"
device = "cpu"
dtype = "float32"
page_size = 16
graph = false
seed = 1
timeout_s = 60
workload = "tiny"
pool = ["static"]
page_sizes = 32
[[cells]]
"""


def typo(setting: Setting) -> Iterator[Signal]:
    """A matrix with `page_sizes` for `page_size` is refused, naming the field."""
    with TemporaryDirectory(prefix="kvproof-faults-") as folder:
        path = Path(folder) / "typo.toml"
        path.write_text(MATRIX)
        try:
            load_plan(path)
        except InputError as error:
            if "page_sizes" in str(error):
                return
            raise
    yield Signal(name="plan.typo_accepted", text="page_sizes = 32 was read and dropped: the cell runs pages of 16")


def source_of_a_backend() -> str:
    """A backend file as it should be: it asks the translator."""
    return '"""A backend."""\n\n\ndef plan(batch, translator):\n    return translator.index_table_for_batch(batch)\n'


def scanned(setting: Setting) -> Iterator[Signal]:
    """A checkout whose backend file is what `source_of_a_backend` says."""
    with TemporaryDirectory(prefix="kvproof-faults-") as folder:
        root = Path(folder)
        file = root / "suite" / "kernels" / "attention" / "mine.py"
        file.parent.mkdir(parents=True)
        (root / "pyproject.toml").write_text('[project]\nname = "checkout"\n')
        file.write_text(source_of_a_backend())
        with unplanted():
            for found in scan(root, load_rules("kvproof"))["findings"]:
                yield Signal(name=f"scan.{found['rule']}", text=f"{found['file']}:{found['line']} {found['message']}")


@plants(
    "configuration", f"{STAMP}:stamp_runner", stamps, DIFFERS, UNSTAMPED, "linear.invariant", source="B31", smoke=True
)
def draft_overwrites_the_targets_stamp(own: Any) -> Any:
    """the stamp is kept for the whole process: the runner built last decides for both"""
    return lambda runner, stamp: setattr(type(runner), "linear_attn_backends", stamp)


@plants("configuration", f"{STAMP}:stamp_runner", stamps, DIFFERS, source="B31")
def draft_inherits_the_targets_stamp(own: Any) -> Any:
    """the runner built first decides for both"""
    first: list[Any] = []

    def inherited(runner: Any, stamp: Any) -> None:
        first.append(stamp)
        own(runner, first[0])

    return inherited


@plants("configuration", f"{STAMP}:stamp_of", stamps, UNSTAMPED, source="B31")
def unstamped_runner_takes_a_default(own: Any) -> Any:
    """a runner that nobody stamped runs triton everywhere"""
    everywhere = LinearAttnBackends(decode="triton", prefill="triton", verify="triton")
    return lambda runner: getattr(runner, "linear_attn_backends", everywhere)


@plants("configuration", f"{STAMP}:resolve", stamps, DIFFERS, source="B31")
def verify_flag_ignored(own: Any) -> Any:
    """the verify kernel follows decode although another one was asked for"""
    return lambda flags, **more: own(replace(flags, verify=None), **more)


@plants("configuration", f"{STAMP}:resolve", stamps, DIFFERS)
def automatic_default_beats_the_flag(own: Any) -> Any:
    """the automatic default of the prefill kernel is taken although another one was asked for"""

    def beaten(flags: Any, *, prefill_default: str | None = None) -> Any:
        asked = flags if prefill_default is None else replace(flags, prefill=None)
        return own(asked, prefill_default=prefill_default)

    return beaten


@plants("configuration", f"{STAMP}:resolve", stamps, FLAGS, source="B31")
def automatic_default_becomes_a_flag(own: Any) -> Any:
    """the automatic default is written into the operator's flags, where the next runner takes it for a wish"""

    def kept(flags: Any, *, prefill_default: str | None = None) -> Any:
        stamp = own(flags, prefill_default=prefill_default)
        object.__setattr__(flags, "prefill", stamp.prefill)
        return stamp

    return kept


@plants(
    "configuration",
    "suite.kernels.attention.base:AttentionBackend.__init__",
    launched,
    "judge.launcher_differs",
)
def launcher_falls_back(own: Any) -> Any:
    """the oracle executes what another launcher was asked to, and the row is none the wiser but for its own word"""

    def fallen(self: Any, *, pool: Any, translator: Any, launcher: Any, sinks: bool) -> None:
        own(self, pool=pool, translator=translator, launcher="reference", sinks=sinks)

    return fallen


@plants("configuration", "suite.kernels.attention.support:backend_class", built, "support.another_backend")
def backend_falls_back(own: Any) -> Any:
    """a backend that is asked for is replaced by the oracle's"""
    return lambda name: own("reference")


@plants(
    "configuration",
    "suite.kernels.translator:KVIndexTranslator.__init__",
    built,
    "support.another_page_size",
    severity=4,
)
def page_size_snaps(own: Any) -> Any:
    """pages are half as long as was asked for"""

    def snapped(self: Any, **asked: Any) -> None:
        own(self, **asked)
        self.page_size //= 2

    return snapped


@plants("configuration", "suite.e2e.engine.churn:Churn.shuffle", layers(REFERENCE), "judge.identity_map")
def churn_stage_left_out(own: Any) -> Any:
    """no page moves: the run is green and proves nothing"""
    return lambda self: None


@plants("configuration", "suite.e2e.matrix.plan:check_keys", typo, "plan.typo_accepted")
def unknown_keys_dropped(own: Any) -> Any:
    """a key of a matrix that nobody knows is dropped in silence"""
    return lambda field, table, known: {key: value for key, value in table.items() if key in known}


@plants("configuration", f"{HERE}:source_of_a_backend", scanned, "scan.write-translation", "scan.kernel-ids")
def backend_translates_by_itself(own: Any) -> Any:
    """a backend translates write ids in a place of its own, and calls the result kernel ids"""
    return lambda: (
        own()
        + "\n\ndef write(batch, translator, KernelIds):\n"
        + "    return KernelIds(translator.write_loc(batch.virtual_write_ids).tensor)\n"
    )


@plants("configuration", f"{HERE}:source_of_a_backend", scanned, "scan.capability-probe", "scan.page-map")
def backend_probes_the_allocator(own: Any) -> Any:
    """a backend asks what kind of allocator it has and reads its page map"""
    return lambda: (
        own()
        + "\n\ndef probe(allocator):\n"
        + '    return allocator.page_map("full") if hasattr(allocator, "page_map") else None\n'
    )
