# SPDX-License-Identifier: Apache-2.0
"""Where settings come from, which of them wins, and what is said when one is wrong."""

from __future__ import annotations

import datetime
import json
import os
import tomllib
from pathlib import Path

import pytest
import trustme

from kvpushd import __main__, defaults
from kvpushd.config import (
    ConfigErrors,
    describe,
    load,
    read,
)
from kvpushd.settings import Settings, options

ROOT = Path(__file__).resolve().parents[1]


def toml(folder: Path, text: str) -> str:
    file = folder / "kvpushd.toml"
    file.write_text(text)
    return str(file)


def complaints(argv: list[str], env: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigErrors) as raised:
        load(argv, env)
    return list(raised.value.lines)


@pytest.mark.parametrize(
    ("file", "env", "flags", "lease", "source"),
    [
        ("", {}, [], 30.0, "default"),
        ("lease = 1", {}, [], 1.0, "FILE"),
        ("lease = 1", {"KVPUSHD_LEASE": "2"}, [], 2.0, "environment KVPUSHD_LEASE"),
        ("lease = 1", {"KVPUSHD_LEASE": "2"}, ["--lease", "3"], 3.0, "flag --lease"),
        ("", {"KVPUSHD_LEASE": "2"}, ["--lease=3"], 3.0, "flag --lease"),
        ("lease = 1", {}, ["--lease", "3"], 3.0, "flag --lease"),
    ],
)
def test_flags_win_over_the_environment_over_the_file_over_the_defaults(
    tmp_path: Path, file: str, env: dict[str, str], flags: list[str], lease: float, source: str
) -> None:
    path = toml(tmp_path, file)
    loaded = read(["--config", path, *flags], env)
    assert loaded.settings.lease == lease
    assert loaded.sources.get("lease", "default") == source.replace("FILE", path)


def test_one_table_may_be_filled_from_all_sources(tmp_path: Path) -> None:
    path = toml(tmp_path, '[tls]\nca = "/a"\ncert = "/b"\n')
    settings = load(["--config", path, "--tls-key", "/c"], {"KVPUSHD_TLS_CERT": "/d"})
    assert (str(settings.tls.ca), str(settings.tls.cert), str(settings.tls.key)) == ("/a", "/d", "/c")


def test_the_environment_names_the_file_unless_a_flag_does(tmp_path: Path) -> None:
    path = toml(tmp_path, 'node = "from-env-file"')
    assert load([], {"KVPUSHD_CONFIG": path}).node == "from-env-file"
    assert load(["--config", os.devnull, "--node", "x"], {"KVPUSHD_CONFIG": path}).node == "x"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 2.0), ("0.5", 0.5), ("500ms", 0.5), ("30s", 30.0), ("2m", 120.0), ("1h", 3600.0)],
)
def test_durations_are_seconds_or_say_their_unit(text: str, seconds: float) -> None:
    assert load(["--lease", text], {}).lease == seconds


@pytest.mark.parametrize(("text", "size"), [("8388608", 8 << 20), ("8MiB", 8 << 20), ("8MB", 8_000_000)])
def test_sizes_are_bytes_or_say_their_unit(text: str, size: int) -> None:
    assert load(["--window-bytes", text], {}).window_bytes == size


def test_lists_and_variables_are_given_as_text_outside_of_the_file(tmp_path: Path) -> None:
    inside = toml(tmp_path, 'allowed_peers = ["a.*", "b"]\n[ucx.env]\nUCX_A = "1"\nUCX_B = "x=y"\n')
    outside = ["--allowed-peers", "a.*, b", "--ucx-env", "UCX_A=1,UCX_B=x=y"]
    for settings in (load(["--config", inside], {}), load(outside, {})):
        assert settings.allowed_peers == ("a.*", "b")
        assert settings.ucx.env == {"UCX_A": "1", "UCX_B": "x=y"}


@pytest.mark.parametrize("argv", [["--insecure-peers"], ["--insecure-peers", "true"], ["--insecure-peers=1"]])
def test_a_switch_needs_no_value(argv: list[str]) -> None:
    assert load(argv, {}).insecure_peers


