"""The plugins as hooks; targets are text, so that only what is selected is imported."""

from minisgl.api.hookspec import hookimpl


@hookimpl
def register_models(add):
    add("AcmeForCausalLM", "acme_minisgl.model:AcmeForCausalLM")


@hookimpl
def register_attention_backends(add):
    add("acme", "acme_minisgl.attention:AcmeAttention")


@hookimpl
def register_cache_policies(add):
    add("acme", "acme_minisgl.cache:LFUCachePolicy")


@hookimpl
def register_schedulers(add):
    add("acme", "acme_minisgl.scheduler:ShortestFirstScheduler")


@hookimpl
def register_frontends(add):
    add("acme", "acme_minisgl.frontend:AcmeFrontend")
