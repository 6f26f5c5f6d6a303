"""Mutates the scheduling core, one change at a time, and says which mutants no test notices.

``python tests/mutations/generated.py [--sample N] [--seed S] [--jobs J] [--list] [--verbose] [NAME...]``: NAME is a file,
a function or a mutant, such as ``builder``, ``builder.Builder.prefill`` or ``builder.Builder.prefill#3``; without names
everything in ``FILES``. Needs mutmut, for its operators: ``pip install mutmut==3.8.1``. Exit status: 1 if a mutant
survives that ``explained.txt`` does not explain.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from explained import EXPLAINED
from forks import Mutant, Verdict, run
from mutants import mutants_of, sample

FILES = (
    *(f"core/minisgl/sched/{name}.py" for name in ("scheduler", "builder", "residency", "rows")),
    *(f"core/minisgl/sched/{name}.py" for name in ("sharing", "pages", "request", "cache")),
    "plugins/minisgl_plugins/cache/radix.py",
    "plugins/minisgl_plugins/scheduler/chunked.py",
    "plugins/minisgl_plugins/scheduler/queue.py",
)
RULES = ("tests/core/test_scheduler.py", "tests/core/test_cache_machine.py")
HISTORIES = (
    "tests/core/test_policies.py",
    "tests/contracts/test_contracts.py",
    "tests/core/test_scheduler_fuzz.py",
    "-k",
    "not fresh_process",
)


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Raises: SystemExit if a name is of no mutant."""
    every = [m for file in FILES for m in mutants_of(file)]
    if not names:
        return every
    parts = {m.name: {m.name, m.name.split("#")[0], m.name.split(".")[0]} for m in every}
    if unknown := set(names) - set[str]().union(*parts.values()):
        sys.exit(f"unknown names: {', '.join(sorted(unknown))}; --list shows all {len(every)} mutants")
    return [m for m in every if parts[m.name] & set(names)]


def reason(v: Verdict) -> str | None:
    """Why it may survive, if that is known."""
    function = v.mutant.name.split("#")[0]
    return EXPLAINED.get(f"{function}: {v.mutant.change.strip()}")


def table(verdicts: Sequence[Verdict]) -> str:
    """Counts by file; the explained are among the survivors."""
    lines = [f"{'file':44} {'mutants':>8} {'killed':>8} {'timeout':>8} {'survived':>9} {'explained':>10}"]
    by_file: dict[str, Counter[str]] = {}
    for v in verdicts:
        n = by_file.setdefault(v.mutant.file, Counter())
        n[v.outcome] += 1
        n["explained"] += v.outcome == "survived" and reason(v) is not None
    by_file["all"] = sum(by_file.values(), Counter())
    for file, n in by_file.items():
        total = n["killed"] + n["timeout"] + n["survived"]
        lines.append(f"{file:44} {total:8} {n['killed']:8} {n['timeout']:8} {n['survived']:9} {n['explained']:10}")
    caught = by_file["all"]["killed"] + by_file["all"]["timeout"]
    return "\n".join([*lines, f"caught: {caught / max(1, len(verdicts)):.1%}"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sample", type=int, metavar="N", help="take N mutants, as evenly over the functions as can be"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--quick", action="store_true", help="run the rules and the cache machine alone")
    parser.add_argument("--list", action="store_true", help="show the mutants and end")
    parser.add_argument("--verbose", action="store_true", help="show those that are killed too")
    parser.add_argument("names", nargs="*", metavar="NAME", help="file, function or mutant; all by default")
    args = parser.parse_args(argv)
    mutants = chosen(args.names)
    if args.sample is not None:
        mutants = sample(mutants, args.sample, args.seed)
    if args.list:
        print(*(f"{m.name}: {m.change}" for m in mutants), f"{len(mutants)} mutants", sep="\n")
        return 0

    def tell(v: Verdict) -> None:
        why = reason(v) if v.outcome == "survived" else None
        if args.verbose or (v.outcome == "survived" and why is None):
            where = f"in {v.test}" if v.test else f"after {v.tests} tests"
            end = "" if why is None else f"  ({why})"
            print(f"{v.mutant.name} {v.outcome} {where}, {v.seconds:.1f} s: {v.mutant.change}{end}", flush=True)

    began = time.monotonic()
    verdicts = {v.mutant.name: v for v in run(mutants, RULES, args.jobs, tell)}
    left = [v.mutant for v in verdicts.values() if v.outcome == "survived" and reason(v) is None]
    if left and not args.quick:
        print(f"{len(left)} left that the rules do not notice and nothing explains: random histories")
        verdicts |= {v.mutant.name: v for v in run(left, HISTORIES, args.jobs, tell)}
    print(table([verdicts[m.name] for m in mutants]))
    print(f"{time.monotonic() - began:.0f} s")
    return any(v.outcome == "survived" and reason(v) is None for v in verdicts.values())


if __name__ == "__main__":
    sys.exit(main())
