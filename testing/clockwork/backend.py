# SPDX-License-Identifier: Apache-2.0
"""The attention backend that clockwork layers name. It has no kernel: their cells are token rows."""

from typing import Any, NoReturn

from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

NAME = "CLOCKWORK"


class ClockworkImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Holds what vLLM asks of a layer's implementation; computes nothing."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Never called: the clockwork model writes and reads its cells itself."""
        raise NotImplementedError("a clockwork layer has no attention kernel")


class ClockworkMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the metadata without choosing a kernel or planning its work: no instruction set is needed."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """Only where the requests' tokens and blocks are."""
        common = common_attn_metadata
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )


class ClockworkBackend(CPUAttentionBackend):  # type: ignore[misc]
    """CPU attention's shapes and layout, with any block of 16 tokens, since no kernel packs it."""

    kvpush_token_rows = True
    """To KvpushConnector: single tokens can be addressed."""

    @staticmethod
    def get_name() -> str:
        """CLOCKWORK: whoever reads it may address single tokens of a cache in this layout."""
        return NAME

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Multiples of 16."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[ClockworkImpl]:
        """The implementation without a kernel."""
        return ClockworkImpl

    @staticmethod
    def get_builder_cls() -> type[ClockworkMetadataBuilder]:
        """The builder without a plan."""
        return ClockworkMetadataBuilder


def register() -> None:
    """Make the name known to vLLM, which looks every layer's backend up in an enumeration. Idempotent."""
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.{ClockworkBackend.__name__}")
