"""Prometheus' text format, with vLLM's names where they mean the same."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from chatterm.server.http.limits import AdmissionQueue
from chatterm.server.service import Health, Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_BETWEEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
_WHOLE = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass(slots=True)
class Histogram:
    """Counts of values up to each bound, and beyond the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count `value` this many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class ModelFigures:
    """Statistics of the requests to one model."""

    first_token: Histogram = field(default_factory=lambda: Histogram(_TTFT))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(_BETWEEN))
    whole: Histogram = field(default_factory=lambda: Histogram(_WHOLE))
    queue: Histogram = field(default_factory=lambda: Histogram(_WHOLE))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    generation_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    finished: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Recorder:
    """Statistics of this process since it started."""

    models: dict[str, ModelFigures] = field(default_factory=dict)
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status; requests whose client went away count as 499."""

    def of(self, model: str) -> ModelFigures:
        """Return the statistics of this model, which may be new."""
        return self.models.setdefault(model, ModelFigures())


def exposition(recorder: Recorder, gate: AdmissionQueue, engine: Metrics, health: Health) -> str:
    """Return the whole page."""
    lines: list[str] = []
    by_name = {found.model: found for found in engine.models}

    def gauge(name: str, about: str, values: Mapping[str, float], kind: str = "gauge") -> None:
        if values:
            lines.extend((f"# HELP {name} {about}", f"# TYPE {name} {kind}"))
            lines.extend(
                f"{name}{_labels(model_name=model)} {_number(value)}" for model, value in values.items()
            )

    def counter(name: str, about: str, values: Mapping[str, float]) -> None:
        gauge(f"{name}_total", about, values, "counter")

    def of(field: str) -> dict[str, float]:
        found = {name: getattr(model, field) for name, model in by_name.items()}
        return {name: float(value) for name, value in found.items() if value is not None}

    gauge("vllm:num_requests_running", "Sequences that the engine is computing.", of("running"))
    waiting = {model: float(count) for model, count in gate.queued().items()} | of("waiting")
    gauge("vllm:num_requests_waiting", "Sequences that wait for their turn or for the engine.", waiting)
    gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", of("kv_usage"))
    counter("vllm:num_preemptions", "Sequences preempted to make room for others.", of("preemptions"))
    counter("vllm:prompt_tokens", "Tokens of prompts.", of("prompt_tokens"))
    counter("vllm:generation_tokens", "Tokens that were generated.", of("generated_tokens"))
    counter("vllm:prefix_cache_queries", "Tokens of prompts looked up in the cache.", of("prompt_tokens"))
    counter("vllm:prefix_cache_hits", "Tokens of prompts found there.", of("cached_tokens"))
    counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted by speculation.", of("drafted_tokens"))
    counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right.", of("accepted_tokens"))
    gauge("chatterm:weight_bytes", "Memory of a model's weights.", of("weight_bytes"))
    gauge("chatterm:kv_cache_bytes", "Memory of a model's KV cache.", of("kv_bytes"))
    _histograms(lines, recorder)
    _plain(lines, "chatterm:answers_admitted", "Answers that are running.", gate.running)
    _plain(lines, "chatterm:requests_queued", "Requests that wait for their turn.", gate.waiting)
    _plain(lines, "chatterm:attached_terminals", "Terminals that share the engine.", engine.terminals)
    _plain(lines, "chatterm:engine_heard_seconds", "Since the engine process answered.", health.heard_s)
    _plain(lines, "chatterm:engine_busy_seconds", "For which a step of the engine has run.", health.busy_s)
    _plain(lines, "chatterm:ready", "Whether requests can be answered.", health.trouble is None)
    _plain(lines, "chatterm:engine_resident_bytes", "Memory of the engine process.", engine.process_bytes)
    name = "chatterm:http_requests_total"
    lines.extend((f"# HELP {name} Requests by path and status.", f"# TYPE {name} counter"))
    for (path, status), count in sorted(recorder.responses.items()):
        lines.append(f"{name}{_labels(path=path, status=str(status))} {count}")
    return "\n".join(lines) + "\n"


def _histograms(lines: list[str], recorder: Recorder) -> None:
    names = (
        ("first_token", "vllm:time_to_first_token_seconds", "From a request to its first token."),
        ("between_tokens", "vllm:inter_token_latency_seconds", "Between two tokens of an answer."),
        ("whole", "vllm:e2e_request_latency_seconds", "From a request to the end of its answers."),
        ("queue", "vllm:request_queue_time_seconds", "Time a request waits before it starts."),
        ("prompt_tokens", "vllm:request_prompt_tokens", "Tokens of the prompt of a request."),
        ("generation_tokens", "vllm:request_generation_tokens", "Tokens of an answer."),
    )
    for field_name, name, about in names:
        if recorder.models:
            lines.extend((f"# HELP {name} {about}", f"# TYPE {name} histogram"))
        for model, figures in recorder.models.items():
            _histogram(lines, name, model, getattr(figures, field_name))
    name = "vllm:request_success_total"
    if recorder.models:
        lines.extend((f"# HELP {name} Answers by the reason why they ended.", f"# TYPE {name} counter"))
    for model, figures in recorder.models.items():
        for reason, count in sorted(figures.finished.items()):
            lines.append(f"{name}{_labels(finished_reason=reason, model_name=model)} {count}")


def _histogram(lines: list[str], name: str, model: str, found: Histogram) -> None:
    count = 0
    for bound, here in zip((*found.bounds, float("inf")), found.counts, strict=True):
        count += here
        lines.append(f"{name}_bucket{_labels(le=_number(bound), model_name=model)} {count}")
    lines.append(f"{name}_sum{_labels(model_name=model)} {_number(found.total)}")
    lines.append(f"{name}_count{_labels(model_name=model)} {count}")


def _plain(lines: list[str], name: str, about: str, value: float) -> None:
    lines.extend((f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name} {_number(value)}"))


def _labels(**labels: str) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
