"""Run real clients against real servers, each in an environment of its own, and record what they said.

    python tests/clients/run.py                # all
    python tests/clients/run.py openai litellm
    python tests/clients/run.py --table        # write docs/clients.md anew from what is recorded

Packages come from the configured registries of pip and npm, at the versions in requirements/. Environments are kept in the cache
folder and made anew when a requirement changes. Verdicts go to results.json and from there to docs/clients.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE.parents[1] / "docs" / "clients.md"
BEGIN, END = "<!-- begin clients -->\n", "<!-- end clients -->\n"
LOG_LINES = 60  # of a client that fails
TIMEOUT_S = 1800  # of one client


@dataclass(frozen=True, slots=True)
class Client:
    """``name``: of its file in requirements/, whose first line is the client itself."""

    name: str

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def pins(self) -> list[str]:
        return [line for line in self.requirements.read_text().splitlines() if line and not line.startswith("#")]

    @property
    def package(self) -> str:
        name = self.pins[0].rpartition("@")[0] if self.is_node else self.pins[0].partition("==")[0]
        return name.partition("[")[0].strip()

    @property
    def is_node(self) -> bool:
        return self.script.suffix == ".mjs"

    @property
    def script(self) -> Path:
        plain = self.name.replace("-", "_")
        node = HERE / f"{plain}.test.mjs"
        return node if node.exists() else HERE / f"test_{plain}.py"

    def environment(self, cache: Path) -> Path:
        """Made if there is none for these requirements. Raises: CalledProcessError."""
        text = self.requirements.read_bytes() + sys.version.encode()
        folder = cache / f"{self.name}-{hashlib.sha256(text).hexdigest()[:12]}"
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if self.is_node:
                (folder / "package.json").write_text("{}")
                subprocess.run(["npm", "install", "--no-audit", "--no-fund", *self.pins], cwd=folder, check=True)
            else:
                subprocess.run([sys.executable, "-m", "venv", folder], check=True)
                pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
                subprocess.run([*pip, "-r", self.requirements], check=True)
            (folder / "complete").touch()
        return folder

    def version(self, folder: Path) -> str:
        """The one that is installed."""
        if self.is_node:
            return str(json.loads((folder / "node_modules" / self.package / "package.json").read_text())["version"])
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        return subprocess.check_output([folder / "bin" / "python", "-c", code], text=True).strip()

    def command(self, folder: Path, report: Path) -> list[str]:
        """It leaves a report in JUnit's XML."""
        if self.is_node:
            node = "node --test --test-reporter=spec --test-reporter-destination=stdout --test-reporter=junit"
            return [*node.split(), f"--test-reporter-destination={report}", str(self.script)]
        pytest = "-m pytest -q -p no:cacheprovider -p no:warnings --import-mode=importlib"
        alone = ["-c", os.devnull, f"--rootdir={HERE}", f"--confcutdir={HERE}"]  # not this project's own settings
        return [str(folder / "bin" / "python"), *pytest.split(), *alone, f"--junitxml={report}", str(self.script)]

    @property
    def runtime(self) -> str:
        if self.is_node:
            return "Node " + subprocess.check_output(["node", "--version"], text=True).strip("v\n")
        return "Python " + sys.version.split()[0]

    def run(self, cache: Path, servers: dict[str, str]) -> dict[str, Any]:
        """One entry of the results; what went wrong is printed. Raises: TimeoutExpired."""
        folder = self.environment(cache)
        report = folder / "report.xml"
        report.unlink(missing_ok=True)
        env = {**os.environ, **servers, "MINISGL_CLIENT_FOLDER": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.monotonic()
        done = subprocess.run(
            self.command(folder, report),
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        seconds = time.monotonic() - start
        checks = read_report(report) if report.exists() else {}
        if done.returncode or not checks:
            print("\n".join(done.stdout.splitlines()[-LOG_LINES:]), file=sys.stderr)
        verdict = "ok" if done.returncode == 0 and set(checks.values()) == {"ok"} else "failed"
        return {
            "client": self.package,
            "version": self.version(folder),
            "runtime": self.runtime,
            "date": datetime.now(UTC).date().isoformat(),
            "verdict": verdict,
            "seconds": round(seconds, 1),
            "checks": checks,
        }


def read_report(report: Path) -> dict[str, str]:
    """Name of each check and its verdict."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None]
        name = case.attrib["name"].removeprefix("test_").replace("_", " ").partition("[")[0].strip()
        if found.get(name, "ok") == "ok":
            found[name] = bad[0] if bad else "ok"
    return found


def clients() -> list[Client]:
    return [Client(path.stem) for path in sorted((HERE / "requirements").glob("*.txt"))]


def recorded() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def table(results: dict[str, Any]) -> str:
    rows = ["| client | version | run | verdict | what was checked |", "|---|---|---|---|---|"]
    for _, r in sorted(results.items()):
        checks = "; ".join(
            check if verdict == "ok" else f"**{check}: {verdict}**" for check, verdict in r["checks"].items()
        )
        rows.append(
            f"| `{r['client']}`{' (npm)' if r['runtime'].startswith('Node') else ''} | {r['version']} | "
            f"{r['date']}, {r['runtime']} | {r['verdict']} | {checks} |"
        )
    return "\n".join(rows) + "\n"


def page(text: str, results: dict[str, Any]) -> str:
    """``text`` of docs/clients.md with the table between its marks replaced."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table(results) + END + rest.partition(END)[2]


def record(name: str, result: dict[str, Any]) -> None:
    results = recorded() | {name: result}
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(PAGE.read_text(), results))


def run(chosen: Iterable[Client], cache: Path) -> bool:
    """Whether all are well."""
    from servers import start_real, start_scripted, to_environment

    well = True
    with tempfile.TemporaryDirectory() as folder, start_real() as real, start_scripted(Path(folder)) as scripted:
        for client in chosen:
            result = client.run(cache, to_environment(real, scripted))
            record(client.name, result)
            print(client.name, result["version"], result["verdict"], f"{result['seconds']} s", flush=True)
            well &= result["verdict"] == "ok"
    return well


def main(args: Sequence[str] | None = None) -> int:
    known = {client.name: client for client in clients()}
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "minisgl" / "clients"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *known], metavar="NAME", help=", ".join(known))
    parser.add_argument("--cache", type=Path, default=cache, help="folder of the environments [%(default)s]")
    parser.add_argument("--table", action="store_true", help="only write docs/clients.md anew")
    options = parser.parse_args(args)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers end as well
    if options.table:
        PAGE.write_text(page(PAGE.read_text(), recorded()))
        return 0
    return 0 if run([known[name] for name in options.names or known], options.cache.resolve()) else 1


if __name__ == "__main__":
    sys.exit(main())