def test_no_setting_is_insecure_or_faulty_by_default() -> None:
    settings = load([], {})
    assert not settings.insecure_peers
    assert not settings.tls.given
    assert not settings.faults.corrupt_writes
    assert settings.http_host == "127.0.0.1"


def test_settings_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load([], {}).lease = 1.0


@pytest.mark.parametrize(
    ("file", "env", "flags", "expected"),
    [
        ("leas = 1", {}, [], "leas: there is no such setting; did you mean lease? (from FILE)"),
        (
            "[limit]\nhistory = 1",
            {},
            [],
            "limit.history: there is no such setting; did you mean limits.history? (from FILE)",
        ),
        ("[zzz]\nq = 1", {}, [], "zzz.q: there is no such setting; kvpushd --help lists what there is"),
        (
            "",
            {"KVPUSHD_HTTP_PROT": "1"},
            [],
            "KVPUSHD_HTTP_PROT: there is no such setting; did you mean KVPUSHD_HTTP_PORT? (from environment)",
        ),
        ('lease = "soon"', {}, [], 'lease = "soon": '),
        ("pinned_share = 3", {}, [], "less than or equal to 1; allowed: more than 0, at most 1 (from FILE)"),
        (
            "",
            {"KVPUSHD_PEER_PORT": "70000"},
            [],
            "allowed: at least 0, at most 65535 (from environment KVPUSHD_PEER_PORT)",
        ),
        (
            "",
            {},
            ["--log-level", "loud"],
            "input should be 'debug', 'info', 'warning' or 'error' (from flag --log-level)",
        ),
        (
            "",
            {},
            ["--socket-mode", "999"],
            'socket_mode = "999": expected an octal mode, such as "0660" (from flag --socket-mode)',
        ),
        (
            "socket_mode = 440",
            {},
            [],
            'socket_mode = 440: expected an octal mode, such as "0660" (from FILE)',
        ),
        ("", {}, ["--advertised-host="], 'advertised_host = "": expected a host'),
        ("", {}, ["--advertised-host=a b"], 'advertised_host = "a b": expected a host'),
        ('advertised_host = "0.0.0.0"', {}, [], 'advertised_host = "0.0.0.0": expected a host that other'),
        ("", {}, ["--advertised-host=::"], 'advertised_host = "::": expected a host that other'),
        ("", {}, ["--peer-host="], 'peer_host = "": expected a host'),
        ("", {}, ["--http-host", "http://x"], 'http_host = "http://x": expected a host'),
        ("", {}, ["--otlp-endpoint=foo"], 'otlp_endpoint = "foo": expected a URL'),
        ("", {}, ["--otlp-endpoint=http://"], 'otlp_endpoint = "http://": expected a URL'),
        ("", {}, ["--otlp-endpoint=http://a b:1"], 'otlp_endpoint = "http://a b:1": expected a host'),
        ("", {}, ["--otlp-endpoint=http://a:99999"], 'otlp_endpoint = "http://a:99999": port out of range'),
        (
            '[ucx.env]\n"A=B" = "1"',
            {},
            [],
            "ucx.env = {A=B = \"1\"}: 'A=B' is no variable's name (from FILE)",
        ),
        ('[ucx.env]\n"" = "1"', {}, [], "'' is no variable's name (from FILE)"),
        ('[ucx.env]\nA = "x\\u0000y"', {}, [], "expected text, without NUL and in UTF-8 (from FILE)"),
        ('runtime_dir = "/a\\u0000b"', {}, [], "expected text, without NUL and in UTF-8 (from FILE)"),
        ("", {"KVPUSHD_RUNTIME_DIR": "/\udcff"}, [], "expected text, without NUL and in UTF-8 (from env"),
        ('tls.ca = "a\\u0000b"\ntls.cert = "c"\ntls.key = "k"', {}, [], "expected text, without NUL"),
        ("", {}, ["--ucx-env", "A"], 'ucx.env = "A": expected NAME=value,NAME=value'),
        ("[ucx.env]\nA = 1", {}, [], "ucx.env = 1: "),
        ("lease = [", {}, [], "FILE: "),
        ("", {}, ["--node", "a b"], 'node = "a b": '),
        ("", {}, ["--socket-group", "no such group"], "socket_group: this host has no group 'no such group'"),
        ('[tls]\nca = "/x"', {}, [], "tls: cert and key missing: give ca, cert and key, or none (from FILE)"),
        ("", {}, ["--window-bytes", "1GiB"], "peer_bytes_in_flight is 268435456, less than window_bytes"),
        (
            "",
            {"KVPUSHD_INSECURE_PEERS": "true"},
            ["--tls-ca", "/a", "--tls-cert", "/b", "--tls-key", "/c"],
            "insecure_peers = true and [tls] are both given: choose one",
        ),
        (
            "[faults]\ncorrupt_writes = true",
            {},
            [],
            "KVPUSHD_ALLOW_FAULTS=1 to mean it (faults.corrupt_writes from FILE)",
        ),
    ],
)
def test_one_line_says_what_is_wrong_and_where_it_came_from(
    tmp_path: Path, file: str, env: dict[str, str], flags: list[str], expected: str
) -> None:
    path = toml(tmp_path, file)
    (line,) = complaints(["--config", path, *flags], env)
    assert expected.replace("FILE", path) in line
    assert "\n" not in line


