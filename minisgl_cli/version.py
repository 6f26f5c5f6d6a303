"""``minisgl version``."""

from __future__ import annotations

import platform
from argparse import ArgumentParser
from importlib import metadata


def run(argv: list[str]) -> int:
    """Print the versions that a bug report needs; imports none of these packages."""
    ArgumentParser(prog="minisgl version", description="print versions").parse_args(argv)
    print(f"minisgl {_version('minisgl')}")
    others = (f"{name} {_version(name)}" for name in ("torch", "transformers", "pydantic"))
    print(", ".join([f"Python {platform.python_version()}", *others]))
    return 0


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
