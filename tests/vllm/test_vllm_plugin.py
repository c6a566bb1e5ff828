# SPDX-License-Identifier: Apache-2.0
"""How vLLM finds the connector."""

from importlib.metadata import entry_points
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.utils.func_utils import supports_kw

from kvpush_client.vllm.connector import KvpushConnector
from kvpush_client.vllm.cpu import allow_amx
from kvpush_client.vllm.plugin import MODULE, NAME, register


def test_the_name_is_enough_after_the_plugin_was_loaded_any_number_of_times():
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is KvpushConnector


def test_vllm_finds_the_plugin():
    [found] = [point for point in entry_points(group="vllm.general_plugins") if point.name == "kvpush"]
    assert found.load() is register


def test_the_module_path_works_too():
    config = SimpleNamespace(kv_connector=NAME, kv_connector_module_path=MODULE)
    assert KVConnectorFactory.get_connector_class(config) is KvpushConnector


def test_the_hybrid_cache_manager_stays_on():
    assert supports_hma(KvpushConnector)
    assert supports_kw(KvpushConnector, "kv_cache_config")


def test_asking_for_tiles_is_harmless_and_can_be_repeated():
    assert allow_amx() == allow_amx()
