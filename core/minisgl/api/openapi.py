"""What an HTTP frontend says of its routes for the published description: ``route(method, path, handler, About(...))``."""

from minisgl.client.notes import Note, Schema, described
from minisgl.client.openapi import (
    ANYTHING,
    COUNT,
    EVENTS,
    INTEGER,
    JSON,
    NUMBER,
    OBJECT,
    STRING,
    TEXT,
    About,
    Body,
    array_of,
    nullable,
    one_of,
    record,
)

__all__ = [
    "ANYTHING",
    "COUNT",
    "EVENTS",
    "INTEGER",
    "JSON",
    "NUMBER",
    "OBJECT",
    "STRING",
    "TEXT",
    "About",
    "Body",
    "Note",
    "Schema",
    "array_of",
    "described",
    "nullable",
    "one_of",
    "record",
]  # fmt: skip
