"""Needs a library that nobody has."""

import a_library_that_is_not_installed  # noqa: F401
