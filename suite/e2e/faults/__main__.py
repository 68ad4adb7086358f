"""The detection run as a process of its own: `python -m suite.e2e.faults [--kind K] [--smoke] [--fresh] [--json]`.

With --json one row a line on stdout, each as soon as it is known; progress on stderr. Exit code 1 when a fault is
missed or a clean twin is not clean. With --twins N nothing is planted: clean comparisons over seeds, and the alarms.
"""

import argparse
import os
import sys

import msgspec

from suite.errors import InputError


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m suite.e2e.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", help="only faults of this kind")
    parser.add_argument("--smoke", action="store_true", help="only the smoke set")
    parser.add_argument("--fresh", action="store_true", help="a fresh pool without churn, as a naive suite has it")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="rows on stdout, one a line")
    parser.add_argument("--twins", type=int, metavar="N", help="plant nothing: N clean comparisons over many seeds")
    asked = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TQDM_DISABLE"] = "1"  # lm-eval's progress of a dozen items
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    from suite.e2e.faults.detection.run import FaultRow, choose, detect, missed
    from suite.e2e.faults.fault import Setting

    if asked.twins is not None:
        return clean_twins(asked.twins)

    def told(row: FaultRow) -> None:
        if asked.json:
            print(msgspec.json.encode(row).decode(), flush=True)
        verdict = "caught" if row["caught"] else "MISSED"
        twin = "" if row["clean_twin_passed"] else ", its clean twin FAILED"
        print(f"{row['kind']:13} {row['fault']:34} {verdict}{twin} in {row['seconds']:.1f} s", file=sys.stderr)

    try:
        chosen = choose(asked.kind, asked.smoke)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    rows = detect(chosen, Setting(seed=asked.seed, fresh=asked.fresh, device=asked.device), told)
    return 1 if missed(rows) else 0


def clean_twins(count: int) -> int:
    """Exit code 1 when a signal fires in a clean twin."""
    from suite.e2e.faults.detection.twins import compare_twins

    try:
        found = compare_twins(count, told=lambda text: print(text, file=sys.stderr, flush=True))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    numbers = {"comparisons": found.comparisons, "scenarios": found.scenarios, "seeds": found.seeds}
    alarms = [{"faults": a.faults, "seed": a.seed, "signals": [s.name for s in a.signals]} for a in found.alarms]
    print(msgspec.json.encode({**numbers, "alarms": alarms}).decode())
    return 1 if found.alarms else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
