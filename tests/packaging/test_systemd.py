# SPDX-License-Identifier: Apache-2.0
"""The units and the files beside them, checked by systemd's own programs and by the daemon's own parser."""

import configparser
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import trustme

from kvpushd import config
from kvpushd.__main__ import main

SYSTEMD = Path(__file__).parents[2] / "systemd"
EXAMPLE = SYSTEMD / "kvpushd.toml"
UNITS = ("kvpushd.service", "kvpushd@.service")
# What the example can't give the default of, since it differs from node to node or has none.
OF_THE_NODE = {"node", "advertised_host", "tls.ca", "tls.cert", "tls.key"}


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)


def section(unit: str, name: str = "Service") -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read_string((SYSTEMD / unit).read_text())
    return parser[name]


def uncommented(tmp_path: Path) -> Path:
    """The example with every setting in force."""
    file = tmp_path / "kvpushd.toml"
    file.write_text(re.sub(r"^#(?=[a-z_]+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE))
    return file


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_has_nothing_to_say_about_a_unit(unit: str, tmp_path: Path) -> None:
    # verify wants ExecStart's program to exist, and here it is not installed.
    text = (SYSTEMD / unit).read_text()
    (tmp_path / unit).write_text(
        text.replace("/opt/kvpushd/bin/kvpushd", shutil.which("true") or "/bin/true")
    )
    checked = run("systemd-analyze", "verify", "--man=no", tmp_path / unit)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_units_differ_only_in_whose_configuration_and_sockets_they_use() -> None:
    one, many = section("kvpushd.service"), section("kvpushd@.service")
    assert {key for key in one if one[key] != many.get(key)} == {
        "ExecStartPre",
        "ExecStart",
        "RuntimeDirectory",
    }
    assert set(one) == set(many)
    assert many["RuntimeDirectory"] == "kvpushd-%i"
    assert "/etc/kvpushd/%i.toml" in many["ExecStart"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_gives_what_registering_memory_and_draining_need(unit: str) -> None:
    service = section(unit)
    assert service["Type"] == "notify"
    assert service["User"] == service["Group"] == "kvpushd"
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["KillMode"] == "mixed"
    # NICs and GPUs are files in /dev; each of these, ProtectClock too, closes all that it does not name.
    assert {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock"}.isdisjoint(service)
    assert {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"} <= set(service["RestrictAddressFamilies"].split())
    drain = config.load([], {}).drain_timeout
    assert int(service["TimeoutStopSec"]) > drain


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("key", ["ExecStartPre", "ExecStart"])
def test_the_daemon_understands_the_flags_that_a_unit_gives(unit: str, key: str) -> None:
    program, *flags = section(unit)[key].split()
    assert program == "/opt/kvpushd/bin/kvpushd"
    given = vars(config.parser().parse_args(flags))
    assert given.pop("config").startswith("/etc/kvpushd/")
    assert given == ({"check_config": True} if key == "ExecStartPre" else {})


def test_the_user_and_the_folders_are_made_on_a_bare_system(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: users and folders of another owner are made")
    (tmp_path / "etc").mkdir()
    users = run("systemd-sysusers", f"--root={tmp_path}", SYSTEMD / "kvpushd.sysusers")
    assert users.returncode == 0, users.stderr
    folders = run("systemd-tmpfiles", "--create", f"--root={tmp_path}", SYSTEMD / "kvpushd.tmpfiles")
    assert (folders.returncode, folders.stderr) == (0, "")
    name, _, uid, gid, *_ = (tmp_path / "etc/passwd").read_text().split(":")
    group, _, group_id, *_ = (tmp_path / "etc/group").read_text().split(":")
    assert (name, group, gid) == ("kvpushd", "kvpushd", group_id.strip())
    assert int(uid) > 0
    made = (tmp_path / "etc/kvpushd/tls").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o777) == (0, int(gid), 0o750)


def test_sysusers_and_tmpfiles_are_understood_without_root(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    users = run("systemd-sysusers", "--dry-run", f"--root={tmp_path}", SYSTEMD / "kvpushd.sysusers")
    assert users.returncode == 0, users.stderr
    assert "user 'kvpushd'" in users.stderr
    for line in (SYSTEMD / "kvpushd.tmpfiles").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"d /etc/kvpushd(/\w+)?\s+0750 root kvpushd -", line)


def test_the_example_is_accepted_by_the_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = trustme.CA()
    settings = config.load([], {"RUNTIME_DIRECTORY": "/run/kvpushd"})
    paper = authority.issue_cert(settings.node, settings.advertised_host)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    paper.cert_chain_pems[0].write_to_path(str(tmp_path / "node.pem"))
    paper.private_key_pem.write_to_path(str(tmp_path / "node.key"))
    example = tmp_path / "kvpushd.toml"
    example.write_text(EXAMPLE.read_text().replace("/etc/kvpushd/tls", str(tmp_path)))
    assert main(["--config", str(example), "--check-config"], {"RUNTIME_DIRECTORY": "/run/kvpushd"}) == 0
    shown, said = capsys.readouterr()
    assert said == ""
    assert re.search(rf'^tls.ca = "{tmp_path}/ca.pem" +# {re.escape(str(example))}$', shown, re.MULTILINE)
    assert re.search(r'^runtime_dir = "/run/kvpushd" +# default$', shown, re.MULTILINE)


def test_the_example_names_every_setting_with_its_default(tmp_path: Path) -> None:
    env = {"RUNTIME_DIRECTORY": "/run/kvpushd"}
    defaults = config.load([], env).flat()
    loaded = config.read(["--config", str(uncommented(tmp_path))], env)
    fields = {field for field in defaults if not field.startswith("faults.")}
    assert set(loaded.sources) == fields
    shown = loaded.settings.flat()
    assert {field: shown[field] for field in fields - OF_THE_NODE} == {
        field: defaults[field] for field in fields - OF_THE_NODE
    }


def test_the_example_explains_every_setting() -> None:
    lines = EXAMPLE.read_text().splitlines()
    setting = re.compile(r"#?[a-z_]+ = ")
    for before, line in itertools.pairwise(lines):
        if setting.match(line):
            assert before.startswith("# ") or setting.match(before), line
