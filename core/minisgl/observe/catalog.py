"""What is measured: the names, labels and buckets of all metrics, without the prefix of the system that shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Buckets = tuple[float, ...]

# Seconds, for times of tokens, first tokens and whole requests; numbers of tokens.
ITL: Buckets = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
TTFT: Buckets = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
LATENCY: Buckets = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKENS: Buckets = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
STEP_TOKENS: Buckets = tuple(float(1 << e) for e in range(15))
FAST: Buckets = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class Metric:
    """``labels``: beside model_name and engine, which those ``of_model`` have. ``buckets``: upper bounds of a histogram."""

    kind: Literal["counter", "histogram", "gauge"]
    doc: str
    labels: tuple[str, ...] = ()
    buckets: Buckets = ()
    of_model: bool = True


def _histogram(doc: str, buckets: Buckets, *labels: str) -> Metric:
    return Metric("histogram", doc, labels, buckets, of_model=not labels)


METRICS: dict[str, Metric] = {
    "num_requests_running": Metric("gauge", "requests that have a row in the batch"),
    "num_requests_waiting": Metric("gauge", "requests that wait for a row"),
    "kv_cache_usage_perc": Metric("gauge", "share of KV pages in use by running requests, 0 to 1"),
    "num_preemptions": Metric("counter", "times that a running request was put back to wait"),
    "prefix_cache_queries": Metric("counter", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": Metric("counter", "prompt tokens found in the prefix cache"),
    "prompt_tokens": Metric("counter", "tokens of accepted prompts, each choice's counted"),
    "prompt_tokens_cached": Metric("counter", "prompt tokens that were not computed again"),
    "generation_tokens": Metric("counter", "sampled tokens"),
    "request_success": Metric("counter", "ended outputs by why they ended", ("finished_reason",)),
    "request_rejected": Metric("counter", "refused HTTP requests by error code", ("code",), of_model=False),
    "time_to_first_token_seconds": _histogram("from the request to its first token", TTFT),
    "inter_token_latency_seconds": _histogram("between two tokens of an output", ITL),
    "request_time_per_output_token_seconds": _histogram("mean time of an output's tokens after the first", ITL),
    "e2e_request_latency_seconds": _histogram("from the request to its end", LATENCY),
    "request_queue_time_seconds": _histogram("from admission to the first step", LATENCY),
    "request_prefill_time_seconds": _histogram("from the first step to the first token", LATENCY),
    "request_decode_time_seconds": _histogram("from the first token to the end", LATENCY),
    "request_inference_time_seconds": _histogram("from the first step to the end", LATENCY),
    "request_prompt_tokens": _histogram("tokens of a prompt", TOKENS),
    "request_generation_tokens": _histogram("sampled tokens of an output", TOKENS),
    "iteration_tokens": _histogram("tokens computed in a step", STEP_TOKENS),
    "grammar_compile_seconds": _histogram("time to compile a grammar", FAST),
    "http_requests": Metric("counter", "HTTP requests", ("handler", "method", "status"), of_model=False),
    "http_request_duration_seconds": _histogram("of an HTTP request, to the last byte", FAST, "handler", "method"),
    "event_loop_lag_seconds": Metric(
        "histogram", "how late the event loops of the API processes turn", buckets=FAST, of_model=False
    ),
    "build_info": Metric("gauge", "1; the version of the server", ("version",), of_model=False),
    "cache_config_info": Metric("gauge", "1; the KV pages", ("block_size", "num_gpu_blocks", "cache_dtype")),
}
# Where vLLM's name is another one, or an older one is still in use.
VLLM_NAMES: dict[str, tuple[str, ...]] = {
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "iteration_tokens": ("iteration_tokens_total",),
}
NOT_VLLM = (
    "http_requests",
    "http_request_duration_seconds",
    "event_loop_lag_seconds",
    "build_info",
    "request_rejected",
)
ENGINE_COUNTERS = {  # of the scheduler's counts
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prompt_tokens_total",
    "prefix_cache_hits": "cached_tokens_total",
}
