# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvpushctl.demo.counters import Counters, parse

TEXT = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.25
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="local_compute"} 40.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="local_cache_hit"} 64.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="external_kv_transfer"} 2999.0
"""


def test_prompt_tokens_are_read_by_source() -> None:
    assert parse(TEXT) == Counters(computed=40, local=64, external=2999, kv_usage=0.25)
    assert parse(TEXT).prompt_tokens == 3103


def test_an_engine_that_has_counted_nothing_yet_has_zeros() -> None:
    assert parse("") == Counters(0, 0, 0, 0.0)


def test_counters_are_compared_by_what_was_added() -> None:
    assert Counters(5, 6, 7, 0.5).since(Counters(1, 2, 3, 0.9)) == Counters(4, 4, 4, 0.5)
