# SPDX-License-Identifier: Apache-2.0
"""kv_connector_extra_config, and who an engine is."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpush_client.items import Role
from kvpush_client.vllm.settings import Settings, SettingsError, identity_of, refuse_unsupported


def test_without_settings_the_folder_is_the_environments_or_the_systems():
    assert Settings.parse({}, {}).runtime_dir == Path("/run/kvpushd")
    assert Settings.parse({}, {"KVPUSHD_RUNTIME_DIR": "/tmp/k"}).runtime_dir == Path("/tmp/k")
    assert Settings.parse({"runtime_dir": "/tmp/x"}, {"KVPUSHD_RUNTIME_DIR": "/tmp/k"}).runtime_dir == Path(
        "/tmp/x"
    )


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"runtime_dri": "/x"}, "runtime_dri"),
        ({"runtime_dir": 3}, "runtime_dir"),
        ({"start_timeout": "soon"}, "start_timeout"),
        ({"start_timeout": -1}, "start_timeout"),
        ({"daemon_silence": 0}, "daemon_silence"),
        ({"lease": 0}, "lease"),
        ({"layer_groups": 0}, "layer_groups"),
        ({"layer_groups": True}, "layer_groups"),
    ],
)
def test_a_wrong_setting_is_named(extra, said):
    with pytest.raises(SettingsError, match=said):
        Settings.parse(extra, {})


def config(engine_id="engine", instance_id="1", rank=0, local_world_size=2, **parallel):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
        instance_id=instance_id,
        parallel_config=SimpleNamespace(
            rank=rank, world_size=2, local_world_size=local_world_size, **parallel
        ),
    )


def identity(role, **fields):
    return identity_of(config(**fields), role, {}, "")


def test_scheduler_and_workers_of_one_start_agree_on_the_launch():
    scheduler, worker = identity(Role.SCHEDULER), identity(Role.WORKER, rank=1)
    assert (scheduler.engine_id, scheduler.launch) == (worker.engine_id, worker.launch)
    assert (worker.rank, worker.world_size, worker.local_ranks) == (1, 2, 2)


def test_another_start_or_another_replica_is_another_launch():
    launches = {
        identity(Role.SCHEDULER).launch,
        identity(Role.SCHEDULER, instance_id="2").launch,
        identity(Role.SCHEDULER, engine_id="engine_dp1").launch,
    }
    assert len(launches) == 3


def test_context_parallelism_is_refused():
    with pytest.raises(SettingsError, match="decode_context_parallel_size is 2"):
        refuse_unsupported(config(decode_context_parallel_size=2))


def test_an_engine_over_several_nodes_is_refused():
    refuse_unsupported(config())
    with pytest.raises(SettingsError, match=r"1 of the engine's 2 ranks are on this node \(nnodes is 2\)"):
        refuse_unsupported(config(local_world_size=1, nnodes=2))