def test_all_that_is_wrong_is_said_at_once() -> None:
    lines = complaints(["--lease", "-1", "--http-port", "99999"], {})
    assert [line.split(" = ")[0] for line in lines] == ["http_port", "lease"]


def test_what_is_unknown_hides_nothing_that_is_wrong() -> None:
    lines = complaints(["--lease", "-1"], {"KVPUSHD_LEAS": "1"})
    assert [line.split(" = ")[0].partition(":")[0] for line in lines] == ["KVPUSHD_LEAS", "lease"]


def test_a_file_that_is_not_there_is_said_with_its_name() -> None:
    assert complaints(["--config", "/nowhere/x.toml"], {}) == ["/nowhere/x.toml: No such file or directory"]


def test_faults_are_let_in_by_those_who_mean_it() -> None:
    assert load(["--faults-corrupt-writes"], {"KVPUSHD_ALLOW_FAULTS": "1"}).faults.corrupt_writes


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"RUNTIME_DIRECTORY": "/run/kvpushd-a"}, "/run/kvpushd-a"),
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b"}, "/run/a"),
    ],
)
def test_the_runtime_directory_is_the_one_that_systemd_gives(env: dict[str, str], expected: str) -> None:
    assert str(defaults.runtime_dir(env)) == expected


def test_the_runtime_directory_is_the_systems_the_users_or_below_tmp() -> None:
    writable = os.access("/run/kvpushd" if Path("/run/kvpushd").exists() else "/run", os.W_OK)
    users = defaults.runtime_dir({"XDG_RUNTIME_DIR": "/run/user/7"})
    assert str(users) == ("/run/kvpushd" if writable else "/run/user/7/kvpushd")
    assert str(defaults.runtime_dir({})) == ("/run/kvpushd" if writable else f"/tmp/kvpushd-{os.getuid()}")


def test_the_advertised_host_is_where_the_port_is_or_an_address_that_is_no_wildcard() -> None:
    assert defaults.advertised_host("10.1.2.3") == "10.1.2.3"
    assert defaults.advertised_host("0.0.0.0") not in ("", "0.0.0.0", "::")


def test_check_config_prints_what_is_in_force_and_where_it_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = toml(tmp_path, "lease = 7")
    assert __main__.main(["--check-config", "--config", path, "--http-port", "2"], {}) == 0
    printed = capsys.readouterr().out.splitlines()
    found = {line.split(" = ")[0]: line for line in printed}
    assert list(found) == [option.field for option in options()]
    assert found["lease"].split() == ["lease", "=", "7.0", "#", path]
    assert found["http_port"].endswith("# flag --http-port")
    assert found["peer_port"].endswith("# default")


