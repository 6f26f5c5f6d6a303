"""A cache policy without most of its methods."""

from minisgl.api import CacheContext, CachePolicy


class HalfCachePolicy(CachePolicy):
    def __init__(self, ctx: CacheContext) -> None: ...
