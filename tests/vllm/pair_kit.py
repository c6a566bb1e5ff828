# SPDX-License-Identifier: Apache-2.0
"""P and D: two real vLLM engines with the connector, each under a real daemon of its own."""

import time
import uuid
from contextlib import ExitStack

from testing.clockwork.chain import reference
from testing.node import Node

VOCAB = 2048
DEADLINE = 60.0
SEND = {"do_remote_decode": True, "do_remote_prefill": False}


class Pair:
    """Use it as a context. `p` and `d` are `Engine`s, `p_node` and `d_node` their daemons."""

    def __init__(self, harness, folder, model, *, p=None, d=None, policy="recompute", lease=10, **common):
        self._harness = harness
        self._model = model
        self._policy = policy
        self._arguments = {"block_size": 16, "max_num_batched_tokens": 64} | common
        self.name = f"{folder.name}-{uuid.uuid4().hex[:6]}"
        self.p_node = Node("node-p", folder, lease=lease)
        self.d_node = Node("node-d", folder, lease=lease)
        self._changes = {"P": p or {}, "D": d or {}}

    def __enter__(self):
        with ExitStack() as stack:
            for node in (self.p_node, self.d_node):
                stack.callback(node.close)
                node.start()
            self.p = stack.enter_context(self._engine("P", "kv_producer", self.p_node))
            self.d = stack.enter_context(self._engine("D", "kv_consumer", self.d_node))
            self.p.ready(300)
            self.d.ready(300)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc):
        self._stack.close()

    def _engine(self, name, role, node):
        return self._harness.engine(
            f"{name}-{self.name}",
            model=self._model,
            kv_transfer_config={
                "kv_connector": "KvpushConnector",
                "kv_connector_module_path": "kvpush_client.vllm.connector",
                "kv_role": role,
                "engine_id": f"{name}-{self.name}",
                "kv_load_failure_policy": self._policy,
                "kv_connector_extra_config": {"runtime_dir": str(node.runtime_dir)},
            },
            **(self._arguments | self._changes[name]),
        )

    @property
    def coordinates(self):
        """What a router knows of P beforehand."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"P-{self.name}",
            "remote_host": "127.0.0.1",
            "remote_port": self.p_node.port,
        }

    def prefill(self, tokens, **params):
        """P's leg, to its end."""
        return self.p.submit(tokens, max_tokens=1, params=SEND | params).result(DEADLINE)

    def one_after_the_other(self, tokens, max_tokens=8):
        """P first; what it answers goes to D as it is. D's output."""
        params = self.prefill(tokens).kv_transfer_params
        return self.d.submit(tokens, max_tokens=max_tokens, params=params).result(DEADLINE)

    def at_once(self, tokens, max_tokens=8):
        """Both legs under one transfer_id, D's first. Both requests."""
        named = {"transfer_id": uuid.uuid4().hex}
        on_d = self.d.submit(tokens, max_tokens=max_tokens, params=self.coordinates | named)
        return self.p.submit(tokens, max_tokens=1, params=SEND | named), on_d

    def settle(self):
        """Wait until nobody holds a block of either engine; raises AssertionError if that never comes."""
        for engine in (self.p, self.d):
            eventually(lambda engine=engine: free(engine), f"blocks of {engine.name} to come back")
            assert engine.stats().mismatches == ()


def free(engine):
    """Whether all blocks but the null block are free."""
    stats = engine.stats()
    return stats.free_blocks == stats.blocks - 1


def eventually(condition, what):
    """Ask until it is so; the engine answers between two steps, so there is nothing to be awakened by."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"


def right(output, tokens):
    """Whether an output is what the model answers when every cell is right."""
    return output.token_ids == reference(tokens, len(output.token_ids), VOCAB)