def test_check_config_prints_one_line_per_error_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--check-config", "--lease", "x", "--http-port", "x"], {}) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(" = ")[0] for line in captured.err.splitlines()] == [
        "kvpushd: http_port",
        "kvpushd: lease",
    ]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [(None, "{ca}: No such file or directory"), ("no PEM", "{ca}, {cert} and {cert} do not fit each other")],
)
def test_check_config_reads_the_files_that_settings_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, wrong: str
) -> None:
    ca, cert = tmp_path / "ca.pem", tmp_path / "cert.pem"
    if text is not None:
        ca.write_text(text)
        cert.write_text(text)
    files = ["--tls-ca", str(ca), "--tls-cert", str(cert), "--tls-key", str(cert)]
    assert __main__.main(["--check-config", *files], {}) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvpushd: tls: {wrong.format(ca=ca, cert=cert)}")


def test_check_config_holds_the_nodes_certificate_against_what_peers_will_ask_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, now = trustme.CA(), datetime.datetime.now(datetime.UTC)
    files = {part: tmp_path / f"{part}.pem" for part in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    flags = ["--node=n.nodes", "--advertised-host=10.0.0.7"]
    flags += [f"--tls-{part}={file}" for part, file in files.items()]

    def check(*names: str, days: float = 1000) -> tuple[int, str]:
        made = authority.issue_cert(*names, not_after=now + datetime.timedelta(days=days))
        made.cert_chain_pems[0].write_to_path(str(files["cert"]))
        made.private_key_pem.write_to_path(str(files["key"]))
        status = __main__.main(["--check-config", *flags], {})
        captured = capsys.readouterr()
        assert bool(captured.out) is (status == 0)
        return status, captured.err

    assert check("n.nodes", "10.0.0.7") == (0, "")
    for names, days, status, words in (
        (("n.nodes", "10.0.0.7"), -1, 2, "kvpushd: tls: {cert}, or what signed it, does not hold"),
        (("m.nodes", "10.0.0.7"), 1000, 2, "kvpushd: tls: {cert} is for 'm.nodes', '10.0.0.7', and this"),
        (("n.nodes", "10.0.0.7"), 3, 0, "kvpushd: warning: tls: {cert} expires "),
        (("n.nodes",), 1000, 0, "kvpushd: warning: tls: {cert} is for 'n.nodes', without advertised_host"),
    ):
        found, said = check(*names, days=days)
        assert (found, said.count("\n")) == (status, 1), said
        assert said.startswith(words.format(**files))


def test_what_check_config_prints_is_a_file_that_means_the_same(tmp_path: Path) -> None:
    first = read(["--insecure-peers", "--ucx-env", "A=1", "--lease", "90ms", "--allowed-peers", "a,b"], {})
    lines = [line for line in describe(first).splitlines() if not line.startswith("tls.")]
    again = read(["--config", toml(tmp_path, "\n".join(lines))], {})
    assert again.settings == first.settings


def test_every_setting_has_words_and_three_names_of_its_own() -> None:
    every = options()
    assert all(option.help for option in every)
    for names in ({o.field for o in every}, {o.variable for o in every}, {o.flag for o in every}):
        assert len(names) == len(every)


def test_the_schema_of_the_settings_is_made_without_the_daemon() -> None:
    assert "lease" in json.dumps(Settings.model_json_schema())


def test_the_example_file_names_every_setting_and_its_default() -> None:
    example = (ROOT / "systemd" / "kvpushd.toml").read_text()
    # Comments of the form `#name = value` are settings at their defaults.
    spoken = "\n".join(
        line.removeprefix("#") if line[1:2].isalpha() else line for line in example.splitlines()
    )
    tables = tomllib.loads(spoken)
    named = {
        f"{name}.{inner}" if isinstance(value, dict) and inner else name
        for name, value in tables.items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assert named == {option.field for option in options() if not option.field.startswith("faults.")}
