# SPDX-License-Identifier: Apache-2.0
"""What a vLLM counts about itself: its /metrics."""

from __future__ import annotations

from dataclasses import dataclass

_BY_SOURCE = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True, slots=True)
class Counters:
    """Prompt tokens by where they came from, since the engine's start, and how full its KV cache is."""

    computed: int
    local: int
    external: int
    kv_usage: float

    @property
    def prompt_tokens(self) -> int:
        """All of them."""
        return self.computed + self.local + self.external

    def since(self, before: Counters) -> Counters:
        """What has been added to `before`; the usage is that of now."""
        return Counters(
            self.computed - before.computed,
            self.local - before.local,
            self.external - before.external,
            self.kv_usage,
        )


def parse(text: str) -> Counters:
    """Out of the text of /metrics; what is not there counts as 0."""
    from prometheus_client.parser import text_string_to_metric_families

    sources: dict[str, float] = {}
    usage = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _BY_SOURCE:
                source = sample.labels["source"]
                sources[source] = sources.get(source, 0) + sample.value
            elif sample.name == "vllm:kv_cache_usage_perc":
                usage = max(usage, sample.value)
    return Counters(
        computed=int(sources.get("local_compute", 0)),
        local=int(sources.get("local_cache_hit", 0)),
        external=int(sources.get("external_kv_transfer", 0)),
        kv_usage=usage,
    )
