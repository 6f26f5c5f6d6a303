"""Writes smollm2.json beside this file: what transformers answers greedily with SmolLM2-135M-Instruct in float32.

Run it again only if the model or its conversion changes: ``python tests/e2e/oracle/make_smollm2.py``.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from minisgl.client.pipeline import make_tokenizer, scan
from minisgl.config.load import load_settings
from minisgl.testing.oracle import save, transformers_greedy
from minisgl.text.resolve import resolve_model

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers greater than 100.",
    "Explain why the sky is blue in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Name the largest planet of the solar system.",
    "Who wrote Hamlet?",
    "Give a short recipe for pancakes.",
    "What does a compiler do?",
    "Describe a cat to somebody who has never seen one.",
    "How many days has a leap year?",
    "Write a Python function that reverses a string.",
    "What is photosynthesis?",
    "Summarize the story of Cinderella.",
    "What should I pack for a trip to the mountains?",
)
TEXTS = (
    "The history of the printing press begins",
    "Once upon a time there was a small village",
    "def fibonacci(n):",
    "In 1969, two astronauts",
    "The three laws of thermodynamics are",
    "To be, or not to be:",
    "import numpy as np\n\nx = ",
    "A",
    "Rivers carry water from the mountains to the sea. " * 2,
    "The quick brown fox jumps over the lazy dog. " * 3,
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,",
    "Paris is the capital of France. Berlin is the capital of Germany. Rome is the capital of",
    "Water boils at 100 degrees. " * 4,
    "She opened the door and saw",
    "The most important thing about tests is",
)
OUTPUT_TOKENS = 32


def main() -> None:
    torch.manual_seed(0)
    settings = load_settings().settings
    registry = scan(settings)
    model = resolve_model(settings, registry)
    tokenizer = make_tokenizer(settings, registry, model)
    assert tokenizer is not None
    chats = [tokenizer.render([{"role": "user", "content": q}], add_generation_prompt=True) for q in QUESTIONS]
    prompts = [tokenizer.encode(text, special=False).tolist() for text in (*chats, *TEXTS)]
    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    cases = [transformers_greedy(reference, p, OUTPUT_TOKENS) for p in prompts]
    about = (
        f"{model.name}, float32, transformers {version('transformers')}, torch {version('torch')}, greedy, EOS ignored"
    )
    save(Path(__file__).with_name("smollm2.json"), cases, about)
    sure = sum(c.sure for c in cases)
    print(f"{len(cases)} prompts, {sure} of {len(cases) * OUTPUT_TOKENS} positions are sure")


if __name__ == "__main__":
    main()
