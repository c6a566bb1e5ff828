# SPDX-License-Identifier: Apache-2.0
"""vLLM is imported here, once: it warns while it is imported, and warnings are errors in tests."""

import importlib
import importlib.util
import warnings

if importlib.util.find_spec("vllm.v1") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in (
            "vllm.v1.core.block_pool",
            "vllm.distributed.kv_transfer.kv_connector.factory",
            "vllm.v1.attention.backends.cpu_attn",
            "kvpush_client.vllm.connector",
        ):
            importlib.import_module(module)
