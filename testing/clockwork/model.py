# SPDX-License-Identifier: Apache-2.0
"""The clockwork model: real attention layers, so a real KV cache, and nothing computed.

Each step it writes the cells of its tokens, layer by layer, waits for as long as its clock says, checks every
cell of its context, and emits the token that follows from the prompt and from what it found.
"""

import time
from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

from testing.clockwork import backend, chain
from testing.clockwork.cells import Cells, CLoops
from testing.clockwork.clock import Works
from testing.clockwork.witness import Rows, Span, Witness

_REMEMBERED = 4096
_DIGITS = 3  # a token leaves the forward as three base-256 digits, which every dtype holds exactly


class Batch(Protocol):
    """What the model reads of the runner's batch: who is in which row, and all their tokens."""

    req_ids: list[str]
    token_ids_cpu: NDArray[np.int32]


class Runner(Protocol):
    """The model runner, whose batch changes from step to step."""

    input_batch: Batch


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.attn = attention


class ClockworkForCausalLM(nn.Module):  # type: ignore[misc]
    """See the module. `clock` may be replaced at any time; `watch` must be called before the first step."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        backend.register()
        config = vllm_config.model_config.hf_config
        works = Works.from_json(config.clockwork)
        world, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        kv_heads = config.num_key_value_heads
        self.clock = works.clock
        self._world = world
        self._vocab: int = config.vocab_size
        self._hidden: int = config.hidden_size
        self._dtype = vllm_config.model_config.dtype
        self._windows = [works.window_of(layer) for layer in range(config.num_hidden_layers)]
        self._names = [f"model.layers.{layer}.self_attn.attn" for layer in range(config.num_hidden_layers)]
        self._runner: Runner | None = None
        self._cells: list[Cells] = []
        self.forwards: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Per request (vLLM's id): when its first forward began, and when the last one ended that computed
        more than one token of it, or the first. CLOCK_MONOTONIC in seconds; the last few thousand
        requests."""
        self.witness = Witness(
            rank=rank,
            layers=config.num_hidden_layers,
            kv_heads=kv_heads,
            first_head=rank * kv_heads // world,
            heads=max(1, kv_heads // world),
            loops=CLoops(),
            verify=works.verify,
        )
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(
            _Layer(
                Attention(
                    config.num_attention_heads // world,
                    config.head_dim,
                    config.head_dim**-0.5,
                    num_kv_heads=max(1, kv_heads // world),
                    cache_config=vllm_config.cache_config,
                    per_layer_sliding_window=window,
                    prefix=name,
                    attn_backend=backend.ClockworkBackend,
                )
            )
            for name, window in zip(self._names, self._windows, strict=True)
        )

    def watch(self, runner: Runner) -> None:
        """Take prompts from this runner's batch: the forward itself is told only the tokens it computes."""
        self._runner = runner

    def load_weights(self, weights: Any) -> set[str]:
        """There are none."""
        return set()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Nothing is embedded: zeros of shape (tokens, hidden)."""
        return torch.zeros(input_ids.shape[0], self._hidden, dtype=self._dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """One step. Returns (tokens, hidden): the next token of each request at its last token's row."""
        begin = time.perf_counter()
        hidden = torch.zeros(input_ids.shape[0], self._hidden, dtype=self._dtype)
        context = get_forward_context()
        if context.attn_metadata is None:  # vLLM measures its memory: there are no requests
            return hidden
        if not self._cells:
            self._cells = [_cells_of(context.no_compile_layers[name].kv_cache) for name in self._names]
        metadata = [context.attn_metadata[name] for name in self._names]
        starts = metadata[0].query_start_loc.numpy()
        spans = self._spans(input_ids.numpy(), positions.numpy(), starts, metadata[0].seq_lens.numpy())
        # Layers of a group share one metadata object, and so one list of rows.
        groups: dict[int, list[Rows]] = {}
        for layer, of_layer in enumerate(metadata):
            if id(of_layer) not in groups:
                groups[id(of_layer)] = self._rows(of_layer, layer, spans, starts, len(groups))
        burn_until = begin + self.clock.host_seconds_per_step
        while time.perf_counter() < burn_until:
            pass
        duration = self.clock.duration([span.computed for span in spans])
        for layer, name in enumerate(self._names):
            rows = groups[id(metadata[layer])]
            self._layer(name, layer, spans, rows, burn_until + duration * (layer + 1) / len(self._names))
        self._remember(spans, begin, time.perf_counter())
        self._agree(spans)
        for span, end in zip(spans, starts[1:].tolist(), strict=False):
            token = chain.token_of(int(span.hashes[-1]), span.digest, self._vocab)
            for digit in range(_DIGITS):
                hidden[end - 1, digit] = (token >> (8 * digit)) & 0xFF
        self.witness.stepped()
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of shape (rows, vocab): the token that the forward chose stands out."""
        weights = torch.tensor([256**digit for digit in range(_DIGITS)])
        tokens = (hidden_states[:, :_DIGITS].long() * weights).sum(dim=1).clamp_(0, self._vocab - 1)
        logits = torch.zeros(hidden_states.shape[0], self._vocab, dtype=torch.float32)
        return logits.scatter_(1, tokens[:, None], 30.0)

    @maybe_transfer_kv_layer  # type: ignore[untyped-decorator]
    def _layer(
        self, layer_name: str, layer: int, spans: list[Span], rows: list[Rows], deadline: float
    ) -> None:
        """One layer, as an attention layer is one to a connector: loaded before, saved after."""
        cells = self._cells[layer]
        self.witness.flip(layer, cells, spans, rows)
        self.witness.write(layer, cells, spans, rows)
        self.witness.check(layer, cells, spans, rows)
        remaining = deadline - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)

    def _spans(
        self,
        input_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        starts: NDArray[np.int32],
        lengths: NDArray[np.int32],
    ) -> list[Span]:
        if self._runner is None:
            raise RuntimeError("no runner to watch: start vLLM with worker_cls=testing.clockwork.worker...")
        batch, spans = self._runner.input_batch, []
        for row, length in enumerate(lengths.tolist()):
            begin, end = int(starts[row]), int(starts[row + 1])
            if end <= begin:
                raise RuntimeError(f"row {row} of the batch computes no token")
            context = length - (end - begin)
            if not np.array_equal(positions[begin:end], np.arange(context, length)):
                raise RuntimeError(f"positions of row {row} are not {context} to {length}")
            tokens = np.concatenate([batch.token_ids_cpu[row, :context], input_ids[begin:end]])
            tags = chain.tags(tokens)
            spans.append(Span(batch.req_ids[row], context, length, tags, chain.hashes(tags)))
        return spans

    def _remember(self, spans: list[Span], begin: float, end: float) -> None:
        for span in spans:
            first, _ = self.forwards.get(span.request_id, (begin, end))
            if span.computed > 1 or span.request_id not in self.forwards:
                self.forwards[span.request_id] = (first, end)
        while len(self.forwards) > _REMEMBERED:
            self.forwards.popitem(last=False)

    def _rows(
        self, metadata: Any, layer: int, spans: list[Span], starts: NDArray[np.int32], group: int
    ) -> list[Rows]:
        size, rows = self._cells[layer].block_size, []
        tables, slot_mapping = metadata.block_table.numpy(), metadata.slot_mapping.numpy()
        for row, span in enumerate(spans):
            blocks = np.ascontiguousarray(tables[row, : -(-span.length // size)], np.int32).copy()
            slots = np.ascontiguousarray(slot_mapping[starts[row] : starts[row + 1]], np.int64)
            new = np.arange(span.context, span.length)
            if not np.array_equal(blocks[new // size].astype(np.int64) * size + new % size, slots):
                raise RuntimeError(f"slot mapping and block table of {span.request_id} disagree")
            rows.append(self.witness.rows(span, blocks, slots, group, size, self._windows[layer]))
        return rows

    def _agree(self, spans: list[Span]) -> None:
        """Turn each span's digest into the sum over ranks: all emit the same token, whoever found a byte."""
        if self._world == 1 or not spans:
            return
        # Sixteen bits at a time, since a CPU all-reduce sums floats, which hold such sums exactly.
        parts = torch.tensor(
            [[(span.digest >> shift) & 0xFFFF for shift in range(0, 64, 16)] for span in spans],
            dtype=torch.float32,
        )
        for span, total in zip(spans, tensor_model_parallel_all_reduce(parts).tolist(), strict=True):
            span.digest = sum(int(part) << (16 * i) for i, part in enumerate(total)) & chain.MASK


def _cells_of(cache: torch.Tensor) -> Cells:
    """Cells of a KV cache of shape (blocks, kv_heads, block_size, 2 * head_dim)."""
    _, heads, block_size, width = cache.shape
    item = cache.element_size()
    block, head, token, element = (stride * item for stride in cache.stride())
    if element != item or width * item % 16:
        raise ValueError(f"a cell of {width * item} bytes in steps of {element} is no row of words")
    return Cells(cache.data_ptr(), block, head, token, block_size, heads, width * item // 8)


def register() -> None:
    """Make the architecture known to vLLM in this process. Idempotent."""
    from vllm import ModelRegistry

    backend.register()
    ModelRegistry.register_model(ClockworkForCausalLM.__name__, ClockworkForCausalLM)
