"""Conversions that need much memory or transformers: ``python -m minisgl_plugins.source.convert KIND SOURCE TARGET
[OPTION ...]``.

Prints ``[done, total]`` lines in bytes, and ``{"error": reason}`` with exit code 78 when the source cannot be used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from minisgl.api import ModelError

Report = Callable[[int, int], None]


def convert_tokenizer(source: Path, target: Path, report: Report) -> None:
    """SentencePiece's file, or any tokenizer that transformers knows, to a folder with tokenizer.json and tokenizer_config.json."""
    if (source / "tokenizer.model").is_file():
        from minisgl_plugins.source.spm_file import convert_spm, read_spm

        try:
            model = read_spm((source / "tokenizer.model").read_bytes())
        except (ValueError, KeyError, AttributeError):
            pass  # Llama 3 has a file of another kind under this name
        else:
            convert_spm(model, source, target)
            return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as e:
        raise ModelError(f"transformers does not read its tokenizer: {type(e).__name__}: {e}") from e
    if not tokenizer.is_fast:
        raise ModelError(f"its tokenizer ({type(tokenizer).__name__}) has no form as a tokenizer.json")
    tokenizer.save_pretrained(target)


def convert_gguf(source: Path, target: Path, report: Report, dtype: str) -> None:
    from minisgl_plugins.source.gguf_checkpoint import write_checkpoint

    write_checkpoint(source, target, report, dtype)


CONVERTERS: dict[str, Callable[..., None]] = {"gguf": convert_gguf, "tokenizer": convert_tokenizer}


def report(done: int, total: int) -> None:
    print(json.dumps([done, total]), flush=True)


def main(argv: list[str]) -> int:
    kind, source, target, *options = argv
    try:
        CONVERTERS[kind](Path(source), Path(target), report, *options)
    except ModelError as e:
        print(json.dumps({"error": str(e)}), flush=True)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
