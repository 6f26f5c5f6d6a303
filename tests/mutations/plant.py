"""Plants bugs in a copy of the scheduling core and says which test catches each.

``python tests/mutations/plant.py [--list] [NAME...]``: without names all bugs, after a run without any. Exit status: 1 if a
bug escapes. ``tests/core/test_plant.py`` checks that every replacement still fits.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60  # for one suite; a test that hangs fails after TEST_SECONDS
TEST_SECONDS = 25
SUITES: tuple[tuple[str, ...], ...] = (
    ("tests/core/test_scheduler.py", "tests/core/test_cache_machine.py"),
    ("tests/contracts/test_contracts.py", "-k", "not fresh_process"),
    ("tests/core/test_scheduler_fuzz.py",),
)
COPIED = ("core", "plugins", "tests/conftest.py", "tests/core", "tests/contracts", "pyproject.toml")

# A pytest plugin for the copy: the planted code is what runs, and a failure is reported as it is found, not shrunk.
PLUGIN = """
from pathlib import Path
from hypothesis import Phase, settings
import minisgl, minisgl_plugins

for package in (minisgl, minisgl_plugins):
    assert Path(package.__file__).is_relative_to(Path(__file__).parent), package.__file__
settings.register_profile("plant", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("plant")
"""

SCHED = "core/minisgl/sched/"
RADIX = "plugins/minisgl_plugins/cache/radix.py"
OVERLAP = "plugins/minisgl_plugins/loop/overlap.py"


@dataclass(frozen=True, slots=True)
class Bug:
    """``old`` is found exactly once in ``file``; ``new`` replaces it."""

    name: str
    file: str
    old: str
    new: str

    def planted(self, text: str) -> str:
        """Raises: ValueError if ``old`` is not exactly once in ``text``."""
        if (n := text.count(self.old)) != 1:
            raise ValueError(f"bug {self.name}: its text is {n} times in {self.file}, expected once:\n{self.old}")
        return text.replace(self.old, self.new)


BUGS = (
    # Pages that are lost, or given away too soon or twice.
    Bug(
        "page_leaked_at_the_end",
        SCHED + "residency.py",
        "rows.pages(slot)[r.lease.n_pages :].copy()",
        "rows.pages(slot)[r.lease.n_pages + 1 :].copy()",
    ),
    Bug("lease_leaked_at_the_end", SCHED + "residency.py", "        self.release(r.lease)\n", ""),
    Bug("lease_leaked_when_denied", SCHED + "builder.py", "            self._res.release(lease)\n", ""),
    Bug("duplicate_leaked", SCHED + "residency.py", "            self.ledger.give(mine[duplicate], fence)\n", ""),
    Bug(
        "duplicate_given_back_twice",
        SCHED + "residency.py",
        "            self.ledger.give(mine[duplicate], fence)\n",
        "            self.ledger.give(mine[duplicate], fence)\n" * 2,
    ),
    Bug("held_page_reused_early", SCHED + "pages.py", "if fence <= self._done:", "if fence <= self._done + 1:"),
    Bug("fence_missing", SCHED + "scheduler.py", "fence=self.step)", "fence=self.done_step)"),
    Bug("fence_opened_early", SCHED + "pages.py", "            if fence <= done_step:\n", "            if True:\n"),
    Bug(
        "row_closed_in_flight",
        SCHED + "scheduler.py",
        "        ready = [r for r in self._draining if last[r.row] <= self.done_step]\n"
        "        self._draining = [r for r in self._draining if last[r.row] > self.done_step]\n",
        "        ready, self._draining = self._draining, []\n",
    ),
    # Pages counted wrongly.
    Bug(
        "chunk_one_page_short",
        SCHED + "builder.py",
        "return cdiv(min(at + most, len(r.ids)), self._limits.page_size) - have",
        "return cdiv(min(at + most, len(r.ids)) - 1, self._limits.page_size) - have",
    ),
    Bug("decode_one_page_late", SCHED + "rows.py", "o[self.kv[o] >= self", "o[self.kv[o] > self"),
    Bug("pages_beyond_the_end", SCHED + "rows.py", "-(-self.end[slots] //", "1 - (-self.end[slots] //"),
    Bug("pinned_prefix_counted_as_room", SCHED + "builder.py", "if need - lease.n_pages <= self", "if 0 <= self"),
    Bug(
        "reserve_of_the_new_ignored",
        SCHED + "builder.py",
        "len(r.ids) + ceil((r.left - 1) * reserve)",
        "len(r.ids)",
    ),
    Bug("reserve_of_the_running_ignored", SCHED + "builder.py", "owed_pages(reserve)", "owed_pages(0.0)"),
    Bug("decode_tokens_not_budgeted", SCHED + "builder.py", "(self._rows.n_decode if self._decode else 0)", "0"),
    Bug(
        "evicted_match_remembered",
        SCHED + "pages.py",
        "call(self._cache.evict, short)\n        self.version += 1\n",
        "call(self._cache.evict, short)\n",
    ),
    # What the device is told.
    Bug(
        "repoint_missing",
        SCHED + "residency.py",
        "            self.rows.repoint(slot, duplicate, ins.canonical[duplicate])\n",
        "",
    ),
    Bug("repoint_not_told", SCHED + "rows.py", "        self.tell_pages(slot, at, pages)\n", ""),
    Bug("writes_of_closed_rows_kept", SCHED + "rows.py", "        if self._grow:\n", "        if False:\n"),
    Bug(
        "swap_remove_write_lost",
        SCHED + "rows.py",
        "        self._place(pos, int(self._order[last]))\n",
        "        self._order[pos] = self._order[last]\n        self._pos[self._order[last]] = pos\n",
    ),
    Bug("every_chunk_samples", SCHED + "builder.py", "Span(slot, n, done, score)", "Span(slot, n, True, score)"),
    # Log probabilities of prompts.
    Bug(
        "scored_prompt_reads_the_cache",
        SCHED + "residency.py",
        "            return EmptyLease()\n",
        "            pass\n",
    ),
    Bug("half_scored_prompt_goes_on", SCHED + "scheduler.py", "r.scored = 0  # from", "r.scored += 0  # from"),
    Bug(
        "scores_after_their_tokens",
        SCHED + "scheduler.py",
        "if res.logprobs is not None:",
        "if res.logprobs is not None and res.step % 2:",
    ),
    Bug(
        "row_twice_in_a_step", SCHED + "builder.py", "if not fresh and self._rows.last", "if fresh and self._rows.last"
    ),
    # What is computed, kept and found again.
    Bug(
        "whole_prompt_matched",
        SCHED + "residency.py",
        "return call(self.cache.lease, r.ids[:-1], r.namespace)",
        "return call(self.cache.lease, r.ids, r.namespace)",
    ),
    Bug("last_token_taken_for_computed", SCHED + "residency.py", "rows.emitted[slot]) - 1", "rows.emitted[slot])"),
    Bug("unfinished_prompt_inserted", SCHED + "scheduler.py", "keep=r.planned)", "keep=True)"),
    Bug(
        "aborted_prompt_inserted",
        SCHED + "scheduler.py",
        "keep=r.finish in (Finish.STOP, Finish.LENGTH))",
        "keep=True)",
    ),
    Bug("consumed_lease_kept", SCHED + "residency.py", "        r.lease = ins.lease\n", ""),
    Bug("prompt_not_copied", SCHED + "scheduler.py", "np.array(a.ids, np.int32)", "np.asarray(a.ids, np.int32)[:]"),
    Bug("namespaces_share_pages", SCHED + "request.py", "namespace=a.namespace,", 'namespace=b"",'),
    # Life of requests.
    Bug(
        "tokens_of_dead_rows_committed",
        SCHED + "scheduler.py",
        "dead = rows.dead[slots]\n",
        "dead = rows.dead[slots] & False\n",
    ),
    Bug("stop_ignored", SCHED + "scheduler.py", "ended = stop | (", "ended = (False & stop) | ("),
    Bug("one_token_too_many", SCHED + "scheduler.py", "] >= rows.max_new[slots])", "] > rows.max_new[slots])"),
    Bug("tokens_to_the_wrong_owner", SCHED + "scheduler.py", "(owners == first).all()", "(owners == first).any()"),
    Bug(
        "preempted_in_flight",
        SCHED + "builder.py",
        "req.slot is None or self._rows.last[req.slot] > self._s.done_step",
        "req.slot is None",
    ),
    Bug(
        "preempted_output_forgotten",
        SCHED + "scheduler.py",
        "[slot, : r.prompt_len + r.emitted]",
        "[slot, : r.prompt_len]",
    ),
    Bug(
        "preempted_goes_last",
        SCHED + "scheduler.py",
        "        self.waiting.move_to_end(r.uid, last=False)\n",
        "",
    ),
    Bug("wrong_victim", SCHED + "policy.py", "return min(v.decoding()", "return max(v.decoding()"),
    Bug("stall_guard_off", SCHED + "scheduler.py", "self._stalled += 1", "self._stalled += 0"),
    Bug(
        "namespaces_wait_for_one_another",
        SCHED + "sharing.py",
        "return r.namespace, r.ids[",
        'return b"", r.ids[',
    ),
    Bug(
        "wait_for_a_prefill_never_ends",
        SCHED + "scheduler.py",
        "        self.sharing.end(r)\n        del self.prefilling[r.uid]\n",
        "        del self.prefilling[r.uid]\n",
    ),
    Bug(
        "wait_for_an_aborted_prefill_never_ends",
        SCHED + "scheduler.py",
        "        self.sharing.end(r)\n        if r.slot is None:\n",
        "        if r.slot is None:\n",
    ),
    # Loop.
    Bug(
        "overlap_commits_too_early",
        OVERLAP,
        "        plan = e.schedule()\n        ticket = None if plan is None else e.submit(plan)\n"
        "        if self._last is not None:\n            e.commit(e.collect(self._last))\n",
        "        if self._last is not None:\n            e.commit(e.collect(self._last))\n"
        "        plan = e.schedule()\n        ticket = None if plan is None else e.submit(plan)\n",
    ),
    Bug("overlap_waits_with_work_to_do", OVERLAP, "block=e.idle and self._last is None", "block=self._last is None"),
    Bug("overlap_forgets_a_step", OVERLAP, "self._last = ticket\n", "self._last = ticket or self._last\n"),
    # Radix cache.
    Bug("radix_pins_lost_in_a_split", RADIX, "upper.pins = 1 if node.pins else 0", "upper.pins = 0"),
    Bug(
        "radix_keeps_views",
        RADIX,
        "tokens[have * ps : k * ps].copy(), pages[have:].copy())",
        "tokens[have * ps : k * ps], pages[have:])",
    ),
    Bug("radix_inserts_twice", RADIX, "        if have < k:\n", "        if have <= k:\n"),
    Bug(
        "radix_evicts_pinned_pages",
        RADIX,
        "return rank == node.rank and not node.pins and not node.children",
        "return not node.children",
    ),
    Bug(
        "radix_trims_from_the_start",
        RADIX,
        "            out.append(leaf.pages[-k:])\n            self._evictable -= k\n            short -= k\n"
        "            if k < len(leaf.pages):\n"
        "                leaf.pages, leaf.tokens = leaf.pages[:-k], leaf.tokens[: -k * self._page_size]\n",
        "            out.append(leaf.pages[:k])\n            self._evictable -= k\n            short -= k\n"
        "            if k < len(leaf.pages):\n"
        "                leaf.pages, leaf.tokens = leaf.pages[k:], leaf.tokens[: -k * self._page_size]\n",
    ),
    Bug(
        "radix_match_changes_the_tree",
        RADIX,
        "sum(k for _, k in self._path(root, tokens))",
        "self._descend(root, tokens)[1]",
    ),
    Bug("radix_forgets_recency", RADIX, "rank[0] + hits, self._calls", "rank[0] + hits, node.rank[1]"),
    Bug("radix_forgets_freed_parents", RADIX, "            self._enqueue(parent)\n", "            pass\n"),
    Bug("radix_matches_half_a_page", RADIX, "int(same.argmin()) // ps", "-(-int(same.argmin()) // ps)"),
)


class Field:
    """A copy of the tree in ``path``, in which one bug at a time is planted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in COPIED:
            source, target = ROOT / name, path / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        (path / "planted.py").write_text(PLUGIN)

    def caught_by(self, bug: Bug | None) -> str | None:
        """The first test that fails with ``bug`` planted; None if it escapes."""
        if bug is None:
            return self._run_suites()
        file = self.path / bug.file
        text = file.read_text()
        file.write_text(bug.planted(text))
        try:
            return self._run_suites()
        finally:
            file.write_text(text)

    def _run_suites(self) -> str | None:
        for suite in SUITES:
            if (test := self._run(suite)) is not None:
                return test
        return None

    def _run(self, suite: Sequence[str]) -> str | None:
        paths = [str(self.path), str(self.path / "core"), str(self.path / "plugins")]
        # Without bytecode: two bugs of equal length within a second would look like the same source.
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        options = ["-q", "-x", "--tb=no", "-p", "planted", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        command = [sys.executable, "-m", "pytest", *options, f"--timeout={TEST_SECONDS}", *suite]
        try:
            done = subprocess.run(command, cwd=self.path, env=env, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None  # no test failed in the time given
        if done.returncode == 0:
            return None
        if (failed := re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+)", done.stdout, re.M)) is None:
            raise RuntimeError(f"pytest ended with {done.returncode} and no failed test:\n{done.stdout}{done.stderr}")
        return failed[1]


def chosen(names: Sequence[str]) -> list[Bug]:
    by_name = {bug.name: bug for bug in BUGS}
    if unknown := [name for name in names if name not in by_name]:
        sys.exit(f"unknown bugs: {', '.join(unknown)}; --list shows all {len(BUGS)}")
    return [by_name[name] for name in names] if names else list(BUGS)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show the names and end")
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs to plant; all by default")
    args = parser.parse_args(argv)
    bugs = chosen(args.names)
    if args.list:
        print(*(f"{bug.name}  {bug.file}" for bug in bugs), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="minisgl-plant-") as folder:
        field = Field(Path(folder))
        if not args.names and (test := field.caught_by(None)) is not None:
            sys.exit(f"{test} fails without any bug")
        escaped = 0
        for bug in bugs:
            began = time.monotonic()
            test = field.caught_by(bug)
            escaped += test is None
            verdict = f"caught by {test}" if test else "ESCAPED"
            print(f"{bug.name:40} {time.monotonic() - began:5.1f} s  {verdict}", flush=True)
    print(f"{len(bugs) - escaped} of {len(bugs)} bugs caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
