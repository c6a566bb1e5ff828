# SPDX-License-Identifier: Apache-2.0
"""Two `vllm serve` behind routers: vllm-router as PyPI has it, which knows nothing of us, and our own."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from kvpushctl.demo.ports import free_port
from pairs.kit import WAIT, eventually
from testing.clockwork import serving
from testing.engines import BLOCK, PREFILL, answer, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(600)]


@contextlib.contextmanager
def process(log, command, env=None):
    """A program whose output goes to a file; ended in the end."""
    with log.open("wb") as out:
        running = subprocess.Popen(command, env={**os.environ, **(env or {})}, stdout=out, stderr=out)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def healthy(name, running, port, log):
    """Waits until a server answers GET /health."""

    def answers():
        assert running.poll() is None, f"{name} ended: {log.read_text(errors='replace')[-3000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as found:
                return found.status == 200
        except OSError:
            return False

    eventually(f"{name} is up", answers, 420)


def serve(folder, name, role, node, model, port):
    """`vllm serve` of the clockwork model with our connector, which vLLM finds by its plugin."""
    environment = serving.environment(folder / "plugins")
    transfer = {
        "kv_connector": "KvpushConnector",
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"runtime_dir": str(node.runtime_dir)},
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *serving.ARGUMENTS,
        *(
            "--port",
            str(port),
            f"--block-size={BLOCK}",
            "--max-model-len=2048",
            "--max-num-batched-tokens=64",
        ),
        *("--max-num-batched-tokens=64", "--kv-cache-memory-bytes", str(64 << 20)),
        "--served-model-name=clockwork",
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    own = {
        "VLLM_PLUGINS": f"{environment['VLLM_PLUGINS']},kvpush",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # it has /pause
    }
    return process(folder / f"{name}.log", command, environment | own)


@pytest.fixture(scope="module")
def servers(nodes, model, tmp_path_factory):
    """URLs of P and D."""
    a, b = nodes
    folder = tmp_path_factory.mktemp("servers")
    ports = free_port(), free_port()
    with (
        serve(folder, "served-P", "kv_producer", a, model, ports[0]) as p,
        serve(folder, "served-D", "kv_consumer", b, model, ports[1]) as d,
    ):
        healthy("P", p, ports[0], folder / "served-P.log")
        healthy("D", d, ports[1], folder / "served-D.log")
        yield [f"http://127.0.0.1:{port}" for port in ports]


def post(url, body):
    """The answer. Raises AssertionError with it where it is an error."""
    call = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=WAIT) as found:
            return json.load(found)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()}") from error


def complete(port, tokens, count):
    """The token ids that a router gives."""
    asked = {
        "model": "clockwork",
        "prompt": tokens,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return post(f"http://127.0.0.1:{port}/v1/completions", asked)["choices"][0]["token_ids"]


def test_a_pause_that_resets_the_cache_waits_for_what_a_handoff_holds(nodes, servers):
    """vLLM fails it, and stays paused, where a block is held that no request of its own holds."""
    p, node = servers[0], nodes[0]
    tokens = prompt(100, "nobody comes for it")
    leg = {"model": "clockwork", "prompt": tokens, "max_tokens": 1, "kv_transfer_params": dict(PREFILL)}
    post(f"{p}/v1/completions", leg)
    assert node.status().held.handoffs == 1
    assert post(f"{p}/pause?mode=abort&clear_cache=true", {}) == {"status": "paused"}
    assert node.status().held.handoffs == 0
    assert post(f"{p}/resume", {}) == {"status": "resumed"}


def check(nodes, port):
    """Prompts through a router are right and came by push."""
    node = nodes[1]
    for length in (40, 65, 300):
        landed = node.status().totals.landed
        tokens = prompt(length, port)
        assert complete(port, tokens, 6) == answer(tokens, 6)
        assert node.status().totals.landed == landed + 1


def test_an_off_the_shelf_router_works_unchanged(nodes, servers, tmp_path):
    port, log = free_port(), tmp_path / "router.log"
    command = [
        *(sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"),
        *("--kv-connector", "nixl", "--prefill", servers[0], "--decode", servers[1]),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
    ]
    with process(log, command) as router:
        healthy("vllm-router", router, port, log)
        check(nodes, port)


def test_our_router_dispatches_both_legs_at_once(nodes, servers, tmp_path):
    port, log = free_port(), tmp_path / "router.log"
    prefill = f"{servers[0]},engine=served-P,daemon=127.0.0.1:{nodes[0].port}"
    command = [
        *(sys.executable, "-m", "kvpush_router", "--port", str(port)),
        *("--prefill", prefill, "--decode", servers[1]),
    ]
    with process(log, command) as router:
        healthy("kvpush-router", router, port, log)
        check(nodes, port)
