"""Logits processors behind the fields that every request may have."""
