"""Plugins of a company that minisgl does not know. Modules of their own keep torch out of the processes that need none."""
